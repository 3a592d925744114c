"""Whether two checkpoints hold the same run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from optune.errors import CheckpointError


def compare(first: Path, second: Path) -> list[str]:
    """Every tensor file and tensor in which two checkpoint folders differ, and by how much; empty when bit-equal.

    Compared are model or adapter weights and the optimizer's state. Raises CheckpointError where a folder holds none.
    """
    names = {folder: {str(path.relative_to(folder)) for path in _tensor_files(folder)} for folder in (first, second)}
    for folder, found in names.items():
        if not found:
            raise CheckpointError("holds no tensors", where=str(folder))
    differences = [f"{name}: only in one of the two" for name in sorted(names[first] ^ names[second])]
    for name in sorted(names[first] & names[second]):
        differences += [f"{name}: {line}" for line in _compare_files(first / name, second / name)]
    return differences


def _tensor_files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.safetensors")
    yield from folder.glob("optune/*.safetensors")


def _compare_files(first: Path, second: Path) -> Iterator[str]:
    with safe_open(first, "pt") as ours, safe_open(second, "pt") as theirs:
        own, other = set(ours.keys()), set(theirs.keys())
        yield from (f"{name}: only in one of the two" for name in sorted(own ^ other))
        for name in sorted(own & other):
            mine, its = ours.get_tensor(name), theirs.get_tensor(name)
            if mine.dtype != its.dtype or mine.shape != its.shape:
                yield f"{name}: {mine.dtype} {tuple(mine.shape)} and {its.dtype} {tuple(its.shape)}"
            elif not torch.equal(_bits(mine), _bits(its)):
                largest = (mine.double() - its.double()).abs().max().item()
                yield f"{name}: differs by up to {largest:.3g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN equals itself, and 0 is not -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
