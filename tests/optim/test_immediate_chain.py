"""Immediate against chains written out: in torch float64 with each stage differentiated alone, and in JAX.

Shapes: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from optune.optim.functional import value_and_immediate_grad
from optune.optim.immediate import ImmediateStepper

V, D, N = 13, 6, 9
NAMES = ["embed", "norm", "scale", "hidden", "affine", "head"]
Params = dict[str, dict[str, Any]]


def make_numbers(seed: int = 0) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray, np.ndarray]:
    """Parameters, tokens and labels as float64 and int64 arrays."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(size=shape) * 0.5

    params = {
        "embed": {"weight": draw(V, D)},
        "norm": {"weight": 1 + draw(D)},
        "scale": {"weight": draw(D)},
        "hidden": {"weight": draw(D, D), "bias": draw(D)},
        "affine": {"weight": 1 + draw(D), "bias": draw(D)},
        "head": {"weight": draw(V, D)},
    }
    return params, random.integers(0, V, N), random.integers(0, V, N)


class Chain(nn.Module):
    """The chain as a module."""

    def __init__(self, params: dict[str, dict[str, np.ndarray]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.scale = nn.Module()
        self.scale.weight = nn.Parameter(torch.zeros(D))
        self.hidden = nn.Linear(D, D)
        self.affine = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.double()
        self.load_state_dict({f"{k}.{n}": torch.from_numpy(a) for k, group in params.items() for n, a in group.items()})

    def forward(self, tokens_N: Tensor) -> Tensor:
        hidden_ND = self.norm(self.embed(tokens_N)) * self.scale.weight
        return self.head(self.affine(torch.tanh(self.hidden(hidden_ND))))


STAGES: dict[str, Callable[..., Tensor]] = {
    "embed": lambda tokens_N, p: p["weight"][tokens_N],
    "norm": lambda x_ND, p: x_ND / (x_ND.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p["weight"],
    "scale": lambda x_ND, p: x_ND * p["weight"],
    "hidden": lambda x_ND, p: x_ND @ p["weight"].T + p["bias"],
    "tanh": lambda x_ND, p: torch.tanh(x_ND),
    "affine": lambda x_ND, p: (
        (x_ND - x_ND.mean(-1, keepdim=True)) / (x_ND.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * p["weight"]
        + p["bias"]
    ),
    "head": lambda x_ND, p: x_ND @ p["weight"].T,
}


def step_chain_local(params: Params, tokens: Tensor, labels: Tensor, lr: float) -> Params:
    """Stage by stage: forward with detached inputs, then backward with an update between the two gradients."""
    new = {name: dict(group) for name, group in params.items()}
    inputs: dict[str, Tensor] = {}
    x = tokens
    for name, stage in STAGES.items():
        inputs[name] = x.detach()
        x = stage(x, params.get(name, {}))
    logits = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    for name, stage in reversed(STAGES.items()):
        old = {key: value.detach().requires_grad_() for key, value in params.get(name, {}).items()}
        if old:
            grads = torch.autograd.grad(stage(inputs[name], old), list(old.values()), g)
            new[name] = {k: value.detach() - lr * grad for (k, value), grad in zip(old.items(), grads, strict=True)}
        if name != "embed":
            x = inputs[name].requires_grad_()
            (g,) = torch.autograd.grad(stage(x, new.get(name, {})), x, g)
    return new


def step_chain_exact(params: Params, tokens: Tensor, labels: Tensor, lr: float) -> Params:
    """From the last stage to the first, an ordinary gradient of the whole chain at the present parameters."""
    new = {name: dict(group) for name, group in params.items()}
    for name in reversed(NAMES):
        leaves = {key: value.detach().requires_grad_() for key, value in new[name].items()}
        x = tokens
        for stage, function in STAGES.items():
            x = function(x, leaves if stage == name else new.get(stage, {}))
        grads = torch.autograd.grad(F.cross_entropy(x, labels), list(leaves.values()))
        new[name] = {k: value.detach() - lr * grad for (k, value), grad in zip(leaves.items(), grads, strict=True)}
    return new


REFERENCES = {"local": step_chain_local, "exact": step_chain_exact}


def step_module(model: nn.Module, tokens: Tensor, labels: Tensor, lr: float, variant: Any) -> None:
    stepper = ImmediateStepper(model, torch.optim.SGD(model.parameters(), lr=lr), variant=variant)
    with stepper.microbatch(True):
        F.cross_entropy(model(tokens), labels).backward()
    stepper.finish()


def assert_near(model: nn.Module, params: Params, tolerance: float = 1e-14) -> None:
    for name, value in model.named_parameters():
        group, key = name.split(".")
        difference = float((value.detach() - torch.tensor(np.asarray(params[group][key]))).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def to_torch(arrays: dict[str, dict[str, np.ndarray]]) -> Params:
    return {name: {key: torch.from_numpy(a.copy()) for key, a in group.items()} for name, group in arrays.items()}


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_module_equals_the_explicit_chain_in_float64(variant: str) -> None:
    arrays, tokens, labels = make_numbers()
    model, params = Chain(arrays), to_torch(arrays)
    rows = torch.from_numpy(tokens), torch.from_numpy(labels)
    for _ in range(3):
        step_module(model, *rows, 0.3, variant)
        params = REFERENCES[variant](params, *rows, 0.3)
    assert_near(model, params)


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_functional_form_equals_the_explicit_chain_and_leaves_its_parameters_alone(variant: Any) -> None:
    arrays, tokens, labels = make_numbers(1)
    params = to_torch(arrays)
    rows = torch.from_numpy(tokens), torch.from_numpy(labels)

    def loss(params: Params, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, params["embed"]["weight"])
        x = F.rms_norm(x, (D,), params["norm"]["weight"], eps=1e-5) * params["scale"]["weight"]
        x = F.layer_norm(torch.tanh(F.linear(x, **params["hidden"])), (D,), **params["affine"])
        return F.cross_entropy(F.linear(x, **params["head"]), labels)

    result = value_and_immediate_grad(loss, params, lambda name, p, g: p - 0.3 * g, args=rows, variant=variant)
    expected = REFERENCES[variant](params, *rows, 0.3)
    for name, group in expected.items():
        for key, value in group.items():
            torch.testing.assert_close(result.params[name][key], value, rtol=0, atol=1e-14)
            gradient = (params[name][key] - value) / 0.3
            torch.testing.assert_close(result.grads[name][key], gradient, rtol=0, atol=1e-14)
            assert torch.equal(params[name][key], torch.from_numpy(arrays[name][key]))
    torch.testing.assert_close(result.loss, loss(params, *rows), rtol=0, atol=1e-14)


def jax_stages() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp

    def normalize(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    return {
        "embed": lambda tokens, p: p["weight"][tokens],
        "norm": lambda x, p: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["weight"],
        "scale": lambda x, p: x * p["weight"],
        "hidden": lambda x, p: x @ p["weight"].T + p["bias"],
        "tanh": lambda x, p: jnp.tanh(x),
        "affine": lambda x, p: normalize(x) * p["weight"] + p["bias"],
        "head": lambda x, p: x @ p["weight"].T,
    }


def jax_cross_entropy(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def step_jax_local(params: Params, tokens: Any, labels: Any, lr: float) -> Params:
    """Backpropagation by `jax.vjp` of each stage, with the update between its two halves."""
    import jax

    stages, x, inputs = jax_stages(), tokens, {}
    for name, stage in stages.items():
        inputs[name] = x
        x = stage(x, params.get(name, {}))
    _, pull = jax.vjp(lambda logits: jax_cross_entropy(logits, labels), x)
    (g,) = pull(1.0)
    new = dict(params)
    for name in reversed(stages):
        stage, x = stages[name], inputs[name]
        if name in params:
            _, pull = jax.vjp(lambda p, stage=stage, x=x: stage(x, p), params[name])
            (grads,) = pull(g)
            new[name] = jax.tree.map(lambda p, grad: p - lr * grad, params[name], grads)
        if name != "embed":
            _, pull = jax.vjp(lambda x, stage=stage, name=name: stage(x, new.get(name, {})), x)
            (g,) = pull(g)
    return new


def step_jax_exact(params: Params, tokens: Any, labels: Any, lr: float) -> Params:
    """`jax.grad` of the whole chain for one stage after the other, the last stage first."""
    import jax

    stages, new = jax_stages(), dict(params)

    def loss(group: Any, name: str, others: Params) -> Any:
        x = tokens
        for stage, function in stages.items():
            x = function(x, group if stage == name else others.get(stage, {}))
        return jax_cross_entropy(x, labels)

    for name in reversed(NAMES):
        grads = jax.grad(loss)(new[name], name, new)
        new[name] = jax.tree.map(lambda p, grad: p - lr * grad, new[name], grads)
    return new


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "reference"), [("local", step_jax_local), ("exact", step_jax_exact)])
def test_module_equals_the_chain_in_jax(variant: str, reference: Callable[..., Params]) -> None:
    import jax

    arrays, tokens, labels = make_numbers(2)
    model = Chain(arrays)
    with jax.enable_x64(True):
        params = jax.tree.map(jax.numpy.asarray, arrays)
        for _ in range(2):
            step_module(model, torch.from_numpy(tokens), torch.from_numpy(labels), 0.3, variant)
            params = reference(params, tokens, labels, 0.3)
        assert_near(model, params, tolerance=1e-13)


def step_standard(model: nn.Module, rows: Sequence[Tensor], lr: float) -> None:
    F.cross_entropy(model(rows[0]), rows[1]).backward()
    torch.optim.SGD(model.parameters(), lr=lr).step()


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_last_layer_equals_standard_sgd_bit_for_bit_and_the_others_do_not(variant: str) -> None:
    arrays, tokens, labels = make_numbers(3)
    ours, standard = Chain(arrays), Chain(arrays)
    rows = torch.from_numpy(tokens), torch.from_numpy(labels)
    step_module(ours, *rows, 0.1, variant)
    step_standard(standard, rows, 0.1)
    assert torch.equal(ours.head.weight, standard.head.weight)
    for name, value in ours.named_parameters():
        if name != "head.weight":
            assert not torch.equal(value, standard.get_parameter(name)), name


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_difference_to_standard_sgd_falls_by_100_when_the_rate_falls_by_10(variant: str) -> None:
    arrays, tokens, labels = make_numbers(4)
    rows = torch.from_numpy(tokens), torch.from_numpy(labels)
    differences = []
    for lr in (1e-3, 1e-4, 1e-5):
        ours, standard = Chain(arrays), Chain(arrays)
        step_module(ours, *rows, lr, variant)
        step_standard(standard, rows, lr)
        pairs = zip(ours.state_dict().values(), standard.state_dict().values(), strict=True)
        differences.append(max(float((a - b).abs().max()) for a, b in pairs))
    assert differences[0] / differences[1] == pytest.approx(100, rel=0.06)
    assert differences[1] / differences[2] == pytest.approx(100, rel=0.01)


def test_input_gradient_is_that_of_the_linearized_loss_after_the_update() -> None:
    """The gradient of <dy, W x> − ½ lr ‖dW‖² with dy held fixed, as docs/immediate.md says."""
    arrays, _, _ = make_numbers(6)
    lr, rows = 0.3, torch.from_numpy(arrays["head"]["weight"]).clone().requires_grad_()
    upstream = torch.from_numpy(arrays["embed"]["weight"])
    layer = nn.Linear(D, D, bias=False).double()
    weight = layer.weight.detach().clone()
    stepper = ImmediateStepper(layer, torch.optim.SGD(layer.parameters(), lr=lr))
    with stepper.microbatch(True):
        layer(rows).backward(upstream)
    stepper.finish()
    x = rows.detach().requires_grad_()
    linearized = (upstream * (x @ weight.t())).sum() - 0.5 * lr * (upstream.t() @ x).pow(2).sum()
    (expected,) = torch.autograd.grad(linearized, x)
    torch.testing.assert_close(rows.grad, expected, rtol=0, atol=1e-13)


def test_flops_of_linear_layers_equal_those_of_standard_backpropagation() -> None:
    arrays, tokens, labels = make_numbers(5)
    ours, standard = Chain(arrays), Chain(arrays)
    rows = torch.from_numpy(tokens), torch.from_numpy(labels)
    with FlopCounterMode(display=False) as expected:
        step_standard(standard, rows, 0.1)
    stepper = ImmediateStepper(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    with FlopCounterMode(display=False) as counted, stepper.microbatch(True):
        F.cross_entropy(ours(rows[0]), rows[1]).backward()
    assert counted.get_total_flops() == expected.get_total_flops() > 0
