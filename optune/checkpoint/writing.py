"""Writing one checkpoint: aside, synced, summed up, renamed. Until the rename there is nothing under its name."""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from optune import files, shards
from optune.checkpoint.folders import clear_leftovers, list_checkpoints
from optune.checkpoint.manifest import MANIFEST, PROGRESS, folder_name, sum_up, write_manifest
from optune.checkpoint.optimizer_state import Parameters, pack_optimizer, write_optimizer
from optune.checkpoint.progress import progress_bytes
from optune.errors import CheckpointError, list_few

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save(
    run_dir: Path,
    *,
    step: int,
    write_model: Callable[[Path], None],
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters,
    progress: Mapping[str, Any],
    known_nonfinite: Mapping[str, int] | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write `checkpoints/step-<step>/` of the run in `run_dir` and return it. It appears only when it is whole.

    `write_model(folder)` writes the model files; the rest is written here. `progress` is what `progress.json` holds
    beside the step and the versions. `named_parameters` are the model's; master weights that the optimizer holds in
    their place are found and saved. `known_nonfinite` says how many values of a parameter were not finite to begin with
    (see `count_nonfinite`). `group`: a gloo group over all processes, where several save one run; each calls this.

    Raises `CheckpointError` when weights have become infinite or NaN, when the state cannot be written, and when the
    disk refuses; earlier checkpoints are not touched then, and nothing half-written stays.
    """
    parameters = dict(named_parameters)
    ranks = shards.Ranks(group)
    refuse_nonfinite(run_dir, step, parameters, known_nonfinite, ranks)
    rest, tensors = pack_optimizer(optimizer, parameters)
    return write_checkpoint(run_dir, step, write_model, rest, tensors, progress, ranks)


def write_checkpoint(
    run_dir: Path,
    step: int,
    write_model: Callable[[Path], None],
    rest: dict[str, Any],
    tensors: shards.Tensors,
    progress: Mapping[str, Any],
    ranks: shards.Ranks,
) -> Path:
    """`save` after the state has been taken apart: what may run in the background."""
    target = run_dir / "checkpoints" / folder_name(step)

    def explained(attempt: Callable[[], T]) -> T:
        try:
            return attempt()
        except (OSError, SafetensorError) as error:
            raise _write_error(run_dir, target, error) from error

    ranks.lead(lambda: explained(lambda: clear_leftovers(run_dir)))
    aside = target.with_name(aside_name(target.name, ranks))
    try:
        write_folder(aside, step, write_model, rest, tensors, progress, ranks, explained)
        ranks.lead(lambda: explained(lambda: files.replace_folder(aside, target)))
    finally:
        if ranks.is_main:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def aside_name(name: str, ranks: shards.Ranks) -> str:
    """What a folder is called until it is whole: with several processes another name each time, so that one which was
    given up for dead never writes into a later save."""
    return f"{files.ASIDE}{name}" + ("" if ranks.is_alone else f"-{ranks.lead(lambda: secrets.token_hex(4))}")


def write_folder(
    folder: Path,
    step: int,
    write_model: Callable[[Path], None],
    rest: dict[str, Any],
    tensors: shards.Tensors,
    progress: Mapping[str, Any],
    ranks: shards.Ranks,
    explained: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt(),
) -> int:
    """Fill `folder` with all files of a checkpoint, manifest last, all of it on the disk. Returns its size in bytes.

    All ranks write what is theirs, then rank 0 alone sums up what is there: the manifest covers everybody's bytes.
    `explained` is what each rank's attempts run in, so that an error tells its story before the others hear of it.
    """

    def write_own() -> None:
        write_model(folder)
        if ranks.is_main and not any(path.is_file() for path in folder.iterdir()):
            raise CheckpointError("no model file was written", where=str(folder))
        write_optimizer(folder, rest, tensors, ranks.rank)

    ranks.lead(lambda: explained(lambda: (folder / "optune").mkdir(parents=True)))
    ranks.together(lambda: explained(write_own))
    return ranks.lead(lambda: explained(lambda: _finish_folder(folder, step, progress)))


def _finish_folder(folder: Path, step: int, progress: Mapping[str, Any]) -> int:
    (folder / PROGRESS).write_bytes(progress_bytes(step, progress))
    # safetensors makes files for the owner alone; the others have the mode that the user's umask gives.
    mode = (folder / PROGRESS).stat().st_mode & 0o777
    for path in files.walk(folder):
        path.chmod(mode)
    # The disk and a core at once.
    with ThreadPoolExecutor(1, "optune-syncing") as beside:
        synced = beside.submit(files.sync_tree, folder)
        entries = sum_up(folder)
        synced.result()
    return write_manifest(folder, entries) + (folder / MANIFEST).stat().st_size


def _write_error(run_dir: Path, target: Path, error: Exception) -> CheckpointError:
    number = getattr(error, "errno", None)
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors writes in Rust
        number = int(found[1])
    cause = os.strerror(number) if number else str(error)
    earlier = [folder.name for folder in list_checkpoints(run_dir) if folder != target]
    hint = f"earlier checkpoints are as they were ({', '.join(earlier)})" if earlier else "there is no earlier one"
    if number in _FULL:
        free = files.format_bytes(shutil.disk_usage(run_dir).free)
        hint = f"{free} are free there; make room, or lower checkpoint.keep_last; {hint}"
    return CheckpointError(f"the checkpoint could not be written: {cause}", where=str(target), hint=hint)


def count_nonfinite(named_parameters: Parameters, group: ProcessGroup | None = None) -> dict[str, int]:
    """How many values of each parameter are infinite or NaN; parameters without any are left out.

    `group`: a gloo group over all processes that hold them; each calls this, and gets the counts of all.
    """
    return _count_together(dict(named_parameters), shards.Ranks(group))


def _count_together(parameters: Mapping[str, Tensor], ranks: shards.Ranks) -> dict[str, int]:
    counts: dict[str, int] = {}
    for found in ranks.gather(_count_own(parameters, ranks.rank)):
        for name, count in found.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def _count_own(parameters: Mapping[str, Tensor], rank: int) -> dict[str, int]:
    counts = {}
    for name, parameter in parameters.items():
        values = shards.part_of(parameter, rank).values
        if values is None or values.numel() == 0 or not values.is_floating_point():
            continue
        # The extremes carry every NaN and infinity, and need no second tensor of the parameter's size.
        if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(values)):
            counts[name] = int((~torch.isfinite(values)).sum())
    return counts


def refuse_nonfinite(
    run_dir: Path, step: int, parameters: Mapping[str, Tensor], known: Mapping[str, int] | None, ranks: shards.Ranks
) -> None:
    """Raise `CheckpointError` when a parameter has more values that are not finite than `known` says."""
    known = known or {}
    broken = {name: count for name, count in _count_together(parameters, ranks).items() if count > known.get(name, 0)}
    if not broken:
        return
    listed = list_few([f"{name} ({count} values)" for name, count in broken.items()], 5)
    earlier = list_checkpoints(run_dir)
    way_out = "lower optimizer.lr or set max_grad_norm"
    hint = f"the last good checkpoint is {earlier[-1]}; {way_out}, then resume" if earlier else way_out
    raise CheckpointError(
        f"weights are not finite, so they are not saved: {listed}",
        where=f"step {step}",
        hint=hint,
    )
