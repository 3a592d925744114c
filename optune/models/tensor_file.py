"""Reading single tensors out of a safetensors file, straight into the memory where they belong.

The safetensors library checks the file; the bytes are then read rather than mapped. Mapping costs a page fault for
every 4 KiB when the weights are copied out, which takes ten times as long as reading.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from optune.errors import ModelError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands in a file. `kind` is the dtype in the format's spelling; offset and size are bytes."""

    file: Path
    shape: torch.Size
    kind: str
    offset: int
    size: int


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
    tensor = torch.empty(stored.shape, dtype=FLOATS[stored.kind])
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset)
        while view:
            count = stream.readinto(view)
            if not count:
                raise ModelError("the file became shorter while it was read", where=str(stored.file))
            view = view[count:]
    return tensor.to(device, dtype)
