"""A small decoder spread over ranks in every way that a run may have, and the values that it must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optune import lora, models, optim

ADAPTERS: dict[str, Any] = {"rank": 3, "alpha": 6, "targets": ["q_proj", "down_proj"]}
"""A rank of 3: of four processes, one holds no row of A."""

LAYOUTS = {
    "shard": (1, 4, 1), "replicas": (2, 2, 1), "shard x tensor": (1, 2, 2), "tensor": (1, 1, 4), "whole": (0, 0, 0),
}  # fmt: skip
"""Four processes as (replicas, shards, tensor parts). `whole`: plain parameters on each."""


def spread(model: models.Decoder, layout: tuple[int, int, int]) -> models.Decoder:
    """`model`, on the meta device, divided by torch's own FSDP2 and tensor parallelism."""
    if not any(layout):
        return model
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("replicate", "shard", "tensor"))
    if layout[2] > 1:
        _divide_layers(model, mesh["tensor"])
    if layout[0] * layout[1] > 1:
        data = mesh["replicate", "shard"] if layout[0] > 1 else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model


def _divide_layers(model: models.Decoder, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    styles: dict[str, Any] = {f"self_attn.{name}": columns for name in ("q_proj", "k_proj", "v_proj")} | {
        "self_attn.o_proj": rows,
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": rows,
    }
    for block in model.blocks:
        plain = {name: style for name, style in styles.items() if isinstance(block.get_submodule(name), nn.Linear)}
        parallelize_module(block, mesh, plain, src_data_rank=None)
    if not model.config.tie_word_embeddings:
        parallelize_module(model, mesh, {"lm_head": columns, "model.embed_tokens": rows}, src_data_rank=None)


def outline(base: Path, dtype: torch.dtype, *, adapted: bool = False) -> models.Decoder:
    model = models.outline(models.check(base)).to(dtype)
    if adapted:
        lora.apply(model, **ADAPTERS)
    return model


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` laid out as `tensor` is, by torch itself."""
    if not isinstance(tensor, DTensor):
        return values
    return distribute_tensor(values, tensor.device_mesh, src_data_rank=None).redistribute(placements=tensor.placements)


def whole(tensor: Tensor) -> Tensor:
    """All of it, put together by torch itself."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def values_for(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Values that depend on the name alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_optimizer(model: nn.Module, *, filled: bool) -> torch.optim.Optimizer:
    """AdamW with fp32 masters of low-precision weights; with `filled`, its state is made by `fill_by_name`."""
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-3}, master_weights="fp32"
    )
    if filled:
        for name, held in optim.named_optimizer_parameters(optimizer).items():
            if held is not dict(model.named_parameters())[name]:
                fill_by_name(f"{name}.master", held)
            state = {key: torch.zeros_like(held) for key in ("exp_avg", "exp_avg_sq")}
            for key, tensor in state.items():
                fill_by_name(f"{name}.{key}", tensor)
            optimizer.state[held] = {"step": torch.tensor(7.0), **state}
    return optimizer


@torch.no_grad()
def fill_by_name(name: str, tensor: Tensor) -> None:
    tensor.copy_(like(tensor, values_for(name, tensor.shape, tensor.dtype)))


def wrong_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """The names of all optimizer tensors that are not what `fill_by_name` has put there."""
    own = dict(model.named_parameters())
    for name, held in optim.named_optimizer_parameters(optimizer).items():
        state = dict(optimizer.state[held])
        if state.pop("step") != 7.0:
            yield f"{name}.step"
        if held is not own[name]:
            state["master"] = held
        for key, tensor in state.items():
            expected = values_for(f"{name}.{key}", tensor.shape, tensor.dtype)
            if not torch.equal(bits(whole(tensor)), bits(expected)):
                yield f"{name}.{key}"
            if isinstance(held, DTensor) and tensor.placements != held.placements:
                yield f"{name}.{key} lies otherwise than its parameter"
