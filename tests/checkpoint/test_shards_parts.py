"""Which places of a tensor and of a file a rank holds. Judges: torch's own splitting, and the safetensors library."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from optune import shards
from optune.errors import ModelError
from optune.shards.parts import Part, Runs, _select, spans

MESH = (2, 3)
SHAPES = [(7,), (6, 4), (10, 3), (1, 5), (2, 3, 4), (13, 1), (0, 3)]
PLACEMENTS: list[Any] = [
    Replicate(), Shard(0), Shard(1), Shard(2), _StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2),
]  # fmt: skip


def torch_splits(whole: torch.Tensor, placements: tuple[Any, ...], coordinates: tuple[int, ...]) -> torch.Tensor:
    """This rank's part, cut by the placements themselves."""
    for placement, size, coordinate in zip(placements, MESH, coordinates, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=True)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[coordinate] if coordinate < len(parts) else empty
    return whole


def runs_for(shape: tuple[int, ...], placements: tuple[Any, ...], coordinates: tuple[int, ...]) -> tuple[Runs, ...]:
    steps: list[list[Any]] = [[] for _ in shape]
    for placement, size, coordinate in zip(placements, MESH, coordinates, strict=True):
        if not placement.is_replicate():
            steps[placement.dim].append((placement, size, coordinate))
    return tuple(_select(length, tuple(taken)) for length, taken in zip(shape, steps, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rank_holds_the_places_that_torch_gives_it(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    tried = 0
    for placements in itertools.product(PLACEMENTS, repeat=2):
        if any(not placement.is_replicate() and placement.dim >= len(shape) for placement in placements):
            continue
        taken = torch.zeros(whole.numel(), dtype=torch.int64)
        for coordinates in itertools.product(*map(range, MESH)):
            expected = torch_splits(whole, placements, coordinates)
            runs = runs_for(shape, placements, coordinates)
            places = [index for first, count in spans(whole.shape, runs) for index in range(first, first + count)]
            assert places == expected.flatten().tolist(), (placements, coordinates)
            taken[places] += 1
            tried += 1
        copies = torch.tensor([size for p, size in zip(placements, MESH, strict=True) if p.is_replicate()]).prod()
        assert (taken == copies).all(), placements
    assert tried >= 54


def test_parts_written_in_any_order_are_the_file_that_the_library_writes(tmp_path: Path) -> None:
    """The header too, for every dtype and for names that JSON has to escape or that are not ASCII."""
    generator = torch.Generator().manual_seed(0)
    dtypes = [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn,
    ]  # fmt: skip
    tensors = {f"b{i}": torch.randn(5, 3, generator=generator).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {'a "quoted" name': torch.randn(7, 2), "größe": torch.randn(4), "scalar": torch.tensor(3.0)}
    tensors |= {"nothing": torch.empty(0, 4), "a": torch.randn(3, 2, 2).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "one", metadata={"format": "pt"})
    for rank in (2, 0, 1):
        parts = {name: third(tensor, rank) for name, tensor in tensors.items()}
        shards.write_file(tmp_path / "three", parts, rank=rank)
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


def third(tensor: torch.Tensor, rank: int) -> Part:
    """One of three parts by rows; rank 0 alone writes what has no rows."""
    if not tensor.dim():
        return Part(tensor.shape, tensor.dtype, (), tensor if rank == 0 else None)
    runs = (_select(tensor.shape[0], ((Shard(0), 3, rank),)), *(((0, length),) for length in tensor.shape[1:]))
    rows = [tensor[start:stop] for start, stop in runs[0]]
    return Part(tensor.shape, tensor.dtype, runs, rows[0] if rows else None)


def test_values_are_converted_where_the_file_has_another_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(6, 2)
    for rank in range(3):
        shards.write_file(tmp_path / "file", {"a": third(tensor, rank)}, rank=rank, dtype=torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor.bfloat16())
    target = torch.empty(6, 2)
    shards.read_part(shards.read_header(tmp_path / "file")["a"], target)
    assert torch.equal(target, tensor.bfloat16().float())


def test_values_that_do_not_fit_their_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 values for 6 places of a tensor of shape \[6, 2\]"):
        Part(torch.Size([6, 2]), torch.float32, (((0, 3),), ((0, 2),)), torch.zeros(4))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "file")
    stored = shards.read_header(tmp_path / "file")["a"]
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(stored.offset + 200)
    with pytest.raises(ModelError, match="became shorter"):
        shards.read_part(stored, torch.empty(100))


def test_one_process_is_asked_nothing() -> None:
    alone = shards.Ranks()
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.lead(lambda: Path("x")) == Path("x")  # No JSON on the way.
    with pytest.raises(OSError, match="as it is"):
        alone.together(fail)


def fail() -> None:
    raise OSError("as it is")
