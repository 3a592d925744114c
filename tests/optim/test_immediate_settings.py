"""Settings, optimizers and models that immediate refuses as a whole, before the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optune.errors import ConfigError
from optune.optim.functional import value_and_immediate_grad
from optune.optim.immediate import ImmediateStepper
from tests.optim.immediate_nets import ROWS, Net, make_stepper


def test_settings_that_cannot_be_right_are_refused_with_their_key() -> None:
    model = Net(lambda m, x: m.middle(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for settings, key in (
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"max_parameter_grad_norm": 0.0}, "max_parameter_grad_norm"),
        ({"variant": "exactly"}, "variant"),
    ):
        with pytest.raises(ConfigError) as caught:
            ImmediateStepper(model, optimizer, **settings)  # type: ignore[arg-type]
        assert caught.value.where == key
    stepper = ImmediateStepper(model, optimizer)
    with pytest.raises(ConfigError) as caught, stepper.microbatch(False):
        pass
    assert caught.value.where == "gradient_accumulation_steps"
    with stepper.microbatch(True):
        model(ROWS).sum().backward()
    with pytest.raises(ConfigError) as caught, stepper.microbatch(True):
        pass
    assert caught.value.where == "gradient_accumulation_steps"


class TogetherOnly(torch.optim.SGD):
    """Scales every rate by the number of parameters that have a gradient: cannot be stepped in parts."""

    def step(self, closure: Any = None) -> None:
        count = sum(p.grad is not None for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / count)


def test_optimizers_that_cannot_be_stepped_on_one_parameter_are_refused() -> None:
    model = Net(lambda m, x: m.middle(x))
    for factory in (TogetherOnly, torch.optim.LBFGS):
        with pytest.raises(ConfigError) as caught:
            ImmediateStepper(model, factory(model.parameters(), lr=0.1))
        assert caught.value.where == "optimizer._target_"


@pytest.mark.slow
def test_compiled_and_hooked_models_are_refused_before_the_first_step() -> None:
    def build(change: Callable[[Net], Any]) -> nn.Module:
        model = Net(lambda m, x: m.middle(x))
        changed = change(model)
        return changed if isinstance(changed, nn.Module) else model

    for change, word in (
        (lambda m: m.middle.compile(), "middle is compiled"),
        (lambda m: setattr(m, "middle", torch.compile(m.middle)), "middle is compiled"),
        (lambda m: torch.compile(m), "compiled"),
        (lambda m: m.middle.weight.register_hook(lambda grad: grad), "middle.weight: it has hooks"),
        (lambda m: m.middle.weight.register_post_accumulate_grad_hook(print), "middle.weight: it has hooks"),
    ):
        model = build(change)
        with pytest.raises(ConfigError, match=word):
            make_stepper(model)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_function_that_reads_parameters_runs_as_it_was_written(warm: bool) -> None:
    plain = Net(lambda m, x: F.linear(x, m.middle.weight).relu())
    model = copy.deepcopy(plain)
    compiled = torch.compile(lambda x: F.linear(x, model.middle.weight).relu(), backend="aot_eager")
    if warm:
        compiled(torch.ones(3, 4))
    model.between = lambda m, x: compiled(x)
    for net in (plain, model):
        stepper = make_stepper(net)
        with stepper.microbatch(True):
            net(ROWS).pow(2).sum().backward()
        stepper.finish()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("params", "word"), [({"w": 1.0}, "w is float"), ({"w": torch.ones(2, dtype=torch.int64)}, "w is torch.int64")]
)
def test_functional_form_refuses_what_is_no_parameter(params: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        value_and_immediate_grad(lambda p: p["w"].sum(), params, lambda name, p, g: p - g)


def test_functional_form_refuses_an_update_of_another_shape_or_dtype() -> None:
    params = {"layers": [torch.ones(2)]}
    for update in (lambda name, p, g: (p - g)[:1], lambda name, p, g: (p - g).double()):
        with pytest.raises(ConfigError, match=r"update\('layers.0'\)"):
            value_and_immediate_grad(lambda p: p["layers"][0].sum(), params, update)
