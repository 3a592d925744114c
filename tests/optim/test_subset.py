"""Stepping on a part of the parameters: bitwise for what allows it, refused with the reason for what does not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optune import optim
from optune.errors import ConfigError
from optune.optim.subset import check_subset_step, slice_groups, step_slices
from tests.optim.small import SmallModel

SETTINGS: dict[str, dict[str, Any]] = {"Muon": {}, "SGD": {"momentum": 0.9}}
PER_PARAMETER = [
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "Adafactor",
]  # fmt: skip


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)


def build(model: nn.Module, factory: Any, **settings: Any) -> torch.optim.Optimizer:
    return optim.build_optimizer(model.named_parameters(), factory=factory, settings=settings)


@pytest.mark.parametrize("name", PER_PARAMETER)
def test_every_optimizer_of_torch_that_works_by_parameter_passes_and_stays_untouched(name: str) -> None:
    model = SmallModel()
    optimizer = build(model, getattr(torch.optim, name), lr=0.01)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    groups = [dict(group) for group in optimizer.param_groups]
    state = torch.get_rng_state()
    check_subset_step(optimizer)
    assert torch.equal(state, torch.get_rng_state())
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert not optimizer.state or name == "Adagrad"  # which makes its state in the constructor
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_muon_passes_on_matrices() -> None:
    check_subset_step(build(Matrices(), torch.optim.Muon, lr=0.01))


def test_muon_on_vectors_is_refused_by_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"Muon refuses its settings: .*2D"):
        build(SmallModel(), torch.optim.Muon, lr=0.01)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "Adam8bit"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_low_bit_optimizers_pass_quantised(name: str, stochastic: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low_bit = pytest.importorskip("torchao.optim")
    model = nn.Linear(256, 256).to(torch.bfloat16)
    check_subset_step(build(model, getattr(low_bit, name), lr=0.01, bf16_stochastic_round=stochastic))


def test_lbfgs_is_refused_because_it_evaluates_the_loss_itself() -> None:
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss itself"):
        build(SmallModel(), torch.optim.LBFGS, lr=0.01)


class GlobalNorm(torch.optim.SGD):
    """Scales by the norm over all parameters, as layer-free trust-region methods do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm
        return super().step(closure)


class CountsSteps(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free methods do, and lowers its rate by the count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])
        return None


class KeepsParameters(torch.optim.SGD):
    """Reaches its parameters past the groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.everything: list[Tensor] = [p for group in self.param_groups for p in group["params"]]


class Fails(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no steps today")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (GlobalNorm, "depends on the others"),
        (CountsSteps, "depends on the others"),
        (KeepsParameters, "'everything' refers to parameters past the parameter groups"),
        (Fails, "ZeroDivisionError: no steps today"),
    ],
)
def test_optimizers_that_need_all_parameters_at_once_are_refused_in_backward_only(factory: Any, reason: str) -> None:
    model = SmallModel()
    optimizer = build(model, factory, lr=0.1)
    with pytest.raises(ConfigError, match=reason) as caught:
        optim.build_stepper(model, optimizer, when="in_backward")
    assert "after_backward" in (caught.value.hint or "")
    optim.build_stepper(model, optimizer, when="after_backward")


def test_a_part_is_stepped_with_its_own_groups_settings_and_the_rest_is_untouched() -> None:
    model = SmallModel(blocks=1)
    optimizer = optim.build_optimizer(
        model.named_parameters(),
        factory=torch.optim.SGD,
        settings={"lr": 1.0},
        parameter_groups=[{"match": "head*", "lr": 0.5}, {"match": "*norm*", "lr": 0.25}],
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    step_slices(optimizer, slice_groups(optimizer, [model.norm.weight, model.head.weight]))
    moved = {name: float((before[name] - parameter.detach()).mean()) for name, parameter in model.named_parameters()}
    assert moved.pop("head.weight") == pytest.approx(0.5)
    assert moved.pop("norm.weight") == pytest.approx(0.25)
    assert not any(moved.values())
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [list(map(id, g)) for g in groups]


def test_groups_are_restored_when_a_step_fails() -> None:
    model = SmallModel(blocks=1)
    optimizer = build(model, Fails, lr=0.1)
    with pytest.raises(ZeroDivisionError):
        step_slices(optimizer, slice_groups(optimizer, [model.norm.weight]))
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
