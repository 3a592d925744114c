"""Schedules against transformers' curves, their edges, and that they reach the step that happens inside backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from optune import optim
from optune.errors import ConfigError
from optune.optim.schedule import NAMES

JUDGES: dict[str, Any] = {
    "constant": lambda o, w, n: transformers.get_constant_schedule_with_warmup(o, w),
    "linear": transformers.get_linear_schedule_with_warmup,
    "cosine": transformers.get_cosine_schedule_with_warmup,
    "inverse_sqrt": lambda o, w, n: transformers.get_inverse_sqrt_schedule(o, w),
    "wsd": lambda o, w, n: transformers.get_wsd_schedule(
        o, num_warmup_steps=w, num_stable_steps=n - w - 4, num_decay_steps=4, decay_type="linear"
    ),
}


def judge_rates(name: str, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = JUDGES[name](optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_rates_after_warmup_are_those_of_transformers(name: str, warmup: int) -> None:
    schedule = optim.build_schedule(
        name=name, total_steps=20, warmup_steps=warmup, decay_steps=4 if name == "wsd" else None
    )
    rates = [schedule(step) for step in range(20)]
    assert rates[warmup:] == pytest.approx(judge_rates(name, warmup, 20)[warmup:], abs=1e-12)
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (4, 0), (4, 4), (9, 0), (9, 3), (100, 10)])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_first_rate_is_above_zero_the_peak_is_reached_and_the_floor_is_not_reached_before_the_last_step(
    name: str, total: int, warmup: int, floor: float
) -> None:
    schedule = optim.build_schedule(name=name, total_steps=total, warmup_steps=warmup, min_lr_ratio=floor)
    rates = [schedule(step) for step in range(total)]
    assert all(math.isfinite(rate) and 0 < rate <= 1 for rate in rates)
    assert max(rates) == 1.0
    assert rates[0] == (1 / warmup if warmup else 1.0)
    if floor < 1:
        assert all(rate > floor for rate in rates[warmup : total - 1])


@pytest.mark.parametrize(("total", "warmup"), [(4, 5), (4, 10), (1, 2), (4, -1)])
def test_more_warmup_than_steps_is_refused_with_the_numbers(total: int, warmup: int) -> None:
    with pytest.raises(ConfigError, match=rf"schedule.warmup_steps: {warmup} warm-up steps in a run of {total}"):
        optim.build_schedule(name="cosine", total_steps=total, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"name": "cosin"}, "schedule.name"),
        ({"min_lr_ratio": 1.5}, "schedule.min_lr_ratio"),
        ({"min_lr_ratio": -0.1}, "schedule.min_lr_ratio"),
        ({"name": "cosine", "decay_steps": 2}, "schedule.decay_steps"),
        ({"name": "wsd", "decay_steps": 11}, "schedule.decay_steps"),
        ({"total_steps": 0}, "schedule"),
    ],
)
def test_impossible_values_are_refused_by_key(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optim.build_schedule(**({"total_steps": 10} | settings))
    assert caught.value.where == where


def test_a_step_before_the_first_is_an_error() -> None:
    with pytest.raises(ValueError, match="step -1"):
        optim.build_schedule(name="cosine", total_steps=3)(-1)


def build(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    model = torch.nn.ModuleDict({"left": torch.nn.Linear(2, 2), "right": torch.nn.Linear(2, 2)})
    return optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 0.5} | settings, parameter_groups=groups
    )


def test_each_group_follows_the_schedule_from_its_own_base_rate() -> None:
    optimizer = build([{"match": "right.*", "lr": 0.1}])
    schedule = optim.build_schedule(name="linear", total_steps=4)
    optim.set_learning_rate(optimizer, schedule, 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 0.05])
    assert optim.get_learning_rate(optimizer) == pytest.approx(0.25)


def test_a_rate_in_a_tensor_is_changed_in_place_and_not_shared_between_groups() -> None:
    rate = torch.tensor(0.5)
    optimizer = build([{"match": "right.*"}], lr=rate, foreach=False, capturable=True)
    tensors = [group["lr"] for group in optimizer.param_groups]
    optim.set_learning_rate(optimizer, optim.build_schedule(name="linear", total_steps=4), 1)
    assert [group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True)] == [
        True,
        True,
    ]
    assert [float(tensor) for tensor in tensors] == pytest.approx([0.375, 0.375])
    assert float(rate) == 0.5


def test_rates_do_not_depend_on_what_was_asked_before() -> None:
    # A resumed run asks for step 5 first; the straight run asked for 0 to 4 before.
    def rates(steps: range) -> list[float]:
        optimizer = build([])
        schedule = optim.build_schedule(name="cosine", total_steps=10, warmup_steps=3, min_lr_ratio=0.1)
        taken = []
        for step in steps:
            optim.set_learning_rate(optimizer, schedule, step)
            taken.append(optim.get_learning_rate(optimizer))
        return taken

    assert rates(range(10))[5:] == rates(range(5, 10))


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (torch.optim.lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.5}),
        (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 12, "eta_min": 0.01}),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 0.2, "total_steps": 12, "cycle_momentum": False}),
        (torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 5}),
        (torch.optim.lr_scheduler.PolynomialLR, {"total_iters": 12, "power": 2.0}),
    ],
)
def test_a_torch_scheduler_gives_its_own_rates_as_a_table(factory: Any, settings: dict[str, Any]) -> None:
    # With rates of their own, as eta_min and max_lr are, groups do not keep their ratio.
    rates = [0.05, 0.002]
    judge = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])
    scheduler = factory(judge, **settings)
    optimizer = build([{"match": "right.*", "lr": rates[1]}], lr=rates[0])
    schedule = optim.build_schedule(factory=factory, settings=settings, total_steps=12)
    for step in range(12):
        optim.set_learning_rate(optimizer, schedule, step)
        expected = [group["lr"] for group in judge.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-12)
        judge.step()
        scheduler.step()
    assert schedule(500) == schedule(11)


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, {}, "follows the loss"),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": 5}, "momentum"),
        (torch.optim.lr_scheduler.StepLR, {"stepsize": 3}, "stepsize"),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": 3, "cycle_momentum": False}, "5 steps"),
    ],
)
def test_schedulers_that_are_no_function_of_the_step_are_refused(
    factory: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        optim.build_schedule(factory=factory, settings=settings, total_steps=5)


def test_keys_of_named_schedules_are_refused_beside_a_torch_scheduler() -> None:
    with pytest.raises(ConfigError, match="_target_ has its own"):
        optim.build_schedule(
            factory=torch.optim.lr_scheduler.StepLR, settings={"step_size": 1}, total_steps=5, warmup_steps=1
        )


def test_keywords_that_divide_by_zero_are_named_without_pythons_words() -> None:
    with pytest.raises(ConfigError, match=r"StepLR with step_size: 0 cannot make a schedule of 5 steps") as caught:
        optim.build_schedule(total_steps=5, factory=torch.optim.lr_scheduler.StepLR, settings={"step_size": 0})
    assert "modulo" not in str(caught.value)
