"""Adapters under every way to step: inside backward the same run as after it, immediate with the updated A and B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optune import lora, models, optim
from tests import fixtures
from tests.lora import judges


def run(base: Path, *, checkpointing: str = "none", **settings: Any) -> Any:
    """Three steps of two microbatches with dropout, clipped; returns the adapters and the norms."""
    model = models.load(base, dtype=torch.float32)
    torch.manual_seed(0)
    lora.apply(model, rank=4, alpha=8, dropout=0.2, targets="all-linear")
    judges.randomise(model)
    model.activation_checkpointing = checkpointing  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(lora.trainable(model).values(), lr=1e-2, foreach=False, fused=False)
    stepper = optim.build_stepper(model, optimizer, max_grad_norm=0.1, **settings)
    norms = []
    for step in range(3):
        for pass_index in range(stepper.passes):
            for index in range(2):
                torch.manual_seed(10 * step + index)
                with stepper.microbatch(index == 1, pass_index):
                    model(judges.tokens(seed=index)).square().mean().backward()
        norms.append(stepper.finish().grad_norm)
    return {name: tensor.clone() for name, tensor in lora.state(model).items()}, norms


@pytest.mark.parametrize("stash", ["hold", "factored", "two_pass", "auto"])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_stepping_inside_backward_is_the_same_run(tmp_path: Path, stash: str, checkpointing: str) -> None:
    base = fixtures.write_model(tmp_path)
    wanted, wanted_norms = run(base)
    found, norms = run(base, when="in_backward", stash=stash, checkpointing=checkpointing)
    assert norms == wanted_norms
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert all(norm > 0.1 for norm in norms)  # clipping is at work


def test_immediate_takes_each_gradient_with_the_adapter_already_updated() -> None:
    """B first, then A with the new B, then the layer's input with the new A: an explicit float64 chain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)).double()
    lora.apply(model, rank=2, alpha=4, targets="all-linear", dtype=torch.float64)
    judges.randomise(model)
    x, direction, rate = torch.randn(7, 5).double(), torch.randn(7, 4).double(), 0.1
    first, second = lora.layers(model).values()
    a1, b1, a2, b2 = (w.weight.detach().clone() for layer in (first, second) for w in (layer.lora_A, layer.lora_B))
    w1, w2, s = first.weight.detach(), second.weight.detach(), 2.0

    hidden = (x @ w1.T + first.bias + s * (x @ a1.T @ b1.T)).detach()  # type: ignore[operator]
    new_b2 = b2 - rate * s * direction.T @ (hidden @ a2.T)
    new_a2 = a2 - rate * s * (direction @ new_b2).T @ hidden
    grad_hidden = direction @ w2 + s * (direction @ new_b2) @ new_a2
    new_b1 = b1 - rate * s * grad_hidden.T @ (x @ a1.T)
    new_a1 = a1 - rate * s * (grad_hidden @ new_b1).T @ x

    optimizer = torch.optim.SGD(lora.trainable(model).values(), lr=rate)
    stepper = optim.build_stepper(model, optimizer, when="immediate")
    with stepper.microbatch(True):
        (model(x) * direction).sum().backward()
    stepper.finish()
    for found, wanted in zip(lora.state(model).values(), (new_a1, new_b1, new_a2, new_b2), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_immediate_trains_every_adapter_of_a_bf16_model(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.bfloat16)
    lora.apply(model, rank=4, alpha=8, dropout=0.2, targets=["all-linear", "lm_head"])
    optimizer = torch.optim.AdamW(lora.trainable(model).values(), lr=1e-3)
    stepper = optim.build_stepper(model, optimizer, when="immediate")
    for _ in range(2):
        with stepper.microbatch(True):
            model(judges.tokens()).square().mean().backward()
        stepper.finish()
    assert all(tensor.any() for tensor in lora.state(model).values())
