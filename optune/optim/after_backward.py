"""The usual way: gradients are accumulated, and one step is made when the last backward pass is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from optune.optim.buckets import Entry
from optune.optim.stepper import SkipCounter, StepStats
from optune.optim.update import Update


class AfterBackwardStepper:
    """Measures, clips, steps and frees in `finish()`."""

    passes = 1

    def __init__(
        self, optimizer: Optimizer, entries: Sequence[Entry], *, max_grad_norm: float | None, max_skipped_steps: int
    ) -> None:
        self._update = Update(optimizer, entries, max_grad_norm)
        self._whole = self._update.prepare("all", entries)
        self.skips = SkipCounter(max_skipped_steps)

    @contextmanager
    def microbatch(self, is_last: bool, pass_index: int = 0) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._update.drop(self._whole.entries)
            raise

    def finish(self) -> StepStats:
        self._update.measure(self._whole.entries)
        grad_norm = self._update.take_norm()
        try:
            if self.skips.must_skip(grad_norm):
                return StepStats(grad_norm, skipped=True)
            factor = self._update.clip_factor(grad_norm)
            self._update.step(self._whole, factor)
            return StepStats(grad_norm, factor)
        finally:
            self._update.drop(self._whole.entries)

    def describe(self) -> str:
        return "after backward: one update of all parameters once the whole gradient is there"

    def close(self) -> None:
        self._update.drop(self._whole.entries)
