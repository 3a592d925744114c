"""What asks a run to save or to leave (a signal, the clock, a save that failed), heard by all its processes alike.

A process that left a step earlier than the others would leave them waiting for its gradients. So what one of them is
asked rides along with sums that a step takes anyway, and all act on it after the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from optune.distributed import Processes
from optune.signals import STOPPING, Requests


class Hearing:
    """What this process, alone, is asked now; of several, what any of them had been asked by the last sum.

    `is_late()` says whether the time is over, `has_failed()` whether a save in the background went wrong; both of this
    process.
    """

    def __init__(
        self,
        processes: Processes,
        requests: Requests,
        *,
        is_late: Callable[[], bool],
        has_failed: Callable[[], bool],
    ) -> None:
        self._processes, self._requests = processes, requests
        self._is_alone = processes.world_size == 1
        self._is_late, self._has_failed = is_late, has_failed
        self._stop: signal.Signals | None = None
        self._save = self._late = self._failed = self._was_heard = False

    @property
    def stop(self) -> signal.Signals | None:
        """The signal that asks for the end."""
        return self._requests.stop if self._is_alone else self._stop

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return self._is_late() if self._is_alone else self._late

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background went wrong."""
        return self._has_failed() if self._is_alone else self._failed

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        if self._is_alone:
            return self._requests.take_save()
        save, self._save = self._save, False
        return save

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """`numbers` summed over the ranks that see different rows; all processes call it together."""
        if self._is_alone:
            return list(numbers)
        own = [*(self._requests.stop is number for number in STOPPING), self._requests.take_save()]
        own += [self._is_late(), self._has_failed()]
        sums = self._processes.sum([*numbers, *map(float, own)], everywhere=len(own))
        *stops, saves, late, failed = sums[len(numbers) :]
        if self._stop is None:
            self._stop = next((number for number, count in zip(STOPPING, stops, strict=True) if count), None)
        self._save, self._late, self._failed = self._save or saves > 0, late > 0, self._failed or failed > 0
        self._was_heard = True
        return sums[: len(numbers)]

    def listen(self) -> None:
        """Once a step: sees to it that the processes have heard of each other, where no sum was taken in it."""
        if not self._was_heard:
            self.sum([])
        self._was_heard = False
