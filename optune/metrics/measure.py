"""Peak memory, and numbers as people read them."""

from __future__ import annotations

import resource
import sys

GIB = 2**30


def peak_memory_gib(device: str = "cpu") -> float:
    """`peak_memory_bytes` in GiB."""
    return peak_memory_bytes(device) / GIB


def peak_memory_bytes(device: str = "cpu") -> int:
    """The most memory used since the start: the allocator's on CUDA, the process's resident memory on CPU."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if kind == "mps":
        import torch

        return torch.mps.driver_allocated_memory()
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_time(seconds: float) -> str:
    """`4:05`, `1:02:03`, `2d 03:04`."""
    whole = round(max(0.0, seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def format_rate(per_second: float) -> str:
    """`3.4`, `820`, `12.3k`, `1.2M`."""
    for unit in ("", "k", "M"):
        if per_second < 999.5:
            return f"{per_second:.1f}{unit}" if per_second < (99.95 if unit else 9.95) else f"{per_second:.0f}{unit}"
        per_second /= 1000
    return f"{per_second:.1f}G"


def format_value(value: float | None) -> str:
    """A loss or norm in few characters: `1.2346`, `12.35`, `0.0012`, `1.2e-05`, `nan`; `-` for none."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{4 if abs(value) < 10 else 2 if abs(value) < 1000 else 0}f}"
    return f"{value:.1e}" if value == value and abs(value) != float("inf") else str(value)
