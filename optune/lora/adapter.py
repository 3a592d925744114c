"""Adapters put into a model, listed, and merged into its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from optune import shards
from optune.errors import ConfigError
from optune.lora import targets as selection
from optune.lora.layer import LoraLinear, draw_start
from optune.lora.quantized import NF4, Nf4Linear, Nf4Weight


def apply(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str | Sequence[str],
    use_rslora: bool = False,
    quantize_base: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Freezes every parameter of `model` and puts a trainable adapter on each linear layer that `targets` select.

    Layers are replaced in place, in the model's order, so that the adapters' start depends on torch's global seed and
    the set of layers alone, not on the order of `targets`. Base parameters keep their names. Returns the names of the
    adapted layers. `targets`: see `optune.lora.targets`; `dtype`: of the adapters, whatever the base's;
    `quantize_base`: `nf4` also does what `quantize` does (QLoRA).

    Raises ConfigError that names the key and value of a setting out of range, every target that selects nothing, that
    is no linear layer or that is tied, and a model that has adapters already. Nothing is changed then.
    """
    _check_settings(rank, alpha, dropout)
    if quantize_base not in (None, NF4):
        raise ConfigError(f"{quantize_base!r} is not one of null, {NF4}", where="lora.quantize_base")
    if layers(model):
        raise ConfigError("the model has adapters already", where="lora", hint="merge them first")
    names = selection.find(model, targets)
    model.requires_grad_(False)
    if quantize_base is not None:
        quantize(model)
    for name in names:
        put(model, name, rank=rank, alpha=alpha, dropout=dropout, use_rslora=use_rslora, dtype=dtype)
    return names


def quantize(model: nn.Module) -> list[str]:
    """Holds the weight of every linear layer but the head in NF4, in place; see `optune.lora.nf4`. Returns their names.

    The layers must be frozen. A model on the meta device is quantized tensor by tensor when it is filled, so that its
    weights never stand in memory as they are stored; one with values at once. Layers that share their weight with
    another module, and those with adapters, stay as they are.
    """
    shared = selection.shared_weights(model)
    found = [name for name in selection.linear_names(model) if not selection.is_head(name) and name not in shared]
    for name in found:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        if layer.weight.requires_grad:
            raise ValueError(f"{name} is trained: only frozen weights can be quantized")
        model.set_submodule(name, Nf4Linear(layer))
    return found


def put(
    model: nn.Module, name: str, *, rank: int, alpha: float, dropout: float, use_rslora: bool, dtype: torch.dtype
) -> None:
    """Replaces the linear layer `name` by a LoraLinear over the same weight and bias."""
    base = model.get_submodule(name)
    assert isinstance(base, nn.Linear | Nf4Linear), name
    adapted = LoraLinear(base, rank=rank, alpha=alpha, dropout=dropout, use_rslora=use_rslora, dtype=dtype)
    model.set_submodule(name, adapted)


def check_free(model: nn.Module, names: Sequence[str], *, where: str) -> None:
    """Raises ConfigError that names each of the layers whose weight is also another module's."""
    shared = selection.shared_weights(model)
    if problems := [f"{name} {shared[name]}" for name in names if name in shared]:
        raise ConfigError("; ".join(problems), where=where)


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' matrices by parameter name (`….lora_A.weight`, `….lora_B.weight`), detached, not copied."""
    tensors: dict[str, Tensor] = {}
    for name, layer in layers(model).items():
        tensors[f"{name}.lora_A.weight"] = layer.lora_A.weight.detach()
        tensors[f"{name}.lora_B.weight"] = layer.lora_B.weight.detach()
    return tensors


@torch.no_grad()
def start(model: nn.Module) -> None:
    """Gives each adapter the values that `apply` starts it with, drawn from torch's global CPU generator as there.

    For a model that was adapted on the meta device and has its memory now: seed, then call this. Of adapters that are
    spread over processes each takes its own slices; all must be seeded alike.
    """
    for layer in layers(model).values():
        down, up = layer.lora_A.weight, layer.lora_B.weight
        shards.local_values(down).copy_(shards.slice_like(draw_start(layer.rank, layer.in_features), down))
        shards.local_values(up).zero_()


@torch.no_grad()
def merge(model: nn.Module) -> list[str]:
    """Adds every adapter to the weight under it and puts plain linear layers back, in place.

    Each weight becomes `W32 + s · (B32 @ A32)`, rounded once to its own dtype. Every weight in NF4, with an adapter or
    without, becomes the matrix that it stands for. Returns the names of the merged layers.
    """
    merged = layers(model)
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLinear | Nf4Linear)]:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        if isinstance(layer, Nf4Linear):
            plain.weight = nn.Parameter(layer.weight.unpack(), requires_grad=False)
        elif isinstance(layer.weight, Nf4Weight):
            plain.weight = nn.Parameter(layer.merged_weight(), requires_grad=False)
        else:
            layer.weight.copy_(layer.merged_weight())
            plain.weight = layer.weight
        plain.register_parameter("bias", layer.bias)
        model.set_submodule(name, plain.train(layer.training))
    return list(merged)


def _check_settings(rank: int, alpha: float, dropout: float) -> None:
    """All settings out of range, at once."""
    rules = [
        ("lora.rank", rank, _is_number(rank) and isinstance(rank, int) and rank >= 1, "an integer of at least 1"),
        ("lora.alpha", alpha, _is_number(alpha) and alpha > 0, "a number above 0"),
        ("lora.dropout", dropout, _is_number(dropout) and 0 <= dropout < 1, "in [0, 1)"),
    ]
    broken = [f"{key} is {value!r} and must be {rule}" for key, value, holds, rule in rules if not holds]
    if broken:
        raise ConfigError("; ".join(broken))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
