"""The surroundings of every test: no network, one thread, no telemetry, an own cache. Subprocesses inherit them."""

import atexit
import os
import shutil
import tempfile

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
