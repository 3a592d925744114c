"""What a person sees while a run trains: a progress bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from optune.metrics.measure import format_rate, format_time, format_value

_BAR = "step {n_fmt}/{total_fmt} |{bar}| {desc}"


@dataclass
class Shown:
    """The numbers of the last logged step, as they are shown."""

    loss: float
    lr: float
    tokens_per_s: float
    peak_memory_gib: float

    def short(self, left_s: float | None) -> str:
        """About 56 columns, most wanted first: a narrow terminal cuts off the end."""
        left = f" {format_time(left_s)} left" if left_s is not None else ""
        rate, memory = format_rate(self.tokens_per_s), f"{self.peak_memory_gib:.2f}"
        return f"loss {format_value(self.loss)} lr {self.lr:.1e} {rate} tok/s {memory} GiB{left}"


class Progress:
    """A bar when standard error is a terminal; otherwise plain lines for logged steps, no more than a person can use.

    Lines come at most once a second at first, and less often the longer a run lasts, up to every 30 seconds; the first
    and the last step always have one. On a terminal the same lines go to the run's log alone.
    """

    def __init__(self, total_steps: int, first_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._first = first_step
        self._clock = clock
        self._start = self._last_line = clock()
        self._bar: Any = None
        terminal = getattr(sys.stderr, "terminal", sys.stderr)
        if terminal.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=terminal,
                bar_format=_BAR,
                dynamic_ncols=True,
                leave=True,
                mininterval=0.1,
                miniters=1,
            )
        self._log_only: Callable[[str], None] | None = getattr(sys.stderr, "log_only", None)

    def step(self, step: int, shown: Shown | None, left_s: float | None) -> None:
        """After each step; `shown` when it was logged."""
        if self._bar is not None:
            if shown is not None:
                self._bar.set_description_str(shown.short(left_s), refresh=False)
            self._bar.update(step - self._bar.n)
        if shown is not None and self._is_due(step):
            line = f"step {step}/{self._total} {shown.short(left_s)}"
            if self._bar is None:
                self.say(line)
            elif self._log_only is not None:
                self._log_only(line)

    def _is_due(self, step: int) -> bool:
        now = self._clock()
        wait = min(30.0, max(1.0, (now - self._start) / 100))
        if now - self._last_line < wait and step not in (self._first + 1, self._total):
            return False
        self._last_line = now
        return True

    def doing(self, what: str | None) -> None:
        """Say on the bar what is going on beside training, None when it is over."""
        if self._bar is not None:
            self._bar.bar_format = _BAR if what is None else _BAR.replace("{desc}", what)
            self._bar.refresh()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        with tqdm.external_write_mode(file=getattr(sys.stderr, "terminal", sys.stderr)):
            sys.stderr.write(text + "\n")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
