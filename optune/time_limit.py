"""`max_time`: how long a run may take by the wall clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from optune.errors import ConfigError


class TimeLimit:
    """Counts from the moment that it is made: make it first, so that loading counts too. `text` None is no limit."""

    def __init__(
        self, text: str | None, *, where: str = "max_time", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = parse_duration(text, where=where)
        self._clock = clock
        self._began = clock()

    def leaves(self, needed_s: float) -> bool:
        """Whether `needed_s` seconds are left."""
        return self._limit_s is None or self._clock() - self._began + needed_s <= self._limit_s


def parse_duration(text: str | None, *, where: str) -> float | None:
    """Seconds: `90s`, `30m`, `1h30m`, `2d`, `01:30:00`, `1-12:00:00` or a plain number of seconds. None stays None."""
    if text is None:
        return None
    clock = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    if clock:
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    elif units and text:
        days, hours, minutes, seconds = (float(part or 0) for part in units.groups())
        total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    else:
        total = 0.0
    if total <= 0:
        raise ConfigError(f"{text!r} is not a length of time", where=where, hint="such as 90s, 30m, 1h30m or 01:30:00")
    return total
