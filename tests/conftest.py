"""The surroundings of every test: no network, one thread, no telemetry, an own cache. Subprocesses inherit them."""

import atexit
import os
import shutil
import tempfile

import pytest

# Before torch, transformers or jax are imported; a user's own choice of threads and devices wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
_CACHE = tempfile.mkdtemp(prefix="optune-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.update(
    {
        "OPTUNE_CACHE": _CACHE,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "Agg",
    }
)

LONGEST = (
    "test_smollm2",
    "test_two_machines",
    "test_ranks",
    "test_two_processes",
    "test_resume",
    "test_tensor_parallel",
)
"""Files that take longest, by their names; the workers end together when these begin."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then others with slow tests; within a file nothing moves."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        if item.path not in slow:
            return len(LONGEST) + 1
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=rank)
