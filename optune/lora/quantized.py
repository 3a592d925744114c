"""Frozen linear layers whose weight is held in NF4 and dequantized only while it is multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optune import shards
from optune.lora import nf4, operations

NF4 = "nf4"
"""What `lora.quantize_base` calls the format."""


class Nf4Weight(nn.Module):
    """A frozen matrix (out × in) in NF4, in the place of a layer's `weight`; see `optune.lora.nf4`.

    `dtype` is that of the matrix it stands for. Its parts are frozen Parameters of whole numbers and fp32, so that
    whatever shards, gathers and moves a model's parameters does so with them. On the meta device, without values, until
    `pack` is called after memory has been given.
    """

    format = NF4
    codes: nn.Parameter
    scales: nn.Parameter
    steps: nn.Parameter
    mean: nn.Parameter

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        for name, part in nf4.packed_sizes(shape.numel())._asdict().items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    @property
    def packed(self) -> nf4.Packed:
        return nf4.Packed(self.codes, self.scales, self.steps, self.mean)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @torch.no_grad()
    def pack(self, values: Tensor) -> None:
        """Takes the values of the whole matrix; where the parts are spread over processes, each keeps its slices."""
        if values.shape != self.shape:
            raise ValueError(f"{list(values.shape)} given, {list(self.shape)} wanted")
        for own, part in zip(self.packed, nf4.quantize(values.to(self.device)), strict=True):
            shards.local_values(own).copy_(shards.slice_like(part, own))

    @torch.no_grad()
    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new matrix with the values that this one stands for, rounded once to `dtype` (None: its own)."""
        return nf4.dequantize(self.packed, self.shape, dtype or self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Moves, but never rounds: scales in bf16 would be other scales.
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype:
                return moved
            self.dtype = moved.dtype
            return tensor.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, nf4"


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight of `model` is held in NF4."""
    return any(isinstance(module, Nf4Weight) for module in model.modules())


class Nf4Linear(nn.Module):
    """A linear layer with a frozen weight in NF4: y = x Wᵀ + b. No gradient for W; that of x goes through the
    dequantized W, which is made again for it: what autograd keeps is the codes."""

    weight: Nf4Weight
    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = Nf4Weight(base.weight.shape, base.weight.dtype)
        self.register_parameter("bias", base.bias)
        if not base.weight.is_meta:
            self.weight.to_empty(device=base.weight.device).pack(base.weight)
        self.train(base.training)

    def forward(self, input_NI: Tensor) -> Tensor:
        return operations.frozen_linear(input_NI, self.weight.packed, self.weight.shape, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
