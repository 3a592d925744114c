"""Weights that are computed from parameters: the gradient flows on through the new ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.optim.immediate_nets import LR, step_once


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Arithmetic(nn.Module):
    """A linear layer, a layer whose weight is computed from parameters, and a head."""

    def __init__(self, compute: Callable[[nn.Module], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.below = nn.Linear(4, 5)
        for name, value in parameters.items():
            if name.startswith("mask"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        self.compute = compute

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.below(rows)), self.compute(self))


def fake_quantize(weight: Tensor) -> Tensor:
    return weight + ((weight * 8).round() / 8 - weight).detach()


COMPUTED: dict[str, Callable[[], Arithmetic]] = {
    "transposed": lambda: Arithmetic(lambda m: m.w.t(), w=torch.randn(5, 3)),
    "attribute T": lambda: Arithmetic(lambda m: m.w.T * 2, w=torch.randn(5, 3)),
    "shifted": lambda: Arithmetic(lambda m: 1 + m.w, w=torch.randn(3, 5)),
    "cast": lambda: Arithmetic(lambda m: m.w.to(torch.float32).double(), w=torch.randn(3, 5)),
    "masked by a buffer": lambda: Arithmetic(lambda m: m.w * m.mask, w=torch.randn(3, 5), mask=torch.ones(3, 5).triu()),
    "masked by a view of a buffer": lambda: Arithmetic(
        lambda m: m.w * m.mask[0].bool(), w=torch.randn(3, 5), mask=torch.ones(2, 3, 5).tril()
    ),
    "low rank": lambda: Arithmetic(
        lambda m: m.w + m.b @ m.a, w=torch.randn(3, 5), a=torch.randn(2, 5), b=torch.randn(3, 2)
    ),
    "normed": lambda: Arithmetic(
        lambda m: m.g * m.v / m.v.norm(dim=1, keepdim=True), g=torch.rand(3, 1), v=torch.randn(3, 5)
    ),
    "stacked": lambda: Arithmetic(lambda m: torch.stack([m.w, m.v, m.w]), w=torch.randn(5), v=torch.randn(5)),
    "parts": lambda: Arithmetic(lambda m: torch.cat(m.w.chunk(2)[::-1]), w=torch.randn(3, 5)),
    "indexed": lambda: Arithmetic(lambda m: m.w[1, :3], w=torch.randn(2, 4, 5)),
    "with dropout": lambda: Arithmetic(lambda m: F.dropout(m.w, 0.4), w=torch.randn(3, 5)),
    "straight through": lambda: Arithmetic(lambda m: fake_quantize(m.w), w=torch.randn(3, 5)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_arithmetic_on_parameters_is_seen_through(name: str) -> None:
    """The layer below gets the gradient through the new weight, computed anew from the new parameters."""
    model = COMPUTED[name]()
    rows = torch.randn(6, 4)
    reference = copy.deepcopy(model)
    step_once(model, rows)

    parameters = {n: p for n, p in reference.named_parameters() if not n.startswith("below")}
    torch.manual_seed(7)
    hidden = torch.tanh(reference.below(rows))
    inner = hidden.detach().requires_grad_()
    noise = torch.get_rng_state()
    output = F.linear(inner, reference.compute(reference))
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    grads = torch.autograd.grad(
        (output * weights).mean() + output.pow(2).mean(), [output, *parameters.values()], retain_graph=True
    )
    with torch.no_grad():
        for parameter, grad in zip(parameters.values(), grads[1:], strict=True):
            parameter -= LR * grad
    torch.set_rng_state(noise)
    hidden.backward(grads[0] @ reference.compute(reference).detach())
    with torch.no_grad():
        for parameter in reference.below.parameters():
            parameter -= LR * parameter.grad
    for key, value in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(key), value, rtol=0, atol=1e-13, msg=key)


def make_twice(parametrize: Callable[[nn.Module], Any]) -> nn.Module:
    layers = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
    for layer in layers[1:]:
        parametrize(layer)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_layers_pass_on_the_gradient_through_the_new_weight(parametrize: Callable[..., Any]) -> None:
    ours = make_twice(parametrize)
    rows = torch.randn(4, 5)
    inputs: dict[int, Tensor] = {}
    grads: dict[int, Tensor] = {}
    power = {n: b.clone() for n, b in ours.named_buffers()}

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            inputs[index] = args[0]
            args[0].register_hook(lambda grad: grads.__setitem__(index, grad))
            output.register_hook(lambda grad: grads.__setitem__(index + 1, grad))

        return hook

    for index in (2, 4):
        ours[index].register_forward_hook(watch(index))
    step_once(ours, rows)
    after = {n: b.clone() for n, b in ours.named_buffers()}
    assert power.keys() == after.keys()
    for index in (2, 4):
        # Evaluation reads the power iteration's vectors without moving them.
        weight = ours[index].eval().weight.detach()
        torch.testing.assert_close(grads[index], grads[index + 1] @ weight, rtol=0, atol=1e-12)
