"""fp32 masters keep updates that bf16 weights would lose, and a run without them is warned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optune import optim
from optune.errors import ConfigError
from tests.optim.small import SmallModel, make_rows, run

LR = 1e-5


def make_model(dtype: torch.dtype) -> SmallModel:
    """Weights near 1, as in case A31; bf16's numbers are fp32's too."""
    model = SmallModel(blocks=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((1 + 0.1 * parameter).bfloat16())
    return model.to(dtype)


def share_changed(dtype: torch.dtype, masters: str, factory: Any, steps: int = 50) -> float:
    """The share of weight elements (masters', where there are any) that differ from the start."""
    model = make_model(dtype)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=factory, settings={"lr": LR}, master_weights=masters
    )
    held = optim.named_optimizer_parameters(optimizer)
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    run(model, optim.build_stepper(model, optimizer, when="in_backward"), make_rows(steps, [1]))
    moved = sum(int((parameter != before[name]).sum()) for name, parameter in held.items())
    return moved / sum(parameter.numel() for parameter in held.values())


@pytest.mark.parametrize("factory", [torch.optim.AdamW, torch.optim.SGD])
def test_with_masters_as_many_weights_change_as_in_fp32_and_without_fewer(factory: Any) -> None:
    fp32 = share_changed(torch.float32, "none", factory)
    masters = share_changed(torch.bfloat16, "fp32", factory)
    alone = share_changed(torch.bfloat16, "none", factory)
    assert masters == pytest.approx(fp32, rel=0.1)
    assert alone < 0.5 * fp32


@pytest.mark.parametrize(("dtype", "masters", "lr", "warned"), [
    (torch.bfloat16, "none", 1e-5, True),
    (torch.bfloat16, "none", 1e-2, False),
    (torch.bfloat16, "fp32", 1e-5, False),
    (torch.float32, "none", 1e-5, False),
])  # fmt: skip
def test_the_warning_stands_where_updates_are_lost(dtype: torch.dtype, masters: str, lr: float, warned: bool) -> None:
    model = make_model(dtype)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": lr}, master_weights=masters
    )
    message = optim.warn_lost_updates(model.named_parameters(), optimizer)
    assert (message is not None) == warned
    if message is not None:
        assert "master_weights=fp32" in message and "update_rounding=stochastic" in message and "100%" in message


@pytest.mark.parametrize("lr", [2e-4, 6e-4, 1.5e-3])
def test_the_warning_tells_the_share_that_a_step_of_adam_leaves_unchanged(lr: float) -> None:
    layer = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    with torch.no_grad():  # evenly over eight powers of two, and some zeros
        layer.weight.copy_(torch.exp2(-8 * torch.rand(64, 64, generator=torch.Generator().manual_seed(0))))
        layer.weight[0] = 0
    before = layer.weight.detach().clone()
    optimizer = optim.build_optimizer(
        layer.named_parameters(), factory=torch.optim.AdamW, settings={"lr": lr, "weight_decay": 0.0}
    )
    message = optim.warn_lost_updates(layer.named_parameters(), optimizer)
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()  # every gradient is 1: the first update is the rate
    optimizer.step()
    unchanged = float((layer.weight == before).double().mean())
    assert 0.1 < unchanged < 0.95
    assert message is not None
    assert int(message.split("about ")[1].split("%")[0]) == pytest.approx(100 * unchanged, abs=2)


def test_the_warning_asks_each_groups_rate_and_the_schedules_peak() -> None:
    model = make_model(torch.bfloat16)
    groups = [{"match": "*", "lr": 1e-2}]
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-5}, parameter_groups=groups
    )
    assert optim.warn_lost_updates(model.named_parameters(), optimizer) is None
    assert optim.warn_lost_updates(model.named_parameters(), optimizer, peak_factor=1e-3) is not None


def test_working_weights_are_the_masters_rounded_after_every_step() -> None:
    model = make_model(torch.bfloat16)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-3}, master_weights="fp32"
    )
    masters = optim.named_masters(model.named_parameters(), optimizer)
    assert masters.keys() == dict(model.named_parameters()).keys()
    assert all(master.dtype is torch.float32 for master in masters.values())
    stepper = optim.build_stepper(model, optimizer, when="in_backward", max_grad_norm=0.1)
    for rows in make_rows(3, [2]):
        run(model, stepper, [rows])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())


def test_masters_follow_weights_that_were_loaded_later() -> None:
    model = make_model(torch.bfloat16)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-3}, master_weights="fp32"
    )
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    optim.fill_masters(model.named_parameters(), optimizer)
    masters = optim.named_masters(model.named_parameters(), optimizer)
    assert all(torch.equal(masters[name], parameter.float()) for name, parameter in model.named_parameters())


def test_fp32_weights_get_no_masters() -> None:
    model = SmallModel(blocks=1)
    model.blocks.to(torch.bfloat16)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 1.0}, master_weights="fp32"
    )
    masters = optim.named_masters(model.named_parameters(), optimizer)
    assert masters.keys() == {name for name, _ in model.named_parameters() if name.startswith("blocks")}


def test_another_master_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.master_weights: 'fp16'"):
        optim.build_optimizer(
            SmallModel().named_parameters(), factory=torch.optim.SGD, settings={"lr": 1.0}, master_weights="fp16"
        )
