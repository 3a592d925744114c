"""Signals before a run takes them over, and after it has let go of them: there is nothing to save."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 143
"""128 + SIGTERM: what a shell reports."""

_AGAIN_S = 0.05
_SAME_S = 2.0
"""For so long, further signals mean what the first one has said."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds the command as Ctrl-C does: started processes end, what was set aside is cleared."""


class HungUp(KeyboardInterrupt):
    """SIGHUP: the launcher gives this process up, because another one has failed; there is nothing to save."""


@contextmanager
def signals_unwind(*, is_worker: bool = False) -> Iterator[None]:
    """SIGINT and SIGTERM raise `KeyboardInterrupt` and `Terminated`; SIGUSR1, which asks a run to save, does no harm.

    A worker of a launcher, which raises `HungUp` for SIGHUP, is let finish once it was asked to stop: it has its end to
    report, and a launcher that dies asks with one signal for each of its threads. Outside the main thread, where Python
    takes no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[KeyboardInterrupt] = []
    asked_at = -math.inf

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if _comes_again(number) or (is_worker and time.monotonic() - asked_at < _SAME_S):
            return
        asked_at = time.monotonic()
        kinds = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
        raised.append(kinds.get(signal.Signals(number), KeyboardInterrupt)())
        raise raised[-1]

    handlers = {signal.SIGINT: unwind, signal.SIGTERM: unwind, signal.SIGUSR1: lambda number, frame: None}
    if is_worker:
        handlers[signal.SIGHUP] = unwind
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except Exception as error:
        # Code in C that calls Python may make an error of its own of what a signal raised there, as torch.asarray does.
        if raised:
            raise raised[-1] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if raised and is_worker else handler)


def _comes_again(number: int) -> bool:
    """Sends the signal again a little later where it cannot be heard yet: an exception inside `import torch` passes
    through C++ that does not know it, and aborts the process."""
    if not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        return False
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True
