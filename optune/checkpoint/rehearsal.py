"""A save before the first step, so that a run does not die at its first real one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from optune import files
from optune.checkpoint.folders import clear_leftovers, list_checkpoints
from optune.checkpoint.manifest import check, count_bytes
from optune.checkpoint.optimizer_state import Parameters, pack_optimizer
from optune.checkpoint.writing import write_folder
from optune.errors import CheckpointError

_PROBE_SHAPE = (16, 16)


@dataclass(frozen=True)
class Rehearsal:
    """What a checkpoint will take: bytes of one, bytes of all that stand side by side, bytes free, seconds to write."""

    checkpoint_bytes: int
    peak_bytes: int
    free_bytes: int
    write_s: float

    def __str__(self) -> str:
        one, peak, free = map(files.format_bytes, (self.checkpoint_bytes, self.peak_bytes, self.free_bytes))
        return f"{one} each, up to {peak} in all, {free} free"


def rehearse(
    run_dir: Path,
    *,
    write_model: Callable[[Path], None],
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters,
    keep_last: int | None = 2,
    keep_best: bool = False,
    saves: int = 1,
    resume_from: Path | None = None,
) -> Rehearsal:
    """Write a checkpoint aside, check it, remove it, and compare what the run will need with what the disk has.

    A run must not die at its first save, hours from here. One that goes on from the checkpoint `resume_from` has saved
    before: nothing is written then, and the new ones will be as large as that.

    State that the optimizer makes at its first step is estimated from a step on a parameter of 256 values. `saves` is
    how many checkpoints the run will write; the most that stand side by side are `keep_last`, one more while it is
    written, and the best. The result in `model/` shares the last one's weights.

    Raises `CheckpointError` when a checkpoint cannot be written or the disk is too small.
    """
    if resume_from is not None:
        return _check_room(run_dir, count_bytes(resume_from), keep_last, keep_best, saves)
    rest, state = pack_optimizer(optimizer, named_parameters)
    aside = run_dir / "checkpoints" / f"{files.ASIDE}rehearsal"
    start = time.perf_counter()
    try:
        clear_leftovers(run_dir)
        size = write_folder(aside, 0, write_model, rest, state, {})
        faults = check(aside)
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"a checkpoint cannot be written there: {error}",
            where=str(aside.parent),
            hint=f"{files.format_bytes(shutil.disk_usage(run_dir).free)} are free; choose another output_dir",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if faults:
        raise CheckpointError(f"what was written cannot be read back: {'; '.join(faults)}", where=str(aside.parent))
    seconds = time.perf_counter() - start
    size += estimate_state_bytes(optimizer)
    return _check_room(run_dir, size, keep_last, keep_best, saves, seconds)


def _check_room(
    run_dir: Path, size: int, keep_last: int | None, keep_best: bool, saves: int, write_s: float = 0.0
) -> Rehearsal:
    """Compare what checkpoints of `size` bytes will need with what the disk has."""
    most = saves if keep_last is None else min(saves, keep_last + 1 + keep_best)
    present = len(list_checkpoints(run_dir))
    # Where old ones are pruned, those that are there already make room for new ones.
    needed = (saves if keep_last is None else max(min(saves, 1), most - present)) * size
    free = shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"the checkpoints need {files.format_bytes(needed)} more ({files.format_bytes(size)} each), "
            f"{files.format_bytes(free)} are free",
            where=str(run_dir.absolute()),
            hint="make room, lower checkpoint.keep_last, or choose another output_dir",
        )
    return Rehearsal(size, most * size, free, write_s)


def estimate_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that `optimizer` will make for parameters that have none yet.

    Measured on a copy of each group with one small parameter. Where an optimizer cannot be copied so, two fp32 values
    for each value are assumed, which is what Adam keeps.
    """
    total = 0
    for group in optimizer.param_groups:
        fresh = [parameter for parameter in group["params"] if not optimizer.state.get(parameter)]
        for dtype in {parameter.dtype for parameter in fresh}:
            values = sum(parameter.numel() for parameter in fresh if parameter.dtype == dtype)
            total += round(values * _bytes_per_value(optimizer, group, dtype))
    return total


def _bytes_per_value(optimizer: torch.optim.Optimizer, group: Mapping[str, object], dtype: torch.dtype) -> float:
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "fused")}
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}
    try:
        copy = cast(Any, type(optimizer))([{**settings, "params": [probe]}])
        copy.step()
        _, state = pack_optimizer(copy, {"probe": probe})
    except Exception:  # Any optimizer may come by `_target_`, and this is only an estimate.
        return 8.0
    return sum(tensor.nbytes for name, tensor in state.items() if name.startswith("state.")) / probe.numel()
