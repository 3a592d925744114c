"""Settings that take less memory and train the same, with what they cost in time.

Time is counted in work: floating-point operations of a step, against those of the step as it is set. Where a setting
moves memory instead of computing, its price is an assumption, stated here; it decides the order and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from optune.optim.stash.choose import frees_gradients
from optune.plan.formulas import Shape, block_parameters

SELECTIVE = 0.05
"""Work that `selective` repeats, in forward passes of the blocks: norms, rotation and gate, no product."""
FACTORED = 0.15
"""What factors cost, in backward passes: their Gram matrices, or gradients that are made twice."""
MOVED = 0.02
"""What gradients that move to host memory and back cost, as a share of the step."""
HALVED = 0.01
"""What half as many rows at once, twice as often, costs: weights are read twice as often."""

KINDS = ["none", "selective", "block"]
"""Of checkpointing, each keeping less than the one before."""
Overrides = Mapping[str, str | int]


@dataclass(frozen=True)
class Current:
    """How the run is set: what of its config decides about memory and leaves the training as it is."""

    batch_size: int
    microbatches: int
    length: int
    checkpointing: str
    step: str
    clips: bool
    stash: str
    accumulation: str
    trains_shared_head: bool = False
    """Whether the embedding is trained and is the head too."""

    @property
    def waiting(self) -> str:
        """How gradients wait for the norm: `none` where they do not."""
        return self.stash if self.step == "in_backward" and self.clips else "none"

    @property
    def postpones_head(self) -> bool:
        """As `passes.Work` decides it; of `auto` it is not known."""
        frees = self.step == "in_backward" and frees_gradients(self.waiting)
        in_one = self.microbatches == 1 and self.accumulation == "depth_first"
        return self.trains_shared_head and frees and in_one and self.checkpointing == "block"


@dataclass(frozen=True)
class Setting:
    """Keys that differ from the run as it is set, and the time of a step against it."""

    overrides: Overrides
    time: float
    current: Current
    """How the run is set then."""
    strength: tuple[int, ...] = ()
    """How much is done to save memory, in each of several ways."""

    def is_weaker(self, other: Setting) -> bool:
        """Whether `other` saves by the same means, and at least as much by each of them."""
        return self.strength[0] == other.strength[0] and all(map(int.__le__, self.strength, other.strength))

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.overrides.items()]


def list_settings(shape: Shape, current: Current) -> list[Setting]:
    """All that may take less, cheapest first; at the same price those that change less come first."""
    settings: list[Setting] = []
    now = _work(shape, current)
    choices = itertools.product(_checkpointing(current), _steps(current), list(_batches(current)))
    for checkpointing, (step, stash), (rows, microbatches, accumulation) in choices:
        overrides: dict[str, str | int] = {}
        if checkpointing != current.checkpointing:
            overrides["activation_checkpointing"] = checkpointing
        if step != current.step:
            overrides["optimizer_step"] = step
        if stash != current.stash and step == "in_backward" and current.clips:
            overrides["gradient_stash"] = stash
        if rows != current.batch_size:
            overrides |= {"batch_size": rows, "gradient_accumulation_steps": microbatches}
        if accumulation != current.accumulation:
            overrides["accumulation"] = accumulation
        if not overrides:
            continue
        after = replace(
            current, batch_size=rows, microbatches=microbatches, checkpointing=checkpointing, step=step, stash=stash,
            accumulation=accumulation,
        )  # fmt: skip
        work = _work(shape, after) / now
        halvings = (current.batch_size // rows).bit_length() - 1
        strength = (
            int(accumulation == "breadth_first"),
            KINDS.index(checkpointing),
            (step == "in_backward") + (after.waiting == "two_pass"),
            halvings,
        )
        settings.append(Setting(overrides, work * (1 + HALVED * halvings), after, strength))
    return sorted(settings, key=lambda setting: (round(setting.time, 3), len(setting.overrides)))


def _checkpointing(current: Current) -> list[str]:
    return KINDS[KINDS.index(current.checkpointing) :]


def _steps(current: Current) -> list[tuple[str, str]]:
    """When the optimizer may step, and how gradients wait."""
    if current.step == "immediate":
        return [("immediate", current.stash)]
    steps = [(current.step, current.stash)]
    if not current.clips:
        return list(dict.fromkeys([*steps, ("in_backward", current.stash)]))
    return list(dict.fromkeys([*steps, ("in_backward", "auto"), ("in_backward", "two_pass")]))


def _batches(current: Current) -> Iterator[tuple[int, int, str]]:
    """Rows, microbatches and their order, with as many rows in a step."""
    rows = current.batch_size
    while True:
        microbatches = current.microbatches * current.batch_size // rows
        yield rows, microbatches, current.accumulation
        if microbatches > 1 and current.accumulation == "depth_first" and current.step != "immediate":
            yield rows, microbatches, "breadth_first"
        if rows % 2 or current.step == "immediate":
            return
        rows //= 2


def _work(shape: Shape, current: Current) -> float:
    """Operations a token; what `formulas.flops_per_token` counts, and what is run again."""
    blocks = 2.0 * shape.num_hidden_layers * sum(matrix.sharded(1) for matrix in block_parameters(shape))
    blocks += 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * current.length / 2
    head = (8.0 if current.postpones_head else 6.0) * shape.vocab_size * shape.hidden_size
    again = {"none": 0.0, "selective": SELECTIVE, "block": 1.0}[current.checkpointing]
    if current.accumulation == "breadth_first":
        again = max(again, 1.0)
    backward = (2 + again) * blocks
    whole = blocks + backward + head
    if current.waiting == "two_pass":
        # Of a single microbatch, forward is run once: the second loss is of the same hidden states.
        return whole + backward + head if current.microbatches == 1 else 2 * whole
    if current.waiting == "factored":
        return whole + FACTORED * 2 * blocks
    return whole * (1 + MOVED) if current.waiting == "cpu" else whole
