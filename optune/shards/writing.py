"""Writing one safetensors file from many ranks: the same bytes as one process writes, each rank its own slices.

The layout of the file follows from names, dtypes and shapes, which every rank knows, so nobody waits for anybody: a
slice may be written before the header is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from optune.shards.parts import Part, Tensors, parts_of, spans

METADATA = {"format": "pt"}


def write_file(
    path: Path,
    tensors: Tensors,
    *,
    rank: int,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] = METADATA,
) -> None:
    """Write what `rank` holds of `tensors` into `path`, and wait until it is on the disk; rank 0 writes the header too.

    Every rank calls it with the same names, shapes, dtypes and metadata. The file is whole when all have returned.
    `dtype` is that of the file; None keeps each tensor's. Besides the tensors, host memory holds one part at a time,
    where it has to be converted or fetched from a device. Raises OSError where the disk refuses.
    """
    parts = parts_of(tensors, rank)
    header, offsets = lay_out({name: (dtype or part.dtype, part.shape) for name, part in parts.items()}, metadata)
    size = len(header) + sum(_bytes(dtype or part.dtype, part.shape) for part in parts.values())
    # For writing alone, and to its full size before anything is written: where NFS could take a page for known to it
    # (one that it has read, or that lies behind the end), it would send all of it, and with it other ranks' places.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, size)
        if rank == 0:
            _write(descriptor, memoryview(header), 0)
        for name, part in parts.items():
            if part.values is not None:
                values = part.values.to("cpu", dtype or part.dtype).contiguous()
                _write_part(descriptor, values, part, len(header) + offsets[name])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lay_out(
    entries: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str] = METADATA
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, its length in front, and the offset of each tensor behind it, in bytes.

    The library itself is asked for the order of tensors and the names of dtypes, by writing empty ones.
    """
    blank = save({name: torch.empty(0, dtype=dtype) for name, (dtype, _) in entries.items()}, dict(metadata))
    described = json.loads(blank[8 : 8 + int.from_bytes(blank[:8], "little")])
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in described.items():
        if name in entries:
            dtype, shape = entries[name]
            offsets[name], end = end, end + _bytes(dtype, shape)
            entry |= {"shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * math.prod(shape)


def _write_part(descriptor: int, values: Tensor, part: Part, offset: int) -> None:
    view = values.reshape(-1).view(torch.uint8).numpy().data
    width, done = values.element_size(), 0
    for first, count in spans(part.shape, part.runs):
        _write(descriptor, view[done : done + count * width], offset + first * width)
        done += count * width


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
