"""One linear layer with a low-rank adapter: y = x Wᵀ + b + s · (dropout(x) Aᵀ) Bᵀ, W and b frozen.

LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685; scale alpha/√rank (rsLoRA): Kalajdzievski 2023,
https://arxiv.org/abs/2312.03732.

Shapes: N positions (any leading axes), I input features, O output features, R rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from optune.lora import operations
from optune.lora.quantized import Nf4Linear, Nf4Weight


class AdapterMatrix(nn.Module):
    """Holds `weight`, so that an adapter's parameters bear PEFT's names `lora_A.weight` and `lora_B.weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}"


class LoraLinear(nn.Module):
    """A linear layer that keeps `weight` and `bias` of `base` and adds `lora_A.weight`, `lora_B.weight`.

    A (rank × in_features) starts as nn.Linear starts, from torch's global CPU generator whatever the device; B
    (out_features × rank) starts at zero, so the layer starts equal to its base. `dtype` is the adapter's: with fp32
    over a bf16 base the adapter's arithmetic is fp32, rounded once when it is added to the base's output, as in PEFT.
    """

    weight: nn.Parameter | Nf4Weight
    bias: nn.Parameter | None
    input_part: slice | None = None
    """Which input features come in, where several processes share the layer; dropout draws for all of them."""

    def __init__(
        self,
        base: nn.Linear | Nf4Linear,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        use_rslora: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha, self.dropout, self.use_rslora = rank, alpha, dropout, use_rslora
        self.scale = alpha / math.sqrt(rank) if use_rslora else alpha / rank
        weight: Any = base.weight
        self.weight = weight
        self.register_parameter("bias", base.bias)
        start_RI = draw_start(rank, base.in_features)
        device = base.weight.device
        self.lora_A = AdapterMatrix(start_RI.to(device, dtype))
        self.lora_B = AdapterMatrix(torch.zeros(base.out_features, rank, device=device, dtype=dtype))
        self.train(base.training)

    def forward(self, input_NI: Tensor) -> Tensor:
        down_RI, up_OR = self.lora_A.weight, self.lora_B.weight
        keep_NI, scale = None, self.scale
        if self.training and self.dropout > 0:
            keep_NI = self._draw_keep(input_NI)
            scale = scale / (1 - self.dropout)
        weight, shape = self.weight, self.weight.shape
        packed = weight.packed if isinstance(weight, Nf4Weight) else weight
        is_frozen = not any(t is not None and t.requires_grad for t in (*operations.pieces(packed), self.bias))
        if is_frozen and not has_torch_function((input_NI, down_RI, up_OR)):
            return operations.lora_linear(input_NI, packed, shape, self.bias, down_RI, up_OR, keep_NI, scale)
        # A TorchFunctionMode sees what is called with a Parameter, so it is shown plain linear layers.
        if isinstance(packed, Tensor):
            output_NO = F.linear(input_NI, packed, self.bias)
        else:
            output_NO = operations.frozen_linear(input_NI, packed, shape, self.bias)
        return _add_low_rank(output_NO, input_NI, down_RI, up_OR, keep_NI, scale)

    def _draw_keep(self, input_NI: Tensor) -> Tensor:
        if self.input_part is None:
            return draw_keep(input_NI, 1 - self.dropout)
        # The draw of the whole layer, so that all its parts, and one process alone, drop the same entries.
        whole_NI = input_NI[..., :1].expand(*input_NI.shape[:-1], self.in_features)
        return draw_keep(whole_NI, 1 - self.dropout)[..., self.input_part]

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + s·BA, computed in fp32 and rounded once to W's dtype: O×I."""
        weight_OI = self.weight.unpack(torch.float32) if isinstance(self.weight, Nf4Weight) else self.weight
        merged_OI = merge_weight(weight_OI, self.lora_A.weight, self.lora_B.weight, self.scale)
        return merged_OI.to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


def draw_start(rank: int, in_features: int) -> Tensor:
    """The values that A starts with, rank × in_features, in fp32: those of nn.Linear, from the global CPU generator."""
    start_RI = torch.empty(rank, in_features, dtype=torch.float32)
    return nn.init.kaiming_uniform_(start_RI, a=math.sqrt(5))


def draw_keep(input_NI: Tensor, share: float) -> Tensor:
    """Which entries dropout keeps: each with probability `share`; on CPU the very draw of nn.Dropout."""
    if torch.compiler.is_compiling():
        # Not bernoulli_: torch 2.13's Inductor fuses readers of the mask into kernels that run before it is drawn.
        return torch.rand_like(input_NI, dtype=torch.float32) < share
    return torch.empty_like(input_NI, dtype=torch.bool).bernoulli_(share)


def merge_weight(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """`W32 + scale · (B32 @ A32)`, rounded once to the dtype of `weight_OI` (a float64 weight stays float64)."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    merged_OI = weight_OI.to(dtype) + scale * (up_OR.to(dtype) @ down_RI.to(dtype))
    return merged_OI.to(weight_OI.dtype)


def _add_low_rank(
    output_NO: Tensor, input_NI: Tensor, down_RI: Tensor, up_OR: Tensor, keep_NI: Tensor | None, scale: float
) -> Tensor:
    """What `operations.lora_linear` adds to the base's output, in plain differentiable operations."""
    kept_NI = input_NI.to(down_RI.dtype)
    if keep_NI is not None:
        kept_NI = kept_NI * keep_NI
    delta_NO = F.linear(F.linear(kept_NI, down_RI), up_OR) * scale
    return (output_NO.to(delta_NO.dtype) + delta_NO).to(output_NO.dtype)
