"""What a stash does: it takes complete buckets during backward, and decides whether they are updated at once or wait.

Clipping by the global norm needs the last gradient before the first update. So with clipping, gradients, or what they
are made of, wait in a stash until the norm is known. Policies differ in where and in what form they wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from optune.errors import TrainingError
from optune.optim.buckets import Bucket, smallest_first
from optune.optim.stepper import SkipCounter, StepStats
from optune.optim.update import Update


class Stash:
    """The part that all policies share: they wait until `finish()`, then clip and step part by part.

    A policy says what `take` does with a ready bucket, how `restore` brings its gradients back into `.grad`, and what
    `drop` must forget.
    """

    name = "hold"
    passes = 1
    pass_index = 0
    frees_gradients = False
    """Whether a bucket's gradients take no memory of their own once they are taken."""

    def __init__(self, update: Update, buckets: Sequence[Bucket], skips: SkipCounter, reason: str = "") -> None:
        self.update = update
        self.buckets = smallest_first(buckets)
        self.skips = skips
        self.reason = reason

    def watch_forward(self) -> AbstractContextManager[None]:
        """Stands around forward and backward of each microbatch."""
        return nullcontext()

    def backward_started(self) -> None:
        """Called at the first gradient of the last microbatch."""

    def begin_pass(self, pass_index: int) -> None:
        """Called before the first microbatch of another pass."""
        self.pass_index = pass_index

    def take(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are complete in `.grad`."""
        self.update.measure(bucket.entries)

    def parts(self) -> Iterable[Bucket]:
        """What is stepped at once in `finish()`, in order."""
        return self.buckets

    def restore(self, part: Bucket) -> None:
        """Brings the gradients of `part` back into `.grad`."""

    def drop(self) -> None:
        """Frees everything that waits, and leaves the weights as they are."""
        self.update.drop(self.update.entries)
        self.update.forget_norms()

    def finish(self) -> StepStats:
        grad_norm = self.update.take_norm()
        if self.skips.must_skip(grad_norm):
            return StepStats(grad_norm, skipped=True)
        factor = self.update.clip_factor(grad_norm)
        for part in self.parts():
            self.restore(part)
            self.update.step(part, factor)
        return StepStats(grad_norm, factor)

    def describe(self) -> str:
        """Policy and reason."""
        return f"gradients wait for the norm ({self.name}: {self.reason})"


class HoldStash(Stash):
    """The gradients themselves wait on the device. Bitwise the update after backward.

    They need no memory up to the amount in use when backward began, because activations are freed meanwhile.
    """


class NoStash(Stash):
    """Without clipping nothing waits: a bucket is stepped as soon as it is complete."""

    name = "none"
    frees_gradients = True

    def take(self, bucket: Bucket) -> None:
        self.update.measure(bucket.entries)
        self.update.step(bucket, 1.0)

    def finish(self) -> StepStats:
        grad_norm = self.update.take_norm()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient norm is not finite ({grad_norm}), and without clipping the weights were updated with it",
                where="optimizer_step",
                hint="what was saved before is intact: resume from it with max_grad_norm set (such steps are then "
                "skipped) or with optimizer_step: after_backward",
            )
        return StepStats(grad_norm)

    def describe(self) -> str:
        return "no clipping, so each is updated and freed as soon as it is complete"
