"""How the microbatches of a step go through the model: one after the other, or all of them through each block.

**Depth-first** is the usual way: a forward and a backward for each microbatch.

**Breadth-first** takes every microbatch through a block before the next block begins. Forward without a graph keeps
only each block's inputs; backward then goes block by block from the top, recomputing and differentiating one microbatch
at a time. When a block has seen its last microbatch its gradients are complete, so a stepper that steps in backward
frees them before the block below begins: one block's gradients are alive, with exact accumulation. The cost is that of
activation checkpointing (one more forward) and the inputs of all blocks for all microbatches. Of a sharded model each
block is gathered once for all microbatches, and its gradients are summed over ranks once.

In both, each microbatch has its own stream of random numbers through all stages, so dropout draws the same.

Shapes: B rows, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optune.loss import Loss
from optune.optim import Stepper
from optune.optim.kinds import is_compiled
from optune.types import Microbatch, SharedHead

_RandomState = tuple[Tensor, ...]


@dataclass
class Work:
    """The work of one step: what `depth_first` and `breadth_first` run, once for each of the stepper's passes.

    `seed_microbatch(index)` seeds torch's generators for a microbatch; `num_targets` is the step's, over all ranks.
    """

    model: Any
    loss: Loss
    stepper: Stepper
    microbatches: Sequence[Microbatch]
    num_targets: float
    seed_microbatch: Callable[[int], None]
    kept: tuple[Tensor, RandomStream] | None = field(default=None, init=False)
    """The hidden states of the only microbatch and where its random numbers stand, for another pass over its graph."""

    def gate(self, index: int, pass_index: int, completes: bool = True) -> AbstractContextManager[None]:
        """Around a backward of microbatch `index`; `completes`: the gradients that it makes have no other parts."""
        return self.stepper.microbatch(completes and index == len(self.microbatches) - 1, pass_index)

    def stream(self, index: int) -> RandomStream:
        """The random numbers of a microbatch, from their beginning."""
        self.seed_microbatch(index)
        return RandomStream(self.microbatches[index].tokens_BT.device)

    @property
    def keeps_forward(self) -> bool:
        """Whether one forward serves all passes: with a single microbatch, and blocks whose graph can be run again
        (compiled ones give their buffers away, and so does selective checkpointing what it has kept)."""
        is_single = self.stepper.passes > 1 and len(self.microbatches) == 1
        gives_away = getattr(self.model, "activation_checkpointing", "none") == "selective" or any(
            map(is_compiled, self.model.blocks)
        )
        return is_single and not gives_away

    @property
    def postpones_head(self) -> bool:
        """Whether the gradient of a head that is the embedding too is made at the end of backward: where no other one
        lives as long, and blocks keep little. It costs one product more, a part of what this way of working costs."""
        keeps_little = getattr(self.model, "activation_checkpointing", "none") == "block"
        return keeps_little and self.stepper.frees_gradients and len(self.microbatches) == 1


def depth_first(work: Work, pass_index: int) -> list[Tensor]:
    """A forward and a backward for each microbatch in turn; the summed loss of each."""
    sums: list[Tensor] = []
    for index, microbatch in enumerate(work.microbatches):
        with work.gate(index, pass_index):
            hidden_BTD, stream = work.kept or _forward(work, index)
            is_kept = work.keeps_forward and pass_index + 1 < work.stepper.passes
            work.kept = (hidden_BTD, stream.copy()) if is_kept else None
            if shared := SharedHead.of(hidden_BTD):
                shared.later.is_wanted = work.postpones_head
            loss_sum = stream.run(work.loss, work.model, hidden_BTD, microbatch)
            (loss_sum / work.num_targets).backward(retain_graph=is_kept)
        sums.append(loss_sum.detach())
    return sums


def _forward(work: Work, index: int) -> tuple[Tensor, RandomStream]:
    microbatch, stream = work.microbatches[index], work.stream(index)
    arguments = (microbatch.tokens_BT, microbatch.positions_BT, microbatch.documents_BT)
    return stream.run(work.model.hidden, *arguments), stream


def breadth_first(work: Work, pass_index: int) -> list[Tensor]:
    """Forward and backward of the whole step, block by block; the summed loss of each microbatch."""
    model, microbatches, count = work.model, work.microbatches, len(work.microbatches)
    contexts = [model.context(microbatch.positions_BT, microbatch.documents_BT) for microbatch in microbatches]
    streams = [work.stream(index) for index in range(count)]
    lowest = _lowest_trained_depth(model)

    with torch.no_grad():
        inputs = [[streams[i].run(model.embed, microbatches[i].tokens_BT) for i in range(count)]]
        starts: list[list[_RandomState]] = []
        for block in model.blocks:
            starts.append([stream.state for stream in streams])
            with _gathered(block):
                inputs.append([streams[i].run(block, inputs[-1][i], contexts[i]) for i in range(count)])

    # A tied head gives its weight only a part of the gradient: the embedding, differentiated last, completes it.
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    sums: list[Tensor] = []
    grads: list[Tensor | None] = []
    with _gathered(model, is_root=True):
        for i, hidden_BTD in enumerate(inputs.pop()):
            hidden_BTD.requires_grad_(lowest < len(model.blocks))
            _sum_gradients(model, i == count - 1)
            with work.gate(i, pass_index, completes=not tied):
                loss_sum = streams[i].run(work.loss, model, model.final_norm(hidden_BTD), microbatches[i])
                (loss_sum / work.num_targets).backward()
            sums.append(loss_sum.detach())
            grads.append(hidden_BTD.grad)
        for depth in range(len(model.blocks) - 1, max(lowest, 0) - 1, -1):
            block = model.blocks[depth]
            with _gathered(block):
                for i, hidden_BTD in enumerate(inputs.pop()):
                    hidden_BTD.requires_grad_(depth > lowest)
                    streams[i].state = starts[depth][i]
                    _sum_gradients(block, i == count - 1)
                    with work.gate(i, pass_index):
                        streams[i].run(block, hidden_BTD, contexts[i]).backward(grads[i])
                    grads[i] = hidden_BTD.grad
        if lowest < 0:
            for i in range(count):
                _sum_gradients(model, i == count - 1)
                with work.gate(i, pass_index):
                    model.embed(microbatches[i].tokens_BT).backward(grads[i])
    return sums


@contextmanager
def _gathered(module: Any, is_root: bool = False) -> Iterator[None]:
    """Around the uses of a module by all microbatches. Where it is sharded (FSDP2), its own weights stay gathered.

    The root's stay gathered after any other forward pass too: the loss that follows needs its head.
    """
    if not hasattr(module, "unshard"):
        yield
        return
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        module.set_reshard_after_forward(not is_root, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
        module.reshard()


def _sum_gradients(module: Any, is_last: bool) -> None:
    """Says whether the next backward sums over ranks what the microbatches have gathered in a sharded module."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(is_last, recurse=False)


def _lowest_trained_depth(model: Any) -> int:
    """The first block with a trained parameter; −1: the embedding is trained; the number of blocks: none is."""
    if any(parameter.requires_grad for parameter in model.model.embed_tokens.parameters()):
        return -1
    for depth, block in enumerate(model.blocks):
        if any(parameter.requires_grad for parameter in block.parameters()):
            return depth
    return len(model.blocks)


class RandomStream:
    """A microbatch's random numbers: each stage goes on where the stage before it stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state = self._read()

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """`function(*arguments)`, drawing from this stream."""
        torch.set_rng_state(self.state[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self.state[1], self._device)
        result = function(*arguments)
        self.state = self._read()
        return result

    def copy(self) -> RandomStream:
        """A stream that goes on from here on its own."""
        other = RandomStream(self._device)
        other.state = self.state
        return other

    def _read(self) -> _RandomState:
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state(self._device)) if self._device.type == "cuda" else (cpu,)
