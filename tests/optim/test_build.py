"""What `build_optimizer` makes: groups, names, implementation, refusals; and what `build_stepper` refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from optune import optim
from optune.errors import ConfigError
from tests.optim.small import SmallModel, assert_same, make_rows, run, snapshot


def build(
    model: nn.Module, factory: Any = torch.optim.AdamW, groups: Any = (), masters: str = "none", **settings: Any
) -> Any:
    return optim.build_optimizer(
        model.named_parameters(),
        factory=factory,
        settings={"lr": 0.1} | settings,
        parameter_groups=groups,
        master_weights=masters,
    )


def group_names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def test_the_optimizer_is_the_very_class_and_its_state_dict_is_torchs() -> None:
    optimizer = build(SmallModel())
    assert type(optimizer) is torch.optim.AdamW
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_groups_take_globs_and_regular_expressions_and_the_rest_comes_first() -> None:
    model = SmallModel(blocks=2)
    optimizer = build(
        model,
        groups=[
            {"match": "*norm*", "weight_decay": 0.0},
            {"match": "re:blocks\\.1\\.(q|k)\\.", "lr": 0.01},
            {"match": "*.weight", "betas": [0.8, 0.9]},
        ],
        weight_decay=0.3,
    )
    rest, norms, some, weights = group_names(optimizer)
    assert rest == ["long_rows", "blocks.0.q.bias", "blocks.0.v.bias", "blocks.1.v.bias"]
    assert norms == [name for name, _ in model.named_parameters() if "norm" in name]
    assert some == ["blocks.1.q.weight", "blocks.1.q.bias", "blocks.1.k.weight"]
    assert not {*norms, *some} & set(weights)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.01, 0.1]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.01, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.3, 0.3]
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert all(
            named[name] is parameter for name, parameter in zip(group["param_names"], group["params"], strict=True)
        )
    assert optim.named_optimizer_parameters(optimizer).keys() == named.keys()


def test_a_group_that_matches_everything_leaves_no_empty_group() -> None:
    assert len(build(SmallModel(), groups=[{"match": "*", "lr": 0.01}]).param_groups) == 1


def test_frozen_parameters_are_left_out() -> None:
    model = SmallModel(frozen=["embed", "blocks.0"])
    assert not any(name.startswith(("embed", "blocks.0")) for name in optim.named_optimizer_parameters(build(model)))


@pytest.mark.parametrize(
    ("settings", "groups", "message"),
    [
        ({"lrr": 1}, (), "takes no 'lrr'"),
        ({"lr": -1.0}, (), "Invalid learning rate: -1.0"),
        ({"betas": 0.9}, (), "refuses its settings"),
        ({}, [{"match": "*nrom*"}], "parameter_groups.0.match: '\\*nrom\\*' matches no trained parameter"),
        ({}, [{"match": "*"}, {"match": "*norm*"}], "parameter_groups.1.match: .* belong to groups before it"),
        ({}, [{"match": "*norm*", "weigth_decay": 0.0}], "parameter_groups: AdamW takes no 'weigth_decay'"),
        ({}, [{"match": "re:("}], "not a regular expression"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(SmallModel(), groups=groups, **settings)


def test_a_misspelled_keyword_brings_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        build(SmallModel(), groups=[{"match": "*norm*", "weigth_decay": 0.0}])
    assert caught.value.hint == "did you mean 'weight_decay'?"


def test_a_frozen_group_matches_nothing() -> None:
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        build(SmallModel(frozen=["embed"]), groups=[{"match": "embed.*"}])


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        build(SmallModel().requires_grad_(False))


def test_lr_zero_is_legal() -> None:
    assert build(SmallModel(), lr=0.0).param_groups[0]["initial_lr"] == 0.0


@pytest.mark.parametrize("factory", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_is_the_default_where_torch_has_it(factory: Any) -> None:
    assert build(SmallModel(), factory).param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    "flags", [{"foreach": True}, {"fused": False}, {"foreach": False}, {"fused": None}, {"capturable": True}]
)
def test_the_users_implementation_wins(flags: dict[str, Any]) -> None:
    group = build(SmallModel(), **flags).param_groups[0]
    assert {key: group[key] for key in flags} == flags
    assert group["fused"] is not True


def test_sgd_with_momentum_takes_a_parameter_whose_first_gradient_comes_late() -> None:
    # torch's fused SGD fails there, in any mode; so fused is not chosen for it.
    optimizer = build(SmallModel(), torch.optim.SGD, momentum=0.9)
    first, second = optimizer.param_groups[0]["params"][:2]
    first.grad = torch.ones_like(first)
    optimizer.step()
    second.grad = torch.ones_like(second)
    optimizer.step()


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_loading_a_state_dict_keeps_this_runs_implementation(mode: str) -> None:
    # The classic: a state saved by a loop optimizer turns the fused one into a loop, and the last bit changes.
    rows = make_rows(4, [2])

    def start(**flags: Any) -> tuple[SmallModel, Any]:
        model = SmallModel()
        return model, build(model, lr=0.01, **flags)

    model, optimizer = start(foreach=False)
    run(model, optim.build_stepper(model, optimizer), rows[:2])
    resumed, fresh = start()
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    group = fresh.param_groups[0]
    assert (group["fused"], group["foreach"]) == (True, None)
    straight, fused = start()
    straight.load_state_dict(model.state_dict())
    for parameter, name in zip(group["params"], group["param_names"], strict=True):
        state = fresh.state[parameter]
        own = optim.named_optimizer_parameters(fused)[name]
        if state:
            fused.state[own] = {key: value.clone() for key, value in state.items()}
    run(resumed, optim.build_stepper(resumed, fresh, when=mode), rows[2:])
    run(straight, optim.build_stepper(straight, fused), rows[2:])
    assert_same(snapshot(straight, fused), snapshot(resumed, fresh))


@pytest.mark.parametrize("first", ["after_backward", "in_backward"])
@pytest.mark.parametrize("second", ["after_backward", "in_backward"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_state_dict_goes_on_in_either_mode(first: str, second: str, clip: float | None) -> None:
    # The classic: state that lives in per-parameter optimizers is lost on save.
    rows = make_rows(4, [3, 1])

    def start() -> tuple[SmallModel, Any]:
        model = SmallModel()
        return model, build(model, lr=0.01, groups=[{"match": "*norm*", "lr": 0.1}])

    model, optimizer = start()
    run(model, optim.build_stepper(model, optimizer, when=first, max_grad_norm=clip), rows[:2])
    resumed, fresh = start()
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    run(resumed, optim.build_stepper(resumed, fresh, when=second, max_grad_norm=clip), rows[2:])
    straight, kept = start()
    run(straight, optim.build_stepper(straight, kept, max_grad_norm=clip), rows)
    assert_same(snapshot(straight, kept), snapshot(resumed, fresh))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"when": "in_backwards"}, "optimizer_step: 'in_backwards' is not one of"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: 0.0 is not positive"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"max_skipped_steps": 0}, "max_skipped_steps: 0"),
        ({"when": "in_backward", "stash": "helt", "max_grad_norm": 1.0}, "gradient_stash: no policy is called 'helt'"),
        ({"when": "in_backward", "stash": "alias", "max_grad_norm": 1.0}, "fp32 master weights"),
        ({"when": "in_backward", "buckets": ["nothing.*"]}, "buckets: 'nothing.*' matches no"),
        ({"when": "in_backward", "variant": "exact"}, "belong to immediate"),
    ],
)
def test_what_cannot_be_is_refused_by_key(settings: dict[str, Any], message: str) -> None:
    model = SmallModel()
    with pytest.raises(ConfigError, match=message):
        optim.build_stepper(model, build(model), **settings)


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_a_trained_parameter_outside_the_optimizer_is_refused(mode: str) -> None:
    model = SmallModel(frozen=["head"])
    optimizer = build(model)
    model.head.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"head\.weight is trained but not held"):
        optim.build_stepper(model, optimizer, when=mode)


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_a_parameter_frozen_or_replaced_after_the_optimizer_was_built_is_refused(mode: str) -> None:
    model = SmallModel()
    optimizer = build(model)
    model.head.requires_grad_(False)
    with pytest.raises(ConfigError, match="holds 1 parameters that the model does not train"):
        optim.build_stepper(model, optimizer, when=mode)


def test_modules_without_blocks_have_a_bucket_for_each_child_or_each_pattern() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    optimizer = build(model)

    def buckets(patterns: list[str] | None) -> list[list[str]]:
        stepper: Any = optim.build_stepper(model, optimizer, when="in_backward", buckets=patterns)
        stepper.close()
        return [[entry.name for entry in bucket.entries] for bucket in stepper._buckets]

    assert buckets(None) == [
        ["0.weight", "0.bias"],
        ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"],
        ["2.weight", "2.bias"],
    ]
    assert buckets(["*.bias"]) == [
        ["0.weight"],
        ["0.bias", "1.0.bias", "1.1.bias", "2.bias"],
        ["1.0.weight", "1.1.weight"],
        ["2.weight"],
    ]


def test_modules_with_blocks_have_a_bucket_for_each_block_and_each_other_owner() -> None:
    model = SmallModel(blocks=2)
    stepper: Any = optim.build_stepper(model, build(model), when="in_backward")
    assert [bucket.name for bucket in stepper._buckets] == ["", "embed", "block 0", "block 1", "norm", "head"]
