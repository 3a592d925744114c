"""optune beside torchtune, TRL and LitGPT, in one alternating run on the same weights, rows and token counts.

    python -m scripts.bench setup && python -m scripts.bench peers --quick

Every contestant gets a turn before any gets a second one, and each turn begins with another of them. A tool runs as its
users run it (`optune run …`, `tune run …`, `litgpt finetune …`, a script with TRL's SFTTrainer), in its own environment
and with empty caches; nothing in it is changed, see inside/sitecustomize.py. A line of raw figures is added to the
results after each run, so a run that was stopped goes on with --add. `report` makes the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.contestants import COMMANDS, LENGTH, Contestant, Places, everyone, quick
from scripts.bench.machine import describe_machine
from scripts.bench.setup import default_folder, install_optune, installed_mib
from scripts.bench.tables import WARM_UP, speed
from scripts.bench.tool_run import ToolFailedError, run_tool


def take_turns(contestants: Sequence[Contestant], repeat: int, done: Counter[str]) -> Iterator[tuple[int, Contestant]]:
    """(turn, contestant): everyone's first turn, then everyone's second one. What is `done` already is left out."""
    for turn in range(repeat):
        start = turn * max(1, len(contestants) // max(1, repeat)) % max(1, len(contestants))
        for one in [*contestants[start:], *contestants[:start]]:
            if done[one.name] <= turn:
                yield turn, one


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of a results file: a JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(one: Contestant, options: argparse.Namespace) -> dict[str, Any]:
    """One run with empty caches (a second start finds those of the first); of a failed one `failed` says why."""
    shared = options.folder / "caches" / one.tool
    if one.again and not shared.exists():
        measure(dataclasses.replace(one, again=False), options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        # One step more than is measured, so that no tool is about to end while its last step is timed.
        command = COMMANDS[one.tool](one, Places(options.folder, work), options.steps + 1)
        caches = work / "caches"
        if one.has_second_start or one.again:
            caches = shared
            if not one.again:
                shutil.rmtree(shared, ignore_errors=True)
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        read_files(options.folder / "venvs" / one.tool)
        try:
            return run_tool(command, work, caches, options.steps, cores=cores, timeout_s=options.timeout)
        except ToolFailedError as error:
            return {"failed": str(error)}


def read_files(folder: Path) -> None:
    """Brings an environment into the page cache, so that nobody's start waits for the disk and another's does not."""
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory) / name
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(2**20):
                        pass


def describe(one: Contestant) -> dict[str, Any]:
    return {
        "name": one.name, "tool": one.tool, "method": one.method, "dtype": one.dtype, "mode": one.mode,
        "rows": one.rows, "tokens_per_step": one.rows * LENGTH,
    }  # fmt: skip


def take_part(contestants: Sequence[Contestant], done: Counter[str], options: argparse.Namespace) -> None:
    """Runs them in turns and adds a line to the results after each run."""
    sizes = {tool: installed_mib(options.folder / "venvs" / tool) for tool in {one.tool for one in contestants}}
    machine = describe_machine() | {"threads": options.threads}
    ends = time.monotonic() + 60 * options.minutes
    for turn, one in take_turns(contestants, options.repeat, done):
        if time.monotonic() > ends:
            print(f"{options.minutes:g} minutes are over; --add goes on from here", file=sys.stderr)
            return
        load = os.getloadavg()[0]
        figures = measure(one, options)
        line = describe(one) | {"turn": turn, "load": round(load, 1), "installed_mib": sizes[one.tool]} | figures
        with options.out.open("a") as file:
            file.write(json.dumps(line | {"machine": machine}) + "\n")
        said = f"{one.name}: "
        if "failed" in figures:
            said += f"failed: {figures['failed'].splitlines()[-1]}"
        else:
            said += f"{speed(line):.0f} tokens/s, {figures['peak_mib']:,.0f} MiB, first {figures['first_step_s']:.1f} s"
        print(said, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="what `setup` made")
    parser.add_argument(
        "--quick", action="store_true", help="the cells that say most, one run of 8 steps for each tool"
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of the contestants, by --list")
    parser.add_argument("--list", action="store_true", help="print the contestants and end")
    parser.add_argument("--steps", type=int, help="of each run (12, quick 8)")
    parser.add_argument("--repeat", type=int, help="runs of each contestant (3, quick 1)")
    parser.add_argument(
        "--threads", type=int, default=2, help="cores that a tool may use; it decides on threads itself"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a run is ended")
    parser.add_argument("--out", type=Path, help="results (default: results/peers.jsonl in --folder)")
    parser.add_argument("--add", action="store_true", help="add to results that are there already")
    options = parser.parse_args()
    contestants = [one for one in (quick() if options.quick else everyone()) if _matches(one.name, options.only)]
    if options.list:
        print("\n".join(one.name for one in contestants))
        return
    options.folder = options.folder.absolute()
    options.steps = options.steps or (8 if options.quick else 12)
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.out = options.out or options.folder / "results/peers.jsonl"
    if options.steps < WARM_UP + 3:
        parser.error(f"--steps {options.steps}: at least {WARM_UP + 3}, of which the first {WARM_UP + 1} warm up")
    if options.out.exists() and not options.add:
        parser.error(f"{options.out} is there already: --add goes on with it, --out names another file")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if any(one.tool == "optune" for one in contestants):
        install_optune(options.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no tool is left running
    done = Counter(run["name"] for run in read_results(options.out) if "failed" not in run)
    take_part(contestants, done, options)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in patterns)


if __name__ == "__main__":
    main()
