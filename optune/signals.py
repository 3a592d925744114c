"""Signals become requests that the loop reads between two steps; nothing is interrupted in the middle of an update."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Requests:
    """What signals have asked for since the context was entered.

    - `stop`: the first SIGINT or SIGTERM; the second one does at once what it did before the context was entered.
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
        self._restore(*self._before)

    @property
    def exit_code(self) -> int:
        return 0 if self.stop is None else 128 + self.stop

    def take_save(self) -> bool:
        """True once after each SIGUSR1."""
        save, self._save = self._save, False
        return save

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = self.stop or signal.Signals(number)
        # The next one must not wait for a step that may never end.
        self._restore(*STOPPING)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
