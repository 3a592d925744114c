"""Which elements of a spread tensor a rank holds, and which it writes.

A DTensor's mesh has one or more dimensions; its placement on each is applied to what the ones before it have left, as
torch does. So a rank holds, along each dimension of the tensor, one run of indices or (FSDP over tensor parallelism)
several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Runs = tuple[tuple[int, int], ...]
"""First index and the one after the last, of each stretch of consecutive indices."""


@dataclass(frozen=True)
class Part:
    """What one rank writes of a tensor of `shape`. `runs`: the indices along each dimension that `values` stand for.

    `values` is None where the rank writes nothing: it holds nothing, or another rank writes the same.
    """

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Runs, ...]
    values: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return 0 if self.values is None else self.values.nbytes

    def __post_init__(self) -> None:
        held = math.prod(sum(stop - start for start, stop in runs) for runs in self.runs)
        if self.values is not None and self.values.numel() != held:
            raise ValueError(f"{self.values.numel()} values for {held} places of a tensor of shape {list(self.shape)}")


Tensors = Mapping[str, Tensor] | Mapping[str, Part] | Mapping[str, Tensor | Part]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Told by the name: importing the class takes most of a second."""
    return type(tensor).__name__ == "DTensor"


def is_spread(tensors: Tensors) -> bool:
    """Whether any of them is a part of a tensor, so that ranks write them together."""
    return any(isinstance(tensor, Part) or is_sharded(tensor) for tensor in tensors.values())


def input_device(parameter: Tensor) -> torch.device:
    """Where the inputs of a model belong that `parameter` is of. Offloaded parameters do not lie there themselves."""
    return torch.device(parameter.device_mesh.device_type) if is_sharded(parameter) else parameter.device


def is_offloaded(tensor: Tensor) -> bool:
    """Whether it lies in host memory and is computed with on a device."""
    return input_device(tensor).type != tensor.device.type


def make_dtensor(values: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """A DTensor of `shape` of which this rank holds `values`, in the very memory where they lie.

    `DTensor.from_local` would move offloaded ones to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, values.dtype)
    return DTensor(values, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def local_values(tensor: Tensor) -> Tensor:
    """The values that this rank holds, detached, in the very memory of `tensor`."""
    detached = tensor.detach()
    return detached.to_local() if is_sharded(detached) else detached


def part_of(tensor: Tensor | Part, rank: int) -> Part:
    """What `rank`, which must be this process's own, writes of `tensor`. Each element is written by one rank alone.

    A tensor that is no DTensor is the same on every rank, and rank 0 writes it. Of replicas the first one writes: the
    mesh of a DTensor must hold all parts of it, and the mesh that rank 0 belongs to counts where there are several.
    """
    if isinstance(tensor, Part):
        return tensor
    whole = tuple(_whole(length) for length in tensor.shape)
    if not is_sharded(tensor):
        return Part(tensor.shape, tensor.dtype, whole, tensor.detach() if rank == 0 else None)
    values = local_values(tensor)
    writes = values.numel() > 0 and _is_first_replica(tensor)
    return Part(tensor.shape, tensor.dtype, runs_of(tensor), values if writes else None)


def parts_of(tensors: Tensors, rank: int) -> dict[str, Part]:
    """`part_of` each tensor."""
    return {name: part_of(tensor, rank) for name, tensor in tensors.items()}


def overlay(tensors: Tensors, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same tensors and parts with other memory under them, such as a copy, for all that is written."""
    return {
        name: values[name]
        if not isinstance(each, Part)
        else each
        if each.values is None
        else replace(each, values=values[name])
        for name, each in tensors.items()
    }


def runs_of(tensor: DTensor) -> tuple[Runs, ...]:
    """The indices along each dimension that this rank holds."""
    mesh, coordinates = tensor.device_mesh, _coordinates(tensor)
    steps: list[list[Any]] = [[] for _ in tensor.shape]
    for placement, size, coordinate in zip(tensor.placements, mesh.shape, coordinates, strict=True):
        if placement.is_partial():
            raise ValueError(f"a tensor with pending sums has no values yet: {tensor.placements}")
        if not placement.is_replicate():
            steps[placement.dim].append((placement, size, coordinate))  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(_select(length, tuple(taken)) for length, taken in zip(tensor.shape, steps, strict=True))


def _coordinates(tensor: DTensor) -> list[int]:
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        raise ValueError("this rank is not part of the tensor's mesh")
    return list(coordinates)


def _is_first_replica(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    replicas = zip(tensor.placements, _coordinates(tensor), strict=True)
    is_first = not any(coordinate for placement, coordinate in replicas if placement.is_replicate())
    return is_first and bool((mesh.mesh == 0).any())


def _whole(length: int) -> Runs:
    return ((0, length),) if length else ()


@lru_cache(maxsize=4096)
def _select(length: int, steps: tuple[tuple[Any, int, int], ...]) -> Runs:
    """What is left of `length` indices after each (placement, ranks on the mesh dimension, own coordinate)."""
    if not steps:
        return _whole(length)
    held = torch.arange(length)
    for placement, size, coordinate in steps:
        held = held[_chosen(placement, len(held), size, coordinate)]
    if not len(held):
        return ()
    ends = (held.diff() != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    return tuple((int(held[start]), int(held[end]) + 1) for start, end in zip(starts, [*ends, -1], strict=True))


def _chosen(placement: Any, length: int, size: int, coordinate: int) -> Any:
    """The positions, among `length` of them, that a sharding placement gives to `coordinate`."""
    if hasattr(placement, "split_factor"):
        from torch.distributed.tensor.placement_types import _StridedShardOffsetMode

        _, positions = placement._local_shard_size_and_offset(
            length, size, coordinate, offset_mode=_StridedShardOffsetMode.ALL
        )
        return torch.tensor(positions, dtype=torch.int64)
    count, first = placement._local_shard_size_and_offset(length, size, coordinate)
    return slice(first, first + count)


def spans(shape: torch.Size, runs: tuple[Runs, ...]) -> Iterator[tuple[int, int]]:
    """Where the elements of a part stand in the whole tensor, row by row: (first element, how many), in the order in
    which the part's own memory holds them."""
    depth = len(shape)
    while depth and runs[depth - 1] == _whole(shape[depth - 1]):
        depth -= 1
    inner = math.prod(shape[depth:])
    if not inner:
        return
    if not depth:
        yield 0, inner
        return
    outer = [[index for start, stop in each for index in range(start, stop)] for each in runs[: depth - 1]]
    for indices in itertools.product(*outer):
        row = 0
        for index, length in zip((*indices, 0), shape[:depth], strict=True):
            row = row * length + index
        for start, stop in runs[depth - 1]:
            yield (row + start) * inner, (stop - start) * inner


def slice_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """This rank's slice of `whole`, a plain tensor of the shape of `tensor`."""
    if not is_sharded(tensor):
        return whole
    for dim, runs in enumerate(runs_of(tensor)):
        whole = torch.cat(
            [whole.narrow(dim, start, stop - start) for start, stop in runs] or [whole.narrow(dim, 0, 0)], dim
        )
    return whole
