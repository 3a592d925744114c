"""Signals become requests that the loop reads between two steps; nothing is interrupted in the middle of an update."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 0.3
"""A stopping signal that comes again so soon is the same one: `timeout` sends it to a process and to its group."""
RELAY_S = 2.0
"""The same behind a launcher that passes on what the process, being in its group or job, may have got already."""


class Requests:
    """What signals have asked for since the context was entered.

    - `stop`: the first SIGINT or SIGTERM. It is answered on stderr at once; the second one ends the process there and
      then. (At a Python prompt or in a notebook it is the usual KeyboardInterrupt.) The same signal again within
      `ECHO_S`, or `RELAY_S` where a launcher relays signals (`is_relayed`), is no second one.
    - `take_save()`: whether SIGUSR1 came since the last call.

    Of several processes that all get it, one `answers`.

    `exit_code` is 128 plus the number of the stopping signal (130, 143), 0 without one; a second one exits with it too.
    """

    def __init__(self, *, answers: bool = True, is_relayed: bool = False) -> None:
        self.stop: signal.Signals | None = None
        self._answers, self._echo_s = answers, RELAY_S if is_relayed else ECHO_S
        self._save = False
        self._before: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def __enter__(self) -> Requests:
        self._watch = None if hasattr(sys, "ps1") else _Watch(self._answers, self._echo_s)
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._on_stop)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._watch is not None:
            self._watch.close()

    @property
    def exit_code(self) -> int:
        return 0 if self.stop is None else 128 + self.stop

    def take_save(self) -> bool:
        """True once after each SIGUSR1."""
        save, self._save = self._save, False
        return save

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._watch is None:
            if self.stop is not None:
                raise KeyboardInterrupt
            if self._answers:
                _answer(number)
        self.stop = self.stop or signal.Signals(number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True


class _Watch:
    """A thread that hears of signals at once: Python's own handlers wait until the main thread is back from a call into
    C, which in a hung collective is never."""

    def __init__(self, answers: bool, echo_s: float) -> None:
        self._answers, self._echo_s = answers, echo_s
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="optune-signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        first, when = 0, 0.0
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number not in STOPPING:
                    continue
                if not first:
                    first, when = number, time.monotonic()
                    if self._answers:
                        _answer(number)
                elif number != first or time.monotonic() - when > self._echo_s:
                    os._exit(128 + number)

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)


def _answer(number: int) -> None:
    """Straight to the descriptor: a handler may have come in the middle of a write to `sys.stderr`."""
    name = signal.Signals(number).name
    text = f"{name}: the run is saved and left after this step; a second signal stops it at once\n"
    with contextlib.suppress(OSError):
        # A progress bar has left the cursor at the end of its line.
        os.write(2, (f"\n{text}" if os.isatty(2) else text).encode())
