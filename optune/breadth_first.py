"""Breadth-first accumulation: every microbatch of the step goes through a block before the next block begins.

Forward without a graph keeps only each block's inputs; backward then goes block by block from the top, recomputing and
differentiating one microbatch at a time. When a block has seen its last microbatch its gradients are complete, so a
stepper that steps in backward frees them before the block below begins: **one block's gradients are alive**, with
exact accumulation. The cost is that of activation checkpointing (one more forward) and the inputs of all blocks for
all microbatches.

Each microbatch keeps its own stream of random numbers through all stages, so dropout draws what depth-first draws.

Shapes: B rows, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from optune.loss import Loss
from optune.optim import Stepper
from optune.types import Microbatch


def run_pass(
    model: Any,
    loss: Loss,
    stepper: Stepper,
    microbatches: Sequence[Microbatch],
    num_targets: float,
    pass_index: int,
    seed_microbatch: Callable[[int], None],
) -> list[Tensor]:
    """Forward and backward of the whole step; the summed loss of each microbatch."""
    count = len(microbatches)
    contexts = [model.context(microbatch.positions_BT, microbatch.documents_BT) for microbatch in microbatches]
    streams = [_RandomStream(seed_microbatch, i, microbatches[i].tokens_BT.device) for i in range(count)]
    lowest = _lowest_trained_depth(model)

    def gate(i: int, completes: bool = True) -> AbstractContextManager[None]:
        return stepper.microbatch(completes and i == count - 1, pass_index)

    with torch.no_grad():
        inputs = [[streams[i].run(model.embed, microbatches[i].tokens_BT) for i in range(count)]]
        starts: list[list[_RandomState]] = []
        for block in model.blocks:
            starts.append([stream.state for stream in streams])
            inputs.append([streams[i].run(block, inputs[-1][i], contexts[i]) for i in range(count)])

    # A tied head gives its weight only a part of the gradient: the embedding, differentiated last, completes it.
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    sums: list[Tensor] = []
    grads: list[Tensor | None] = []
    for i, hidden_BTD in enumerate(inputs.pop()):
        hidden_BTD.requires_grad_(lowest < len(model.blocks))
        with gate(i, completes=not tied):
            loss_sum = streams[i].run(loss, model, model.final_norm(hidden_BTD), microbatches[i])
            (loss_sum / num_targets).backward()
        sums.append(loss_sum.detach())
        grads.append(hidden_BTD.grad)
    for depth in range(len(model.blocks) - 1, max(lowest, 0) - 1, -1):
        for i, hidden_BTD in enumerate(inputs.pop()):
            hidden_BTD.requires_grad_(depth > lowest)
            streams[i].state = starts[depth][i]
            with gate(i):
                streams[i].run(model.blocks[depth], hidden_BTD, contexts[i]).backward(grads[i])
            grads[i] = hidden_BTD.grad
    if lowest < 0:
        for i in range(count):
            with gate(i):
                model.embed(microbatches[i].tokens_BT).backward(grads[i])
    return sums


def _lowest_trained_depth(model: Any) -> int:
    """The first block with a trained parameter; −1: the embedding is trained; the number of blocks: none is."""
    if any(parameter.requires_grad for parameter in model.model.embed_tokens.parameters()):
        return -1
    for depth, block in enumerate(model.blocks):
        if any(parameter.requires_grad for parameter in block.parameters()):
            return depth
    return len(model.blocks)


_RandomState = tuple[Tensor, ...]


class _RandomStream:
    """A microbatch's random numbers: each stage goes on where the stage before it stopped."""

    def __init__(self, seed_microbatch: Callable[[int], None], index: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        seed_microbatch(index)
        self.state = self._read()

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """`function(*arguments)`, drawing from this stream."""
        torch.set_rng_state(self.state[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self.state[1], self._cuda)
        result = function(*arguments)
        self.state = self._read()
        return result

    def _read(self) -> _RandomState:
        cpu = torch.get_rng_state()
        return (cpu,) if self._cuda is None else (cpu, torch.cuda.get_rng_state(self._cuda))
