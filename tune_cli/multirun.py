"""`optune run … --multirun`: every combination of the overrides' values, one run after another, then a comparison."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optune.config.emit import write_override
from optune.config.overrides import parse_overrides, spell
from optune.config.problems import Problems
from optune.errors import ConfigError

if TYPE_CHECKING:
    from tune_cli.run import Request

STOPPED = (130, 143)
LONGEST_NAME = 100


@dataclass
class Job:
    """One combination: what it overrides, where it goes, and how it ended."""

    overrides: dict[str, str]
    folder: Path
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def arguments(self) -> list[str]:
        """The command line's part of this job."""
        own = [f"{key}={value}" for key, value in self.overrides.items()]
        return [*own, write_override("output_dir", str(self.folder), is_path=True)]


def run_grid(request: Request, launch_words: Sequence[str]) -> int:
    """Checks every job's config, runs the jobs, prints the comparison to stdout; returns the worst exit code.

    A job that fails does not stop the others; a signal does.
    """
    jobs = plan(request)
    config = ["--config", str(request.config)]
    allowed = [word for package in request.allow_targets for word in ("--allow-target", package)]
    fixed = [argument for argument in request.overrides if not _is_sweep(argument)]
    start = [sys.executable, "-m", "tune_cli.main", "run", *launch_words, request.recipe.reference, *config, *allowed]
    for number, job in enumerate(jobs):
        values = ", ".join(f"{key}={value}" for key, value in job.overrides.items())
        print(f"run {number + 1} of {len(jobs)}: {values or 'as configured'} -> {job.folder}", file=sys.stderr)
        began = time.monotonic()
        job.exit_code = _run_job([*start, *fixed, *job.arguments])
        job.seconds = time.monotonic() - began
        if job.exit_code in STOPPED:
            break
    print_table(jobs)
    codes = [job.exit_code for job in jobs if job.exit_code is not None]
    return next((code for code in codes if code in STOPPED), max(codes))


def plan(request: Request) -> list[Job]:
    """The jobs, each with its checked config: a grid with a wrong value runs nothing."""
    problems = Problems()
    overrides = parse_overrides(request.overrides, problems)
    problems.raise_if_any()
    sweeps = [override for override in overrides if override.is_sweep]
    for override in sweeps:
        if override.key == "output_dir":
            raise ConfigError("cannot be part of a grid", where=override.where, hint="each run gets its own sub-folder")
    fixed = [override.argument for override in overrides if not override.is_sweep]
    alone = type(request)(request.recipe, request.config, fixed, request.allow_targets)
    jobs: list[Job] = []
    values = [[spell(value) for value in override.values] for override in sweeps]
    root: Path | None = None
    for number, combination in enumerate(itertools.product(*values)):
        named = dict(zip([override.key for override in sweeps], combination, strict=True))
        cfg = alone.load([f"{key}={value}" for key, value in named.items()])
        root = root or Path(cfg.output_dir)
        jobs.append(Job(named, root / _folder_name(number, named)))
    return jobs


def _is_sweep(argument: str) -> bool:
    (override,) = parse_overrides([argument], Problems())
    return override.is_sweep


def _folder_name(number: int, overrides: dict[str, str]) -> str:
    """`0_optimizer.lr=1e-5,batch_size=2`, kept to what every file system takes."""
    name = ",".join(f"{key}={value}" for key, value in overrides.items())
    safe = re.sub(r"[^\w.,=+\-]+", "-", name)[:LONGEST_NAME].rstrip("-.")
    return f"{number}_{safe}" if safe else str(number)


def _run_job(command: list[str]) -> int:
    """The exit code of one run in a process of its own. A signal that reaches us reaches it too."""
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    # The terminal sends SIGINT to the whole group, so the job has it already; the others come to us alone.
    old_terminate = signal.signal(signal.SIGTERM, pass_on)
    old_save = signal.signal(signal.SIGUSR1, pass_on)
    old_interrupt = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, old_terminate)
        signal.signal(signal.SIGUSR1, old_save)
        signal.signal(signal.SIGINT, old_interrupt)
    return code if code >= 0 else 128 - code


def print_table(jobs: Sequence[Job]) -> None:
    """The comparison: what was overridden, last loss, last validation loss, seconds, exit code."""
    keys = list(jobs[0].overrides)
    rows = [["run", *keys, "loss", "validation_loss", "seconds", "exit"]]
    for number, job in enumerate(jobs):
        losses = read_last(job.folder / "metrics.jsonl", ("loss", "validation_loss"))
        ended = job.exit_code is not None
        rows.append(
            [
                str(number),
                *job.overrides.values(),
                *("-" if value is None else f"{value:.4f}" for value in losses),
                f"{job.seconds:.1f}" if ended else "-",
                str(job.exit_code) if ended else "not run",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def read_last(metrics: Path, keys: Sequence[str]) -> list[float | None]:
    """The last value of each key in a metrics.jsonl; None where there is none."""
    found: dict[str, float] = {}
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return [None] * len(keys)
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a line that was cut when the run was killed
        found |= {key: entry[key] for key in keys if isinstance(entry.get(key), (int, float))}
    return [found.get(key) for key in keys]
