"""Signals become requests that the loop reads between two steps; nothing is interrupted in the middle of an update."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Requests:
    """What signals have asked for since the context was entered.

    - `stop`: the first SIGINT or SIGTERM. It is answered on stderr at once. The second one ends the process there and
      then, by the system's own hand: Python's would wait for a call into C that may never come back. (At a Python
      prompt or in a notebook, a second SIGINT is the usual KeyboardInterrupt.)
    - `take_save()`: whether SIGUSR1 came since the last call.

    `exit_code` is 128 plus the number of the stopping signal (130, 143), 0 without one.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self._save = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._on_stop)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def exit_code(self) -> int:
        return 0 if self.stop is None else 128 + self.stop

    def take_save(self) -> bool:
        """True once after each SIGUSR1."""
        save, self._save = self._save, False
        return save

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = signal.Signals(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler if hasattr(sys, "ps1") else signal.SIG_DFL)
        _answer(f"{self.stop.name}: the run is saved and left after this step; a second signal stops it at once")

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True


def _answer(text: str) -> None:
    """Straight to the descriptor: a handler may have come in the middle of a write to `sys.stderr`."""
    with contextlib.suppress(OSError):
        # A progress bar has left the cursor at the end of its line.
        os.write(2, (f"\n{text}\n" if os.isatty(2) else f"{text}\n").encode())
