"""The machine in words, without its name."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimdhp", "bf16")
"""Of the processor's features, those that matrix products depend on."""
SPEED_VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "GLIBC_", "MALLOC_", "LD_", "TORCH", "PYTORCH")
"""Beginnings of the names of environment variables that bear on speed or memory."""


def plain_environment() -> dict[str, str]:
    """What a measured process is started with: it has its own settings, and none of the person who measures."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith((*SPEED_VARIABLES, "OPTUNE", "PYTHON"))
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, features, memory in GiB, huge pages, versions."""
    info = _read("/proc/cpuinfo").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info)}
    features = set(fields.get("flags", fields.get("Features", "")).split())
    huge_pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in FLAGS if flag in features],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": huge_pages.partition("[")[2].partition("]")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
