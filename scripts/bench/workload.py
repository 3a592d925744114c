"""The step of `recipes/full_finetune.py` on random tokens, for the recipes of this package.

They are recipes, not scripts, so that `optune run` starts them as it starts a user's: with its own choice of allocator
and threads, which stand before the process begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.machine import plain_environment

ROOT = Path(__file__).resolve().parents[2]


class Workload:
    """A model with its optimizer, made by the recipe as `cfg` says, that takes steps of any shape."""

    def __init__(self, cfg: Any) -> None:
        import torch

        from optune import distributed, models
        from recipes import full_finetune

        self.generator = torch.Generator().manual_seed(cfg.seed)
        self.loss = full_finetune.loss_sum
        source = models.resolve(cfg.model.path)
        config = models.check(source)
        self.vocabulary = config.vocab_size
        self.model: Any = full_finetune.outline(cfg, config)
        with distributed.start(cfg.device) as processes:
            self.optimizer, self.stepper = full_finetune.build(
                cfg, self.model, processes, lambda model: models.fill(model, source, device=processes.device), 1
            )
        self.steps = 0

    def make_microbatches(self, rows: int, length: int, count: int) -> list[Any]:
        import torch

        from optune.types import Microbatch

        size = (count, rows, length + 1)
        ids_CBT = torch.randint(0, self.vocabulary, size, generator=self.generator)
        positions_BT = torch.arange(length).expand(rows, length)
        return [
            Microbatch(ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous(), positions_BT, num_tokens=rows * length)
            for ids_BT in ids_CBT
        ]

    def step(self, microbatches: Sequence[Any]) -> float:
        """One step; its seconds."""
        from optune import products, train

        with products.native():  # as in a run
            started = time.perf_counter()
            train.train_step(self.model, self.loss, self.stepper, microbatches, seed=0, step=self.steps)
            self.steps += 1
            return time.perf_counter() - started


def run_recipe(recipe: str, model: Path, overrides: Sequence[str], threads: int) -> None:
    """`optune run scripts/bench/RECIPE.py …` in a process of its own, on so many cores."""
    command = [
        sys.executable, "-m", "tune_cli.main", "run", str(Path(__file__).parent / f"{recipe}.py"),
        "--config", str(ROOT / "configs/smollm2/135m_full.yaml"), f"model.path={model.absolute()}",
        "model.master_weights=none", "max_grad_norm=null", "device=cpu",
        f"data.train={ROOT / 'assets/tiny/train.jsonl'}", *overrides,
    ]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cores))
