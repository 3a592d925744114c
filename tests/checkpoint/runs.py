"""A model of three parameters that trains in microseconds, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from optune import checkpoint

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Names with dots, a matrix of 64 × 64 (large enough for low-bit state), a vector."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.ModuleDict({"proj": nn.Linear(64, 64)})
        self.scale = nn.Parameter(torch.empty(64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the number of the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2, "foreach": False} | settings))


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "net"}\n')


def save(run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> Path:
    return checkpoint.save(
        run_dir,
        step=step,
        write_model=lambda folder: write_tensors(folder, dict(model.named_parameters())),
        optimizer=optimizer,
        named_parameters=model.named_parameters(),
        progress=progress,
    )


def make_run(run_dir: Path, steps: int, **progress: Any) -> tuple[Net, torch.optim.Optimizer]:
    """A run with a checkpoint after each of its `steps`."""
    model = Net()
    optimizer = adamw(model)
    for step in range(1, steps + 1):
        train(model, optimizer, range(step, step + 1))
        save(run_dir, step, model, optimizer, **progress)
    return model, optimizer


def load(folder: Path, make: MakeOptimizer = adamw, **settings: Any) -> tuple[Net, torch.optim.Optimizer]:
    """A fresh model and optimizer, with what the checkpoint holds."""
    model = Net(seed=99)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer = make(model, **settings)
    checkpoint.load_optimizer(optimizer, model.named_parameters(), folder)
    return model, optimizer


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a run consists of, low-bit ones taken apart."""

    def visit(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        if type(value) not in (Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                yield from visit(f"{name}.{part}", getattr(value, part))
        elif isinstance(value, Tensor):
            yield name, value.detach()

    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            yield from visit(f"{name}/{key}", value)


def assert_same_bits(
    first: tuple[nn.Module, torch.optim.Optimizer], second: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Weights and optimizer state are equal bit for bit, in names, types, shapes and values."""
    left, right = dict(state_tensors(*first)), dict(state_tensors(*second))
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        flat = [value.contiguous().reshape(-1).view(torch.uint8) for value in (tensor, right[name])]
        assert torch.equal(*flat), name
