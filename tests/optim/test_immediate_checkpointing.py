"""Immediate under activation checkpointing: no bit changes, and no block is repeated with new weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from optune.errors import TrainingError
from optune.optim.immediate import ImmediateStepper
from tests.optim import small
from tests.optim.immediate_nets import build


def one_step(model: nn.Module, *, variant: Any = "local") -> None:
    tokens = torch.randint(0, small.VOCABULARY, (2, small.LENGTH), generator=torch.Generator().manual_seed(0))
    stepper = ImmediateStepper(model, build(model, lr=0.05), variant=variant)
    torch.manual_seed(3)
    with stepper.microbatch(True):
        (small.loss_sum(model, tokens) / 10).backward()
    stepper.finish()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", ["local", "exact"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_activation_checkpointing_changes_no_bit(tied: bool, variant: str, early_stop: bool) -> None:
    plain = small.SmallModel(tied=tied, dropout=0.2)
    checkpointed = small.SmallModel(tied=tied, dropout=0.2)
    checkpointed.activation_checkpointing = "block"
    one_step(plain, variant=variant)
    with set_checkpoint_early_stop(early_stop):
        one_step(checkpointed, variant=variant)
    for (name, left), right in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(left, right), name


class Looped(nn.Module):
    """One block used three times, each time under a checkpoint, and a nested checkpoint around two of them."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(small.VOCABULARY, small.WIDTH)
        self.block = small.Block()
        self.bias = nn.Parameter(torch.randn(small.WIDTH))
        self.head = nn.Linear(small.WIDTH, small.VOCABULARY)
        self.checkpointed = checkpointed

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=False) if self.checkpointed else function(x)  # type: ignore[return-value]

    def twice(self, x: Tensor) -> Tensor:
        # The block's last function saves nothing that its gradient needs.
        return self.run(self.block, self.run(self.block, x)) + self.bias

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.block, self.run(self.twice, self.embed(tokens))))


def test_blocks_used_again_and_nested_checkpoints_change_no_bit() -> None:
    plain, checkpointed = Looped(False), Looped(True)
    start = copy.deepcopy(plain)
    one_step(plain)
    one_step(checkpointed)
    for (name, left), right, before in zip(
        plain.named_parameters(), checkpointed.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(left, right), name
        assert not torch.equal(left, before), name


def test_a_checkpoint_that_would_repeat_with_new_weights_is_refused() -> None:
    class Reads(Looped):
        def forward(self, tokens: Tensor) -> Tensor:
            def reads(x: Tensor) -> Tensor:
                with torch.no_grad():
                    size = F.linear(x, self.head.weight).norm()
                return torch.tanh(x * size)

            return self.head(self.run(reads, self.embed(tokens)))

    with pytest.raises(TrainingError, match=r"repeats a forward pass after head\.weight"):
        one_step(Reads(True))
    one_step(Reads(False))
