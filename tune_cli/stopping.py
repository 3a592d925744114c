"""Signals before a run takes them over, and after it has let go of them: there is nothing to save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 143
"""128 + SIGTERM: what a shell reports."""

_AGAIN_S = 0.05


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds the command as Ctrl-C does: started processes end, what was set aside is cleared."""


class HungUp(KeyboardInterrupt):
    """SIGHUP: the launcher gives this process up, because another one has failed; there is nothing to save."""


@contextmanager
def signals_unwind(*, hangup: bool = False) -> Iterator[None]:
    """SIGINT and SIGTERM raise `KeyboardInterrupt` and `Terminated`; SIGUSR1, which asks a run to save, does no harm.

    With `hangup`, SIGHUP raises `HungUp`. Outside the main thread, where Python takes no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGINT: _unwind, signal.SIGTERM: _unwind, signal.SIGUSR1: lambda number, frame: None}
    if hangup:
        handlers[signal.SIGHUP] = _unwind
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> None:
    # An exception inside `import torch` passes through C++ that does not know it, and aborts the process.
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    raise {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}.get(signal.Signals(number), KeyboardInterrupt)
