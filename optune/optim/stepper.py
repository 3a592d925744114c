"""What a stepper is: the one object that decides when the optimizer steps.

The training step has no branch on the mode; it makes the same two calls for every stepper:

    for pass_index in range(stepper.passes):
        for is_last, microbatch in mark_last(microbatches):
            with stepper.microbatch(is_last, pass_index):
                (loss_sum(model, microbatch) / num_targets).backward()
    stats = stepper.finish()

The gradient that reaches a hook has its final scale, because targets were counted before; nothing scales it afterwards.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from optune.errors import TrainingError


@dataclass(frozen=True)
class StepStats:
    """What one step did.

    - `grad_norm`: L2 norm of the whole gradient before clipping, in fp32; in immediate, of those that were used.
    - `clip_factor`: what every gradient was multiplied by; 1.0 means that clipping was off or not active.
    - `skipped`: the norm was not finite, and no weight and no optimizer state changed.
    """

    grad_norm: float | None
    clip_factor: float = 1.0
    skipped: bool = False


@runtime_checkable
class Stepper(Protocol):
    """Decides when the optimizer steps. Made by `build_stepper`."""

    skips: SkipCounter
    """Steps whose gradient was not finite; a run that goes on from a checkpoint fills in what it knew of them."""

    @property
    def passes(self) -> int:
        """How often the training step must run all microbatches: 2 for the stash `two_pass`, else 1.

        A step of one microbatch may keep its graph instead of running forward again:
        `loss.backward(retain_graph=pass_index + 1 < stepper.passes)`, each in its own `microbatch(True, pass_index)`.
        """
        ...

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are gone as soon as the last microbatch's backward has passed them: nothing waits."""
        ...

    def microbatch(self, is_last: bool, pass_index: int = 0) -> AbstractContextManager[None]:
        """Stands around forward and backward of one microbatch; `is_last` marks the last of the step.

        `is_last=True` may be entered several times in a step when every parameter gets its whole gradient in one of
        these times, as in breadth-first accumulation, where each block has a last chunk of its own.
        """
        ...

    def finish(self) -> StepStats:
        """Completes the step: what has not been updated in backward is updated here. Gradients are freed.

        Raises `TrainingError` when the run cannot go on: too many steps in a row with a gradient that is not finite, or
        one such gradient where the update could not be held back.
        """
        ...

    def describe(self) -> str:
        """One line for the start summary: mode, policy and the reason for it."""
        ...

    def close(self) -> None:
        """Removes hooks and patches; the model and the optimizer are ordinary again."""
        ...


class SkipCounter:
    """Counts steps skipped for a gradient norm that is not finite; `limit` such steps in a row end the run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.total = 0

    def must_skip(self, grad_norm: float) -> bool:
        """True when the step must be skipped. Raises `TrainingError` at the `limit`-th skip in a row."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"the gradient norm was not finite ({grad_norm}) in {self.in_a_row} steps in a row; all were skipped",
                where="max_skipped_steps",
                hint="what was saved before is intact; look for NaN or inf in weights and rows, or lower optimizer.lr",
            )
        return True
