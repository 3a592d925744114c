"""An optimizer that cannot step is found out on small stand-ins, before a weight is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optune import optim
from optune.errors import ConfigError
from tests.optim.small import SmallModel


def outline(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model without memory, as a recipe has it before loading."""
    return SmallModel().to(device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("factory", "settings", "words"),
    [
        (torch.optim.AdamW, {"capturable": True}, "AdamW fails in a trial step .*capturable"),
        (torch.optim.SparseAdam, {}, "SparseAdam fails in a trial step .*does not support dense gradients"),
        (torch.optim.LBFGS, {}, "LBFGS evaluates the loss itself"),
        (torch.optim.AdamW, {"betas": [2.0, 0.9]}, "Invalid beta parameter"),
        (torch.optim.Muon, {}, "Muon"),
    ],
)
def test_what_only_a_step_finds_out_is_refused(factory: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        optim.try_optimizer(outline(), factory, {"lr": 0.1} | settings)
    assert str(caught.value).startswith("optimizer")


def test_a_group_without_a_match_is_refused_without_weights() -> None:
    with pytest.raises(ConfigError, match=r"parameter_groups\.0\.match"):
        optim.try_optimizer(outline(), torch.optim.AdamW, {"lr": 0.1}, parameter_groups=[{"match": "*nrom*"}])


@pytest.mark.parametrize("masters", ["none", "fp32"])
@pytest.mark.parametrize(
    "factory", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.NAdam]
)
def test_what_can_step_passes_and_draws_no_random_number(factory: Any, masters: str) -> None:
    state = torch.get_rng_state()
    groups = [{"match": "*norm*", "weight_decay": 0.0}]
    optim.try_optimizer(outline(torch.bfloat16), factory, {"lr": 0.1}, parameter_groups=groups, master_weights=masters)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_of_low_bits_passes() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    optim.try_optimizer(outline(torch.bfloat16), low_bit.AdamW8bit, {"lr": 0.1})
