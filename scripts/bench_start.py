"""Seconds from process start to the first optimizer step, of several tools in turn.

    python scripts/bench_start.py --repeat 5 \\
        optune='.venv/bin/python -m tune_cli.main run full_finetune --config … output_dir={out}' \\
        trl='other/bin/python trl_run.py full bf16 2'

Each command is NAME='PYTHON SCRIPT-or--m-MODULE ARGUMENTS…'; `{out}` is a fresh folder. The tools are unmodified: this
file runs as the program, sets a hook that torch offers for every optimizer, and runs the tool in its place. The run is
ended at its second step. Tools take turns; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECORD = "OPTUNE_BENCH_START_RECORD"
SMALL = 1_000_000
"""Trained values; an optimizer with fewer is a trial."""


def seconds_since_start() -> float:
    """Since the kernel started this process."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def be_the_tool(record: Path, words: list[str]) -> None:
    """Runs a script or module as the program and notes when its optimizer has made its first step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def first_step(optimizer: Any, *_: object) -> None:
        # A tool may try an optimizer on something small first; that is not the step that is asked for.
        if sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) < SMALL:
            return
        record.write_text(json.dumps(seconds_since_start()))
        os._exit(0)

    register_optimizer_step_post_hook(first_step)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def measure(command: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        python, *words = shlex.split(command.replace("{out}", f"{folder}/run"))
        record = Path(folder) / "first_step.json"
        finished = subprocess.run(
            [python, __file__, *words], env=os.environ | {RECORD: str(record)}, capture_output=True, text=True
        )
        if not record.exists():
            raise SystemExit(f"{command}\nmade no step:\n{finished.stderr[-2000:]}")
        return json.loads(record.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("tools", nargs="+", metavar="NAME=COMMAND")
    options = parser.parse_args()
    tools = dict(tool.split("=", 1) for tool in options.tools)
    seconds: dict[str, list[float]] = {name: [] for name in tools}
    for _ in range(options.repeat):
        for name, command in tools.items():
            seconds[name].append(measure(command))
            print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr)
    print("| tool | to the first step s (median) | lowest | highest |\n|---|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")


if __name__ == "__main__":
    if RECORD in os.environ:
        be_the_tool(Path(os.environ.pop(RECORD)), sys.argv[1:])
    else:
        main()
