"""Whether a worker is alive: a thread of it says so, or else the processor that it uses. One that shows neither for
`SILENT_S` hangs, as a process does that was stopped (SIGSTOP) or frozen.

A worker may compute for long where Python lets no thread run, and may start slowly: it uses the processor then. What
stops everything at once (a laptop that sleeps, a job that the batch system suspends) is a pause and nobody's fault.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

BEAT_S = 2.0
SILENT_S = 30.0
PAUSE_S = 10.0
"""Where the launcher has not looked, or no worker has shown anything, for so long, all of them are counted anew."""
LOOK_S = 1.0
EXCUSED = ("tracing-stop", "disk-sleep")
"""States of a process (psutil's names) that explain why nothing is heard: a debugger holds it; a disk does not answer,
and will or will not for all."""

Signs = tuple[int, float]
"""When a worker's file was touched, in ns, and the seconds of processor time that it has used."""


def get_beat_path(folder: Path, rank: int) -> Path:
    """What a rank touches while it lives."""
    return folder / f"rank-{rank:04}.beat"


def start_beating(path: Path) -> None:
    """Touches `path` every `BEAT_S` for as long as this process lives and the folder is there."""
    with contextlib.suppress(OSError):
        path.touch()

    def beat() -> None:
        with contextlib.suppress(OSError):  # The launcher is gone, and its folder with it.
            while True:
                time.sleep(BEAT_S)
                os.utime(path)

    threading.Thread(target=beat, name="optune_beat", daemon=True).start()


class Listener:
    """The launcher's ear for the workers of this machine.

    `pids`: by rank. `has_others`: whether other machines have workers too. They wait for the ones here, so a pause of
    all those here is no excuse then.
    """

    def __init__(
        self,
        folder: Path,
        pids: Mapping[int, int],
        *,
        has_others: bool = False,
        clock: Callable[[], float] = time.monotonic,
        read_signs: Callable[[Path, int], Signs] | None = None,
    ) -> None:
        self._folder, self._pids, self._has_others = folder, dict(pids), has_others
        self._clock, self._read_signs = clock, read_signs or _read_signs
        self._looked = clock()
        self._signs: dict[int, Signs] = {}
        self._heard = dict.fromkeys(pids, self._looked)

    def find_silent(self, running: Iterable[int]) -> list[int]:
        """Of the ranks that still run, those that have shown no sign of life for `SILENT_S`. Cheap to call often."""
        now, running = self._clock(), list(running)
        if now - self._looked < LOOK_S:
            return []
        was_away, self._looked = now - self._looked > PAUSE_S, now
        for rank in running:
            signs = self._read_signs(get_beat_path(self._folder, rank), self._pids[rank])
            if signs != self._signs.get(rank):
                self._signs[rank], self._heard[rank] = signs, now
        is_pause = not self._has_others and all(now - self._heard[rank] > PAUSE_S for rank in running)
        if was_away or is_pause:
            self._heard = dict.fromkeys(self._heard, now)
        return [rank for rank in running if now - self._heard[rank] > SILENT_S and self.describe(rank) not in EXCUSED]

    def describe(self, rank: int) -> str:
        """The state of a rank's process in psutil's words, such as `stopped`."""
        import psutil

        try:
            return psutil.Process(self._pids[rank]).status()
        except psutil.Error:
            return "gone"


def describe_silence(state: str) -> tuple[str, str]:
    """What is told of a rank that was found silent, and the way out."""
    message = f"has not answered for {SILENT_S:.0f} s"
    if state == "stopped":
        return f"{message}: its process is stopped, as by SIGSTOP", "whoever stops processes has to stop all of a run"
    return (
        f"{message}: its process neither computes nor lets its threads run",
        "is it frozen, or its machine overloaded?",
    )


def _read_signs(path: Path, pid: int) -> Signs:
    import psutil

    touched, used = 0, 0.0
    with contextlib.suppress(OSError):
        touched = path.stat().st_mtime_ns
    with contextlib.suppress(psutil.Error):
        times: Any = psutil.Process(pid).cpu_times()
        used = times.user + times.system
    return touched, used
