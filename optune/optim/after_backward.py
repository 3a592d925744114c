"""The usual way: gradients are accumulated, and one step is made when the last backward pass is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from optune.optim.buckets import Bucket, smallest_first
from optune.optim.stepper import SkipCounter, StepStats
from optune.optim.update import Update


class AfterBackwardStepper:
    """Measures, clips, steps and frees in `finish()`: all parameters at once, or `parts` of them one after the other,
    where each needs fp32 copies that are not to live together."""

    passes = 1
    frees_gradients = False

    def __init__(self, update: Update, parts: Sequence[Bucket] | None, *, max_skipped_steps: int) -> None:
        self._update = update
        self._parts = parts
        self._entries = update.entries
        self._order = smallest_first(parts) if parts else [update.prepare("all", update.entries)]
        self.skips = SkipCounter(max_skipped_steps)

    @contextmanager
    def microbatch(self, is_last: bool, pass_index: int = 0) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._update.drop(self._entries)
            raise

    def finish(self) -> StepStats:
        self._update.measure(self._entries)
        grad_norm = self._update.take_norm()
        try:
            if self.skips.must_skip(grad_norm):
                return StepStats(grad_norm, skipped=True)
            factor = self._update.clip_factor(grad_norm)
            for part in self._order:
                self._update.step(part, factor)
            return StepStats(grad_norm, factor)
        finally:
            self._update.drop(self._entries)
            self._update.count_step()

    def describe(self) -> str:
        if self._parts is None:
            return "after backward: one update of all parameters once the whole gradient is there"
        return (
            "after backward: once the whole gradient is there, parameters are updated in "
            f"{len(self._parts)} parts, so that fp32 copies of one part live at a time"
        )

    def close(self) -> None:
        self._update.drop(self._entries)
