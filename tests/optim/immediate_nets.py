"""Nets, an optimizer and single steps that the tests of immediate share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optune.optim import build_optimizer
from optune.optim.immediate import ImmediateStepper

ROWS = torch.linspace(-1, 1, 12).view(3, 4)
LR = 0.05


def build(model: nn.Module, factory: Any = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    masters = settings.pop("master_weights", "none")
    return build_optimizer(model.named_parameters(), factory=factory, settings=settings, master_weights=masters)


class Chain(nn.Module):
    """Three linear layers with tanh between."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Net(nn.Module):
    """A layer, something under test, and a head."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)
        self.between = between

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.between(self, self.below(rows))))


def make_stepper(model: nn.Module, variant: Any = "local") -> ImmediateStepper:
    return ImmediateStepper(model, torch.optim.SGD(model.parameters(), lr=0.1), variant=variant)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    torch.manual_seed(7)  # dropout
    output = model(rows)
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return (output * weights).mean() + output.pow(2).mean()


def step_once(model: nn.Module, rows: Tensor, variant: Any = "local", lr: float = LR) -> None:
    stepper = ImmediateStepper(model, torch.optim.SGD(model.parameters(), lr=lr), variant=variant)
    with stepper.microbatch(True):
        loss_of(model, rows).backward()
    stepper.finish()
