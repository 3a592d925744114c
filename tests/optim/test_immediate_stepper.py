"""The immediate stepper in training: optimizers and their state, norms, clipping, masters, autocast."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune.errors import TrainingError
from optune.optim import Stepper, build_schedule, build_stepper, named_masters, set_learning_rate
from optune.optim.functional import value_and_immediate_grad
from optune.optim.immediate import ImmediateStepper
from tests.optim import small
from tests.optim.immediate_nets import Chain, build
from tests.optim.immediate_reference import step_layer_by_layer, step_leaf_modules


def step_chain(model: Chain, optimizer: torch.optim.Optimizer, rows: Tensor, labels: Tensor) -> None:
    """One step of `local` written out; the optimizer sees one layer's gradients at a time."""
    with torch.no_grad():
        inputs = [rows]
        for layer in model.layers:
            inputs.append(torch.tanh(layer(inputs[-1])))
    logits = model.layers[-1](inputs[-2]).detach().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    for index in reversed(range(3)):
        layer = model.layers[index]
        layer.weight.grad, layer.bias.grad = grad.t() @ inputs[index], grad.sum(0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        grad = (grad @ layer.weight.detach()) * (1 - inputs[index] ** 2)


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]


@pytest.mark.parametrize(("factory", "settings"), OPTIMIZERS)
def test_weights_and_state_equal_the_chain_written_out_under_a_schedule(factory: Any, settings: dict[str, Any]) -> None:
    ours, reference = Chain(), Chain()
    optimizer, expected = build(ours, factory, **settings), build(reference, factory, **settings)
    schedule = build_schedule(name="cosine", total_steps=6, warmup_steps=2)
    stepper = build_stepper(ours, optimizer, when="immediate")
    for step in range(6):
        rows, labels = torch.randn(4, 5), torch.randint(0, 5, (4,))
        set_learning_rate(optimizer, schedule, step)
        set_learning_rate(expected, schedule, step)
        with stepper.microbatch(True):
            F.cross_entropy(ours(rows), labels).backward()
        stepper.finish()
        step_chain(reference, expected, rows, labels)
    small.assert_same(small.snapshot(ours, optimizer), small.snapshot(reference, expected), rtol=2e-6)
    standard = build(Chain(), factory, **settings)
    assert [g.keys() for g in optimizer.state_dict()["param_groups"]] == [
        g.keys() for g in standard.state_dict()["param_groups"]
    ]


def test_it_is_a_stepper_that_names_its_variant_and_leaves_no_hooks() -> None:
    model = Chain()
    stepper = build_stepper(model, build(model, lr=0.1), when="immediate", max_parameter_grad_norm=0.5)
    assert isinstance(stepper, Stepper)
    assert stepper.passes == 1
    assert stepper.describe().startswith("immediate, local: each of 6 parameters")
    assert "each gradient clipped to norm 0.5" in stepper.describe()
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
    stepper.close()


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_grad_norm_is_that_of_the_gradients_used(variant: Any) -> None:
    model = Chain()
    before = copy.deepcopy(model)
    stepper = ImmediateStepper(model, build(model, lr=0.1), variant=variant)
    with stepper.microbatch(True):
        model(torch.randn(4, 5)).pow(2).sum().backward()
    stats = stepper.finish()
    moved = [(a - b).detach() / 0.1 for a, b in zip(before.parameters(), model.parameters(), strict=True)]
    assert stats.grad_norm == pytest.approx(math.sqrt(sum(float(m.pow(2).sum()) for m in moved)), rel=1e-4)
    assert stats.clip_factor == 1.0
    assert not stats.skipped


def test_each_gradient_is_clipped_by_its_own_norm_and_the_norm_is_logged_before() -> None:
    rows = torch.randn(4, 5)
    free, clipped = Chain(), Chain()
    start = copy.deepcopy(free)
    steppers = [
        ImmediateStepper(free, build(free, lr=1.0)),
        ImmediateStepper(clipped, build(clipped, lr=1.0), max_parameter_grad_norm=0.25),
    ]
    for model, stepper in zip((free, clipped), steppers, strict=True):
        with stepper.microbatch(True):
            model(rows).pow(2).sum().backward()
    stats = [stepper.finish() for stepper in steppers]
    norms = {
        name: [
            float((model.get_parameter(name) - start.get_parameter(name)).detach().norm()) for model in (free, clipped)
        ]
        for name, _ in start.named_parameters()
    }
    # The last layer sees the same incoming gradient in both: the same direction, a shorter way.
    for name in ("layers.2.weight", "layers.2.bias"):
        whole, short = norms[name]
        assert short == pytest.approx(min(whole, 0.25), rel=1e-4)
        step = free.get_parameter(name) - start.get_parameter(name)
        torch.testing.assert_close(
            clipped.get_parameter(name) - start.get_parameter(name), step * short / whole, rtol=1e-4, atol=1e-6
        )
    assert all(short <= 0.25 * (1 + 1e-4) for _, short in norms.values())
    assert 0 < stats[1].clip_factor <= 0.25 / norms["layers.2.weight"][0] * (1 + 1e-4)
    assert stats[1].grad_norm is not None and stats[1].grad_norm > 0.25


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_used() -> None:
    model = Chain()
    with torch.no_grad():
        model.layers[0].bias[0] = math.inf  # tanh makes it 1, and its gradient 0 · inf further down is NaN
        model.layers[0].weight[1] = math.nan
    before = copy.deepcopy(model)
    stepper = ImmediateStepper(model, build(model, torch.optim.AdamW, lr=0.1))
    with pytest.raises(TrainingError, match=r"layers\.2\.weight has norm nan") as caught, stepper.microbatch(True):
        model(torch.randn(4, 5)).sum().backward()
    assert "what was saved before is intact" in (caught.value.hint or "")
    torch.testing.assert_close(dict(model.state_dict()), dict(before.state_dict()), rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is None for p in model.parameters())


def test_local_and_exact_equal_references_on_a_decoder_like_model_in_float64() -> None:
    tokens = torch.randint(0, small.VOCABULARY, (2, small.LENGTH), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    block = ["attention_norm", "q", "k", "v", "o", "feed_norm", "gate", "up", "down"]
    order = ["embed", *(f"blocks.{i}.{name}" for i in range(2) for name in block), "norm", "head"]
    for variant in ("local", "exact"):
        ours = small.SmallModel(blocks=2).double()
        ours.long_rows = None  # type: ignore[assignment]
        # Attention's arguments are computed in the order q, k, v; so are their turns.
        reference = copy.deepcopy(ours)
        stepper = ImmediateStepper(ours, build(ours, lr=0.3), variant=variant)
        with stepper.microbatch(True):
            loss(ours).backward()
        stepper.finish()
        if variant == "local":
            step_leaf_modules(reference, loss, 0.3)
        else:
            layers = [
                [f"{name}.{key}" for key, _ in reference.get_submodule(name).named_parameters()] for name in order
            ]
            step_layer_by_layer(reference, loss, layers, 0.3)
        for (name, left), right in zip(ours.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12, msg=f"{variant} {name}")


def test_fp32_masters_take_the_update_and_the_rounded_weight_passes_on_the_gradient() -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)).to(torch.bfloat16)
    first, second = (layer.weight.detach().clone() for layer in model)
    rows, upstream = draw(4, 6), draw(4, 3)
    optimizer = build(model, lr=0.01, master_weights="fp32")
    stepper = build_stepper(model, optimizer, when="immediate")
    with stepper.microbatch(True):
        model(rows).backward(upstream)
    stepper.finish()
    new_second = second.float() - 0.01 * (upstream.t() @ F.linear(rows, first)).float()
    new_first = first.float() - 0.01 * ((upstream @ new_second.bfloat16()).t() @ rows).float()
    masters = named_masters(model.named_parameters(), optimizer)
    for name, expected in (("0.weight", new_first), ("1.weight", new_second)):
        assert masters[name].dtype is torch.float32
        torch.testing.assert_close(masters[name], expected, rtol=0, atol=1e-6)
        assert torch.equal(model.get_parameter(name), masters[name].bfloat16())


def test_autocast_layers_are_differentiated_under_the_autocast_of_their_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    start = copy.deepcopy(model)
    rows, upstream = torch.randn(4, 6), torch.randn(4, 3).bfloat16()
    stepper = ImmediateStepper(model, build(model, lr=0.5))
    with stepper.microbatch(True), torch.autocast("cpu", torch.bfloat16):
        output = model(rows)
        assert output.dtype is torch.bfloat16
        output.backward(upstream)  # autocast is still on here, which must not matter
    stepper.finish()

    def pull(layer: nn.Module, x: Tensor, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return torch.autograd.grad(layer(x), leaves, grad)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.no_grad():
        hidden = start[1](start[0](rows))
    grads = pull(start[2], hidden, list(start[2].parameters()), upstream)
    with torch.no_grad():
        for parameter, grad in zip(start[2].parameters(), grads, strict=True):
            parameter -= 0.5 * grad
    inner = hidden.clone().requires_grad_()
    (grad,) = pull(start[2], inner, [inner], upstream)
    grad = (grad * (1 - hidden * hidden)).to(torch.bfloat16)
    grads = pull(start[0], rows, list(start[0].parameters()), grad)
    with torch.no_grad():
        for parameter, grad in zip(start[0].parameters(), grads, strict=True):
            parameter -= 0.5 * grad
    assert torch.equal(model[2].weight, start[2].weight)
    torch.testing.assert_close(model[0].weight, start[0].weight, rtol=0, atol=2e-2)
    assert (
        (model[0].weight - start[0].weight).abs().max() < 0.02 < (model[0].weight - nn.Linear(6, 6).weight).abs().max()
    )


def test_reduce_may_work_in_place_without_touching_the_gradient_that_flows_on() -> None:
    """The gradient of a bias of the activation's own shape is the incoming gradient itself."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.below, self.shift = nn.Linear(3, 3), nn.Parameter(torch.randn(4, 3))

        def forward(self, rows: Tensor) -> Tensor:
            return self.below(rows) + self.shift

    rows = torch.randn(4, 3)
    results = []
    for reduce in (lambda grad: grad.mul_(0.5), lambda grad: grad * 0.5):
        model = Shift()
        stepper = ImmediateStepper(model, build(model, lr=0.1), reduce=reduce)
        with stepper.microbatch(True):
            model(rows).pow(2).sum().backward()
        stepper.finish()
        results.append(model)
    for left, right in zip(*(model.parameters() for model in results), strict=True):
        assert torch.equal(left, right)


def test_gradients_of_one_function_at_most_are_alive() -> None:
    model = small.SmallModel(blocks=3)
    seen: list[weakref.ref[Tensor]] = []

    def watch(grad: Tensor) -> Tensor:
        # A linear layer has two, its weight's and its bias's.
        assert sum(ref() is not None for ref in seen) <= 1
        assert all(p.grad is None for p in model.parameters())
        seen.append(weakref.ref(grad))
        return grad

    stepper = ImmediateStepper(model, build(model, lr=0.1), reduce=watch)
    with stepper.microbatch(True):
        small.loss_sum(model, small.make_rows(1, [1])[0][0]).backward()
    stepper.finish()
    assert len(seen) == sum(1 for name, _ in model.named_parameters() if name != "long_rows")


def test_the_mode_runs_on_a_device_without_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 2)).to("meta")
    updated: list[str] = []

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, torch.empty(3, 4, device="meta")).sum()

    def update(name: str, parameter: Tensor, grad: Tensor) -> Tensor:
        updated.append(name)
        return parameter - grad

    value_and_immediate_grad(loss, dict(model.named_parameters()), update)
    assert sorted(updated) == sorted(name for name, _ in model.named_parameters())


def test_frozen_parameters_stay_and_cost_no_node() -> None:
    model = Chain()
    model.layers[1].requires_grad_(False)
    before = copy.deepcopy(model)
    stepper = ImmediateStepper(model, build_optimizer_of_trained(model))
    with stepper.microbatch(True):
        output = model(torch.randn(4, 5))
        assert "Operation" in type(output.grad_fn).__name__
        assert "Operation" not in type(output.grad_fn.next_functions[1][0].next_functions[0][0]).__name__  # type: ignore[union-attr]
        output.pow(2).sum().backward()
    stepper.finish()
    assert torch.equal(model.layers[1].weight, before.layers[1].weight)
    assert not torch.equal(model.layers[0].weight, before.layers[0].weight)


def build_optimizer_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_functional_form_takes_tied_leaves_and_gives_zeros_for_unused_ones() -> None:
    shared = torch.randn(3, 3)
    params = {"a": shared, "b": [shared, torch.randn(2)]}
    calls: list[str] = []

    def update(name: str, parameter: Tensor, grad: Tensor) -> Tensor:
        calls.append(name)
        return parameter - grad

    def loss(p: Any, scale: float, *, offset: Tensor) -> Tensor:
        return (p["a"] @ torch.tanh(p["b"][0]) * scale + offset).sum()

    result = value_and_immediate_grad(loss, params, update, args=(2.0,), kwargs={"offset": torch.ones(3)})
    assert calls == ["a", "b.1"]
    assert result.params["a"] is result.params["b"][0]
    assert torch.equal(result.grads["b"][1], torch.zeros(2))
    leaf = shared.clone().requires_grad_()
    (grad,) = torch.autograd.grad((leaf @ torch.tanh(leaf) * 2).sum(), leaf)
    torch.testing.assert_close(result.grads["a"], grad)
