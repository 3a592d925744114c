"""Nothing waits: a first run over the microbatches measures the gradient, a second one updates."""

from __future__ import annotations

from collections.abc import Sequence

from optune.errors import TrainingError
from optune.optim.buckets import Bucket
from optune.optim.stash.base import Stash
from optune.optim.stepper import SkipCounter, StepStats
from optune.optim.update import Update

MAX_DIFFERENCE = 1e-3
"""Relative difference of the two passes' norms that rounding on an accelerator can explain; dropout that was drawn
anew makes a larger one."""


class TwoPassStash(Stash):
    """Bitwise the update after backward, for one more forward and backward, when the passes repeat each other.

    The training step runs all microbatches twice with the same random numbers. In both passes a bucket's gradients are
    freed as soon as they are complete. That the second pass repeated the first is checked by its norm.
    """

    name = "two_pass"
    passes = 2
    frees_gradients = True

    def __init__(self, update: Update, buckets: Sequence[Bucket], skips: SkipCounter, reason: str = "") -> None:
        super().__init__(update, buckets, skips, reason)
        self._measured = StepStats(0.0)

    def begin_pass(self, pass_index: int) -> None:
        super().begin_pass(pass_index)
        grad_norm = self.update.take_norm()
        if pass_index == 1:
            skipped = self.skips.must_skip(grad_norm)
            self._measured = StepStats(grad_norm, 1.0 if skipped else self.update.clip_factor(grad_norm), skipped)

    def take(self, bucket: Bucket) -> None:
        self.update.measure(bucket.entries)
        if self.pass_index == 1 and not self._measured.skipped:
            self.update.step(bucket, self._measured.clip_factor)
        else:
            self.update.drop(bucket.entries)

    def finish(self) -> StepStats:
        if self.pass_index != 1:
            raise TrainingError("the stash two_pass needs a second pass over the microbatches, and none was made")
        measured, repeated = self._measured, self.update.take_norm()
        if not measured.skipped and abs(repeated - (measured.grad_norm or 0.0)) > MAX_DIFFERENCE * repeated:
            raise TrainingError(
                f"the second pass did not repeat the first: gradient norms {measured.grad_norm} and {repeated}; "
                "the weights were updated with the first one's clip factor",
                where="gradient_stash",
                hint="what was saved before is intact; forward and backward must give the same result twice "
                "(same random numbers, no state that changes), or use gradient_stash: hold",
            )
        return measured

    def drop(self) -> None:
        super().drop()
        self.pass_index = 0
