"""The training step: the invariants that every recipe shares.

- Targets are counted over the whole step before the first backward, so the gradient that reaches a parameter has its
  final scale whenever the optimizer steps.
- Random numbers are a function of (seed, step, microbatch, rank), so a resumed run draws what the first one drew.
- No branch here knows which stepper is at work.

Shapes: B rows, T positions, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optune import shards
from optune.errors import ConfigError, TrainingError, list_few
from optune.loss import Loss
from optune.optim import Stepper
from optune.passes import Work, breadth_first, depth_first
from optune.types import Microbatch, MicrobatchShape

SumOverRanks = Callable[[Sequence[float]], list[float]]
"""Sums each number over the ranks that see different rows, see `optune.distributed`; `list` is that for one of them."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, all ranks together: `loss` is the mean over the targets of all its microbatches, `grad_norm`
    the global norm before clipping, `skipped` says that the gradient was not finite; `tokens` are counted without
    padding."""

    loss: float
    rows: int
    targets: float
    tokens: int
    grad_norm: float | None
    clip_factor: float
    skipped: bool
    microbatches: int = 0
    widest: MicrobatchShape | None = None
    """Of this rank's microbatches the one with the most positions."""


def count_steps(steps_per_epoch: int | None, epochs: int, max_steps: int | None) -> int:
    """The steps of a run: whichever of `epochs` and `max_steps` ends first.

    `steps_per_epoch` is None for rows that are streamed: `max_steps` alone decides then, and has to be set.
    """
    if steps_per_epoch is None:
        if epochs != 1:
            raise ConfigError(
                f"is {epochs}, and how many steps an epoch has is not known with data.streaming",
                where="epochs",
                hint="leave epochs out and set max_steps: the files are read again and again until then",
            )
        if max_steps is None:
            raise ConfigError(
                "is null, and how many steps an epoch has is not known with data.streaming",
                where="max_steps",
                hint="set max_steps to the length of the run",
            )
        return max_steps
    total = steps_per_epoch * epochs
    return total if max_steps is None else min(total, max_steps)


def train_step(
    model: Any,
    loss: Loss,
    stepper: Stepper,
    microbatches: Sequence[Microbatch],
    *,
    seed: int,
    step: int,
    rank: int = 0,
    sum_over_ranks: SumOverRanks = list,
    accumulation: str = "depth_first",
) -> StepResult:
    """One update of `model` from `microbatches` (this rank's part of the step), and what it did.

    `rank` tells apart those that see different rows, and `sum_over_ranks` sums numbers over them: what a step counts
    before its first backward, and its loss after the last one. `accumulation` is `depth_first` (a forward and a
    backward for each microbatch) or `breadth_first` (all microbatches through each block). Raises TrainingError where
    the step has no target at all.
    """
    device = shards.input_device(next(model.parameters()))
    model.train()
    counts = (
        sum(microbatch.count_targets() for microbatch in microbatches),
        sum(len(microbatch.rows) for microbatch in microbatches),
        sum(microbatch.num_tokens for microbatch in microbatches),
    )
    num_targets, num_rows, num_tokens = sum_over_ranks(counts)
    if num_targets == 0:
        raise TrainingError(
            f"step {step + 1} has no target: {_name_rows(microbatches)}",
            hint="`optune validate` counts targets; check data.train_on and data.max_length",
        )
    moved = [microbatch.to(device) for microbatch in microbatches]
    work = Work(model, loss, stepper, moved, num_targets, SeedMicrobatch(seed, step, rank))
    sums: list[Tensor] = []
    for pass_index in range(stepper.passes):
        sums = _PASSES[accumulation](work, pass_index)  # the same in each pass
    stats = stepper.finish()
    (loss_sum,) = sum_over_ranks([torch.stack(sums).double().sum().item()])
    return StepResult(
        loss=loss_sum / num_targets,
        rows=int(num_rows),
        targets=num_targets,
        tokens=int(num_tokens),
        grad_norm=stats.grad_norm,
        clip_factor=stats.clip_factor,
        skipped=stats.skipped,
        microbatches=len(microbatches),
        widest=max(microbatches, key=lambda microbatch: microbatch.tokens_BT.numel()).shape,
    )


def seed_everything(seed: int) -> None:
    """Seeds what draws before the first step: the start of fresh parameters."""
    torch.manual_seed(seed)


@dataclass(frozen=True)
class SeedMicrobatch:
    """Seeds torch's generators for a microbatch: a pure function of (seed, step, microbatch, rank)."""

    seed: int
    step: int
    rank: int

    def __call__(self, index: int) -> None:
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{index}/{self.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))


_PASSES = {"depth_first": depth_first, "breadth_first": breadth_first}


def check_accumulation(accumulation: str, when: str, num_microbatches: int) -> None:
    """Refuses what cannot be exact: `immediate` updates a weight in its first backward, so it has one microbatch."""
    if when == "immediate" and num_microbatches > 1:
        raise ConfigError(
            f"is {num_microbatches}, but optimizer_step=immediate updates every weight in the first backward, before "
            "the other microbatches are seen",
            where="gradient_accumulation_steps",
            hint="use gradient_accumulation_steps=1 with a larger batch_size, or optimizer_step=in_backward",
        )
    if when == "immediate" and accumulation != "depth_first":
        raise ConfigError(
            f"{accumulation} cannot be combined with optimizer_step=immediate",
            where="accumulation",
            hint="use accumulation=depth_first",
        )


@torch.no_grad()
def evaluate(
    model: Any, loss: Loss, microbatches: Iterable[Microbatch], *, sum_over_ranks: SumOverRanks = list
) -> float:
    """The mean loss over all targets of `microbatches`, with dropout off; generators and mode stay as they were.

    `microbatches` are this rank's part, as many as every other rank's; `sum_over_ranks` sums numbers over them.
    """
    was_training = model.training
    model.eval()
    device = shards.input_device(next(model.parameters()))
    total, targets = 0.0, 0.0
    for microbatch in microbatches:
        on_device = microbatch.to(device)
        hidden_BTD = model.hidden(on_device.tokens_BT, on_device.positions_BT, on_device.documents_BT)
        total += loss(model, hidden_BTD, on_device).item()
        targets += microbatch.count_targets()
    model.train(was_training)
    total, targets = sum_over_ranks([total, targets])
    return total / targets if targets else math.nan


def _name_rows(microbatches: Sequence[Microbatch]) -> str:
    rows = [row for microbatch in microbatches for row in microbatch.rows]
    return list_few(rows, 5)
