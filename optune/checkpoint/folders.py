"""Which checkpoints a run has: the newest whole one, the ones to keep, the ones of a future that was given up."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from optune import files
from optune.checkpoint.manifest import PROGRESS, check, folder_name, step_of, verify
from optune.errors import CheckpointError, ConfigError

Say = Callable[[str], None]


def say_on_stderr(message: str) -> None:
    """Where warnings go when the caller does not say otherwise."""
    sys.stderr.write(f"{message}\n")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, whole or not, oldest first by the number of the step."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    steps = {step: path for path in folder.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps)]


def find(run_dir: Path, *, say: Say = say_on_stderr) -> Path | None:
    """The newest whole checkpoint of a run, every byte of it checked; None when the run never finished a save.

    Newer ones that are not whole are skipped, and `say` is told which and why. When there are checkpoints and none is
    whole, `CheckpointError` names what is wrong with each: a run is never started afresh by accident.
    """
    skipped: list[str] = []
    for folder in reversed(list_checkpoints(run_dir)):
        faults = check(folder)
        if not faults:
            for line in skipped:
                say(f"warning: skipped {line}")
            if skipped:
                say(f"warning: going back to {folder}")
            return folder
        skipped.append(f"{folder}: {'; '.join(faults)}")
    if skipped:
        raise CheckpointError(
            "no checkpoint is whole:\n  " + "\n  ".join(skipped),
            where=str(run_dir),
            hint="to start afresh, choose another output_dir",
        )
    if _leftovers(run_dir):
        say(f"warning: {run_dir}: a save was cut short, and none was ever finished")
    return None


def resolve(resume: str | Path | None, run_dir: str | Path, *, say: Say = say_on_stderr) -> Path | None:
    """The checkpoint that the key `resume` means, every byte of it checked.

    None stands for a fresh start: `resume` is null, or it is `auto` and `run_dir` never finished a save. A run folder
    stands for its newest whole checkpoint.
    """
    if resume is None:
        return None
    if resume == "auto":
        return find(Path(run_dir), say=say)
    folder = Path(resume)
    if not folder.is_dir():
        raise ConfigError(f"{folder.absolute()} is not a folder", where="resume", hint="null, auto, or a checkpoint")
    if (folder / "checkpoints").is_dir():
        newest = find(folder, say=say)
        if newest is None:
            raise CheckpointError(f"{folder.absolute()} holds no checkpoint", where="resume")
        return newest
    if not (folder / "optune").is_dir():
        raise ConfigError(
            f"{folder.absolute()} is no checkpoint that a run can go on from: it has no folder optune/",
            where="resume",
            hint=f"to begin a new run with these weights: model.path={folder}",
        )
    verify(folder)
    return folder


def prune(run_dir: Path, *, keep_last: int | None, keep_best: bool = True) -> list[Path]:
    """Remove what is older than the newest `keep_last` whole checkpoints; returns what was removed.

    The checkpoint with the lowest validation loss stays too when `keep_best`. `keep_last=None` keeps all. Call this
    only when the newest checkpoint is whole; one that is not is never counted. 0 is refused: the newest checkpoint is
    what a run goes on from.
    """
    check_keep_last(keep_last)
    if keep_last is None:
        return []
    folders = list_checkpoints(run_dir)
    whole = [folder for folder in folders if not check(folder, sums=False)]
    if not whole:
        return []
    kept = set(whole[-keep_last:])
    if keep_best and (best := _best(whole)):
        kept.add(best)
    removed = [folder for folder in folders[: folders.index(whole[-1])] if folder not in kept]
    for folder in removed:
        files.remove_tree(folder)
    return removed


def check_keep_last(keep_last: int | None) -> None:
    """Raise `ConfigError` for a `keep_last` below 1."""
    if keep_last is not None and keep_last < 1:
        raise ConfigError(
            f"{keep_last} would leave nothing to go on from; the last step is always saved and kept",
            where="checkpoint.keep_last",
            hint="1 or more, or null to keep all",
        )


def _best(folders: list[Path]) -> Path | None:
    """The one with the lowest validation loss; the newest of equal ones."""
    losses = {}
    for folder in folders:
        loss = json.loads((folder / PROGRESS).read_text(encoding="utf-8")).get("validation_loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            losses[folder] = loss
    return min(reversed(list(losses)), key=lambda folder: losses[folder], default=None)


def set_aside_newer(run_dir: Path, step: int, *, say: Say = say_on_stderr) -> list[Path]:
    """Move checkpoints of later steps than `step` into `checkpoints/set-aside/`; returns their new places.

    A run that goes on from an older checkpoint takes another way from there. Left where they are, the newer ones would
    be taken for its own by the next `resume: auto`.
    """
    moved = []
    for folder in list_checkpoints(run_dir):
        if (step_of(folder) or 0) <= step:
            continue
        aside = run_dir / "checkpoints" / "set-aside"
        aside.mkdir(exist_ok=True)
        target = aside / folder.name
        number = 1
        while target.exists():
            number += 1
            target = aside / f"{folder.name}-{number}"
        folder.rename(target)
        moved.append(target)
        say(f"warning: {folder.name} is newer than {folder_name(step)}, where this run goes on: moved to {target}")
    return moved


def clear_leftovers(run_dir: Path) -> None:
    """Remove what saves that were cut short have left behind. Only for the process that holds the run folder."""
    for path in _leftovers(run_dir):
        files.remove_tree(path)


def _leftovers(run_dir: Path) -> list[Path]:
    folder = run_dir / "checkpoints"
    return sorted(folder.glob(f"{files.ASIDE}*")) if folder.is_dir() else []
