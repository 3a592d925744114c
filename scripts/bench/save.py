"""How long training stands still at a save in the background, against one that waits for the disk.

    python -m scripts.bench save models/SmolLM2-135M-Instruct --dtype bf16

One process trains a model with AdamW and saves in turn both ways, so that a noisy machine is fair to both. Printed are
the size of a checkpoint, the medians of how long `save` held training up, their ratio, the memory that the copy takes,
and the time of a step while nothing is written and while a checkpoint is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optune import checkpoint, files, models, optim, train
from optune.loss import next_token_loss
from optune.types import Microbatch


class Run:
    """A model in training, and the two savers."""

    def __init__(self, source: Path, dtype: torch.dtype, tokens: int, folder: Path) -> None:
        self.model: Any = models.load(source, dtype=dtype)
        parameters = list(self.model.named_parameters())
        settings = {"lr": 1e-6, "weight_decay": 0.0}
        self.optimizer = optim.build_optimizer(parameters, factory=torch.optim.AdamW, settings=settings)
        self.stepper = optim.build_stepper(self.model, self.optimizer, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(1000, 40000, (1, tokens + 1), generator=generator)
        self.microbatch = Microbatch(
            tokens_BT=ids_BT[:, :-1].contiguous(),
            labels_BT=ids_BT[:, 1:].contiguous(),
            positions_BT=torch.arange(tokens)[None],
            num_tokens=tokens,
            rows=("random",),
        )
        self.steps = 0
        self.blocking = self._make_saver(folder / "blocking", source, background=False)
        self.background = self._make_saver(folder / "background", source, background=True)

    def _make_saver(self, folder: Path, source: Path, *, background: bool) -> checkpoint.Saver:
        write = partial(models.save, source=source)

        def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
            write(tensors, path)

        return checkpoint.Saver(
            folder,
            write_model=write_model,
            model_tensors=self.model.state_dict(),
            optimizer=self.optimizer,
            named_parameters=self.model.named_parameters(),
            keep_last=1,
            background=background,
        )

    def step(self) -> float:
        started = time.perf_counter()
        train.train_step(self.model, next_token_loss, self.stepper, [self.microbatch], seed=0, step=self.steps)
        self.steps += 1
        return time.perf_counter() - started


def measure(run: Run, rounds: int, reserve: bool) -> None:
    run.step()
    if reserve:
        run.background.reserve()
    blocking: list[float] = []
    background: list[float] = []
    quiet: list[float] = []
    writing: list[float] = []
    for number in range(rounds + 1):
        quiet += [run.step(), run.step()]
        report = run.background.save(run.steps, {})
        while run.background.is_writing:
            writing.append(run.step())
        run.background.wait()
        if number == 0:
            first, size = report, report.copied_bytes
        else:
            background.append(report.stall_s)
        run.step()
        if number:
            blocking.append(run.blocking.save(run.steps, {}).stall_s)
    stall, wait = statistics.median(background), statistics.median(blocking)
    quiet_s, writing_s = statistics.median(quiet), statistics.median(writing)
    print(f"checkpoint          {files.format_bytes(size)}")
    print(f"waiting for disk    {wait:.3f} s, median of {rounds} (least {min(blocking):.3f}, most {max(blocking):.3f})")
    print(f"in the background   {stall:.3f} s (least {min(background):.3f}, most {max(background):.3f})")
    print(f"ratio               {stall / wait:.1%}")
    print(f"the first one       {first.stall_s:.3f} s, {first.stall_s / wait:.1%}")
    print(f"memory of the copy  {files.format_bytes(size)}")
    print(f"a step              {quiet_s:.3f} s, while a checkpoint is written {writing_s:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-reserve", action="store_true", help="do not take the memory ahead of the first save")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: the system's temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        run = Run(options.model, models.DTYPES[options.dtype], options.tokens, Path(temporary))
        measure(run, options.rounds, not options.no_reserve)


if __name__ == "__main__":
    main()
