"""Signals before a run takes them over, and after it has let go of them: there is nothing to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 143
"""128 + SIGTERM: what a shell reports."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds the command as Ctrl-C does: started processes end, what was set aside is cleared."""


@contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM raises `Terminated` and SIGUSR1, which asks a run to save, does no harm. Outside the main thread, where
    Python takes no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _unwind),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, frame: None),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
