"""Reading single tensors, or parts of them, out of a safetensors file, straight into the memory where they belong.

The safetensors library checks the file; the bytes are then read rather than mapped. Mapping costs a page fault for
every 4 KiB when the weights are copied out, which takes ten times as long as reading.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from optune.errors import ModelError
from optune.shards.parts import Runs, is_sharded, local_values, make_dtensor, runs_of, spans

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_KINDS = FLOATS | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


_PIECE = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands in a file. `kind` is the dtype in the format's spelling; offset and size are bytes."""

    file: Path
    shape: torch.Size
    kind: str
    offset: int
    size: int

    @property
    def dtype(self) -> torch.dtype:
        return _KINDS[self.kind]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, by name. Raises `ModelError` where the file is missing, damaged or cut short."""
    try:
        with safe_open(file, framework="pt"):
            pass  # Checks that the entries are sound and cover the file exactly.
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelError("the file is missing", where=file.name) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"the file is damaged or cut short ({error})", where=file.name) from None
    entries.pop("__metadata__", None)
    start = 8 + length
    return {
        name: StoredTensor(file, torch.Size(entry["shape"]), entry["dtype"], start + begin, end - begin)
        for name, entry in entries.items()
        for begin, end in [entry["data_offsets"]]
    }


def read_tensor(stored: StoredTensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A new tensor with the stored values, rounded to `dtype`."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    _read(stored, tuple(((0, length),) if length else () for length in stored.shape), tensor)
    return tensor.to(device, dtype)


def have_same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors are equal, byte for byte; a piece of each is in memory at a time."""
    if first.size != second.size:
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        for done in range(0, first.size, _PIECE):
            count = min(_PIECE, first.size - done)
            if one.read(count) != other.read(count):
                return False
    return True


def is_read_directly(stored: StoredTensor, target: Tensor) -> bool:
    """Whether `read_part` takes no memory beside that of `target`."""
    values = local_values(target)
    return values.device.type == "cpu" and values.dtype == stored.dtype and values.is_contiguous()


def read_part(stored: StoredTensor, target: Tensor) -> None:
    """Fill `target`, of the stored shape, in place: of a DTensor this rank's part, and no more of the file is read.

    Values are rounded to the dtype of `target`. Beside it, host memory holds at most the part once more, in the stored
    dtype: where that is not the target's, or the target is not in host memory.
    """
    if stored.shape != target.shape:
        raise ValueError(f"{list(stored.shape)} are stored, {list(target.shape)} wanted")
    values = local_values(target)
    runs = runs_of(target) if is_sharded(target) else tuple(((0, length),) if length else () for length in stored.shape)
    is_direct = is_read_directly(stored, target)
    buffer = values if is_direct else torch.empty(values.shape, dtype=stored.dtype)
    _read(stored, runs, buffer)
    if not is_direct:
        with torch.no_grad():
            values.copy_(buffer)


def read_like(stored: StoredTensor, model: DTensor, device: torch.device | str | None = None) -> Tensor:
    """A new DTensor with the stored values and dtype, laid out as `model` is where the shapes are the same.

    Where they are not, every rank holds all of it. The values lie on `device`, or where those of `model` do.
    """
    from torch.distributed.tensor import Replicate

    same = stored.shape == model.shape
    placements = model.placements if same else [Replicate()] * model.device_mesh.ndim
    local_shape = model.to_local().shape if same else stored.shape
    values = torch.empty(local_shape, dtype=stored.dtype, device=device or model.to_local().device)
    made = make_dtensor(values, model.device_mesh, placements, stored.shape)
    read_part(stored, made)
    return made


def _read(stored: StoredTensor, runs: tuple[Runs, ...], buffer: Tensor) -> None:
    """Fill `buffer`, contiguous and in host memory, with the stored elements at `runs`."""
    if not buffer.numel():
        return
    view = buffer.reshape(-1).view(torch.uint8).numpy().data
    width = buffer.element_size()
    descriptor = os.open(stored.file, os.O_RDONLY)
    try:
        done = 0
        for first, count in spans(stored.shape, runs):
            offset, end = stored.offset + first * width, done + count * width
            while done < end:
                got = os.preadv(descriptor, [view[done:end]], offset)
                if not got:
                    raise ModelError("the file became shorter while it was read", where=str(stored.file))
                done, offset = done + got, offset + got
    finally:
        os.close(descriptor)
