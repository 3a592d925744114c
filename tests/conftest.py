"""The surroundings of every test: no network, one thread, no telemetry. Subprocesses inherit them."""

import os

# Before torch, transformers or jax are imported; a user's own choice of threads and devices wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.update(
    {
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
