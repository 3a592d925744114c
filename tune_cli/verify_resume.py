"""`optune verify-resume RECIPE --config CONFIG [key=value …]`: proves on your own config that resuming is exact."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optune.config.emit import write_override
from optune.errors import ConfigError, TrainingError
from tune_cli.launch import count_machines, split_launch_options
from tune_cli.run import Request, make_parser, read_request

USAGE = "[torchrun options] RECIPE --config CONFIG [--steps N] [--cut K] [key=value …]"
DESCRIPTION = """Trains N steps twice: once straight, and once stopped after step K and resumed in a new process. Then
it compares weights, optimizer state and logged losses bit for bit and says whether they are equal. It works aside, in
<output_dir>.verify-resume, which is removed afterwards. A warm-up that does not fit into N steps is shortened. Torchrun
options (--nproc-per-node 2 …) before RECIPE go to each of the runs: several processes of this machine."""
MACHINE = ("tokens_per_s", "peak_memory_gib", "step_s")
"""Keys of a metrics line that a clock decides."""


def run(words: list[str]) -> int:
    """0 where the two runs are equal, 1 where they are not."""
    parser = make_parser("verify-resume", USAGE, DESCRIPTION)
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps of each run (default 6)")
    parser.add_argument("--cut", type=int, metavar="K", help="the step after which the second run stops (default N/2)")
    parser.add_argument("--keep", action="store_true", help="leave both run folders for a closer look")
    launch_words, rest = split_launch_options(words, parser)
    options, others = parser.split(rest)
    cut = options.steps // 2 if options.cut is None else options.cut
    if not 1 <= cut < options.steps:
        parser.error(f"the cut must lie between step 1 and step {options.steps - 1}, not after step {cut}")
    request = read_request(parser, options, others)
    if launch_words and count_machines(launch_words) > 1:
        raise ConfigError("--nnodes: it works on one machine", hint="--nproc-per-node starts several processes on it")
    cfg = request.load()
    folder = Path(f"{Path(cfg.output_dir).absolute()}.verify-resume")
    if folder.exists():
        raise ConfigError("is left from an earlier call", where=str(folder), hint="remove it")
    try:
        differences = _run_both(request, launch_words, folder, options.steps, cut)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for line in differences[:20]:
        print(f"  {line}")
    if differences:
        print(f"not equal: {len(differences)} differences after step {options.steps}, resumed after step {cut}")
        return 1
    print(f"equal: a run resumed after step {cut} is bit for bit the straight run, {options.steps} steps long")
    return 0


def _run_both(request: Request, launch_words: Sequence[str], folder: Path, steps: int, cut: int) -> list[str]:
    straight, resumed = folder / "straight", folder / "resumed"
    settings = [
        *_shorten_schedule(request.load().schedule, steps),
        f"max_steps={steps}",
        "epochs=1000000",  # max_steps decides
        f"checkpoint={{save_every_steps: {cut}, keep_last: null}}",
        "log_every_steps=1",
        "resume=null",
        "loggers=[]",
        write_override("output_dir", str(straight), is_path=True),
    ]
    allowed = [word for package in request.allow_targets for word in ("--allow-target", package)]
    config = ["--config", str(request.config)]
    command = ["run", *launch_words, request.recipe.reference, *config, *allowed, *request.overrides, *settings]
    _train(command, f"{steps} steps")
    last = f"step-{steps:06d}"
    shutil.copytree(straight, resumed, ignore=shutil.ignore_patterns("model", "plot.png", ".lock", last))
    for path in (resumed / "checkpoints").iterdir():
        if path.name != f"step-{cut:06d}":
            shutil.rmtree(path)
    _train(["resume", *launch_words, *allowed, str(resumed)], f"from step {cut}")

    from optune import checkpoint

    differences = checkpoint.compare(straight / "checkpoints" / last, resumed / "checkpoints" / last)
    lines, others = list(_metrics(straight)), list(_metrics(resumed))
    if len(lines) != len(others):
        return [f"metrics.jsonl: {len(lines)} and {len(others)} lines", *differences]
    pairs = zip(lines, others, strict=True)
    return [f"metrics.jsonl: {one} and {other}" for one, other in pairs if one != other] + differences


def _shorten_schedule(schedule: Any, steps: int) -> list[str]:
    """Overrides that fit a named schedule's warm-up and decay into so few steps; they are said on stderr."""
    if isinstance(schedule, Mapping):
        return []
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if warmup > steps:
        warmup = steps // 2  # both parts of the curve are run
    if decay is not None:
        decay = min(decay, steps - warmup)
    changes = {"warmup_steps": warmup, "decay_steps": decay}
    shorter = [f"schedule.{key}={value}" for key, value in changes.items() if value != getattr(schedule, key)]
    if shorter:
        print(f"verify-resume: {steps} steps are few for the schedule: {', '.join(shorter)}", file=sys.stderr)
    return shorter


def _train(words: Sequence[str], what: str) -> None:
    print(f"verify-resume: training {what} …", file=sys.stderr)
    finished = subprocess.run([sys.executable, "-m", "tune_cli.main", *words], stdout=subprocess.DEVNULL)
    if finished.returncode == ConfigError.exit_code:
        raise ConfigError("the run was refused, for the cause above", where="verify-resume")
    if finished.returncode:
        raise TrainingError(f"the run ended with exit code {finished.returncode}", where="verify-resume")


def _metrics(folder: Path) -> Iterator[dict[str, Any]]:
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        yield {key: value for key, value in json.loads(line).items() if key not in MACHINE}
