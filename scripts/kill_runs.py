#!/usr/bin/env python
"""Kills whole runs at random moments and lets them go on, until each ends: as the run that nobody killed, or not.

    python scripts/kill_runs.py --kills 500 --seed 20250

A run is `optune run` on a tiny model: validation, a save after every step or every third, old checkpoints pruned. It is
killed again and again, goes on by `optune resume` or `optune run … resume=auto`, and in the end its weights, optimizer
state, metrics and counters are compared bit for bit with those of an undisturbed run. Four ways to die:

- event: SIGKILL right before the n-th call that opens, writes, syncs, renames or removes something in the run folder;
- write: dead in the middle of a write, at a random byte of a file, from the n-th such call on;
- time: SIGKILL from outside after a random time;
- stop: SIGTERM after a random time, which is no death: it saves, and leaves with 143.

With --ranks N each run has N processes under the launcher, and one of them, by dice, dies in one of these ways; SIGTERM
goes to one of them or to the launcher. The others must end by themselves within 30 s, whatever they wait for.

With --sweep, instead of dice: one run of two steps is killed before each such call in turn, from its first to its last.

Each process is forked from one that has imported everything, so that five hundred deaths take minutes. Dice depend on
the seed alone; what a run does between two rolls also depends on the machine's clock. Prints one line of JSON a death,
and a summary. Exits with 1 when anything was lost or differs.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kill_ranks
import torch

from optune import checkpoint, files
from tests import fixtures
from tune_cli.main import main

STEPS = 8
CONFIG = f"""
model: {{path: m0, dtype: fp32}}
data: {{train: train.jsonl, validation: validation.jsonl, max_length: 64}}
batch_size: 2
epochs: 4
max_steps: {STEPS}
validation_every_steps: 2
checkpoint: {{save_every_steps: 1, keep_last: 2}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1}}
schedule: {{name: cosine, warmup_steps: 2}}
seed: 3
device: cpu
"""
BOUND_S = 30.0
"""How long the other ranks and the launcher may take to end when one has died."""
SETUPS: dict[str, list[str]] = {
    "full": ["full_finetune"],
    "lora": ["lora_finetune", "lora.dropout=0.3", "checkpoint.keep_last=1", "log_every_steps=3"],
    "in_backward": [
        "full_finetune", "model.dtype=bf16", "optimizer_step=in_backward", "gradient_stash=hold",
        "checkpoint.save_every_steps=3", "batch_size=1", "gradient_accumulation_steps=2",
    ],
    "packed": ["full_finetune", "data.packing=true", "data.max_length=24", "batch_size=1", "optimizer_step=immediate",
               "max_grad_norm=null", "checkpoint.keep_last=null"],
}  # fmt: skip
CLOCK = ("tokens_per_s", "peak_memory_gib", "step_s")


@dataclass
class Plan:
    """How one process is to die: `kind`, the number of the event, the byte of the file, or the time."""

    kind: str = "none"
    event: int = 0
    byte: int = 0
    after_s: float = 0.0
    rank: int = 0
    """Which of several processes; -1 is the launcher."""


@dataclass
class Straight:
    """The undisturbed run of a setup: what it came to, how long it took, how many events it had."""

    end: dict[str, Any]
    seconds: float
    events: list[int]
    """Of each rank."""


@dataclass
class Totals:
    deaths: collections.Counter[str] = field(default_factory=collections.Counter)
    moments: collections.Counter[str] = field(default_factory=collections.Counter)
    ends: int = 0
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """From the death of a rank to the end of all."""


def count_events(run_dir: Path, at: Callable[[int], None]) -> None:
    """Calls `at(n)` before the n-th call of this process that touches something in `run_dir`."""
    count = 0
    prefix = str(run_dir)

    def seen() -> None:
        nonlocal count
        count += 1
        at(count)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if (event == "open" or event.startswith(("os.", "shutil."))) and str(arguments[0]).startswith(prefix):
            seen()

    sys.addaudithook(hook)

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(descriptor: int, *arguments: Any) -> Any:
            if descriptor > 2:
                seen()
            return call(descriptor, *arguments)

        return watched

    # Of these Python tells its hooks nothing.
    os.write, os.pwrite, os.fsync = watch(os.write), watch(os.pwrite), watch(os.fsync)


def die_at(plan: Plan, run_dir: Path) -> None:
    """Arms this process."""

    def note() -> None:
        run_dir.with_suffix(".death").write_text(str(time.time()))

    def at(number: int) -> None:
        if number != plan.event:
            return
        note()
        if plan.kind == "event":
            os.kill(os.getpid(), signal.SIGKILL)
        # The write that goes beyond is cut there, and the next one is deadly.
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.byte, plan.byte))

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    if plan.kind in ("event", "write"):
        count_events(run_dir, at)
    elif plan.kind == "time":
        kill_ranks.die_later(signal.SIGKILL, plan.after_s, note)
    elif plan.kind == "stop":
        kill_ranks.die_later(signal.SIGTERM, plan.after_s, lambda: None)


def attempt(words: list[str], run_dir: Path, plan: Plan, log: Path, ranks: int = 1) -> int:
    """One process, forked, or a launcher of `ranks`; its exit code, or minus the signal that it died of."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            kill_ranks.mend_libraries()
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if ranks > 1:
                code = kill_ranks.launch(
                    words, ranks, lambda rank: die_at(plan, run_dir) if rank == plan.rank else None
                )
            else:
                die_at(plan if plan.kind in ("event", "write") else Plan(), run_dir)
                code = main(words)
        finally:
            os._exit(code)
    if plan.kind in ("time", "stop") and (ranks == 1 or plan.rank == -1):
        time.sleep(plan.after_s)
        os.kill(child, signal.SIGKILL if plan.kind == "time" else signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def read_end(run_dir: Path) -> dict[str, Any]:
    """What a run has come to, without what a clock decides."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    newest = checkpoint.list_checkpoints(run_dir)[-1]
    progress = checkpoint.read_progress(newest)
    tensors = [*newest.rglob("*.safetensors"), *(run_dir / "model").glob("*.safetensors")]
    return {
        "metrics": [{key: value for key, value in line.items() if key not in CLOCK} for line in lines],
        "progress": {key: value for key, value in progress.items() if key != "saved_at"},
        "tensors": {str(path.relative_to(run_dir)): files.hash_file(path) for path in sorted(tensors)},
        "newest": newest.name,
        "not_whole": [folder.name for folder in checkpoint.list_checkpoints(run_dir) if checkpoint.check(folder)],
        "leftovers": sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob(f"{files.ASIDE}*")),
    }


def newest_whole(run_dir: Path) -> int:
    """The step of the newest whole checkpoint; -1 where there is none."""
    steps = [int(folder.name[5:]) for folder in checkpoint.list_checkpoints(run_dir) if not checkpoint.check(folder)]
    return max(steps, default=-1)


def count_lines(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def name_moment(run_dir: Path, lines: int) -> str:
    """Where in the run the process died, by what it left; `lines` of metrics were there before."""
    if not (run_dir / "config.yaml").exists():
        return "before the config was written"
    aside = [path.name for path in (run_dir / "checkpoints").glob(f"{files.ASIDE}*")]
    if aside:
        return "in the rehearsal" if aside[0].endswith("rehearsal") else "in a save"
    if (run_dir / f"{files.ASIDE}model").exists() or (
        newest_whole(run_dir) == STEPS and not (run_dir / "model").exists()
    ):
        return "before the result was whole"
    return "in training" if count_lines(run_dir) > lines else "at the start"


def roll(dice: random.Random, straight: Straight, left: float) -> Plan:
    """The next death; `left` is the share of the run that is still to do."""
    ranks = len(straight.events)
    kind = dice.choices(["event", "write", "time", "stop"], [5, 3, 3, 1])[0]
    rank = dice.randrange(ranks)
    event = dice.randint(1, max(20 if rank == 0 else 3, int(straight.events[rank] * left)))
    if kind == "stop" and ranks > 1:
        rank = dice.randint(-1, ranks - 1)
    byte = int(2 ** dice.uniform(0, 17.5))  # log.txt and metrics.jsonl are small, the weights 95 KiB
    return Plan(kind, event, byte, dice.uniform(0, straight.seconds * (0.3 + 0.7 * left)), rank)


def next_words(dice: random.Random, first: list[str], run_dir: Path) -> list[str]:
    """How a person, or a script, lets the run go on."""
    if not (run_dir / "config.yaml").exists():
        return first
    return dice.choice([["resume", str(run_dir)], [*first, "resume=auto"]])


def play(name: str, first: list[str], run_dir: Path, straight: Straight, dice: random.Random, totals: Totals) -> None:
    """One run, killed a few times and then left to end."""
    log = run_dir.with_suffix(".log")
    saved, words = -1, first
    for _ in range(dice.randint(2, 8)):
        plan = roll(dice, straight, 1 - max(saved, 0) / STEPS)
        lines = count_lines(run_dir)
        code = attempt(words, run_dir, plan, log, len(straight.events))
        died = has_died(code, run_dir, plan, len(straight.events), totals)
        now = newest_whole(run_dir)
        moment = name_moment(run_dir, lines) if died else f"exit code {code}"
        if code not in (0, 143) and not died:
            totals.lost.append(f"{run_dir.name}: {plan} ended with {code}, see {log}")
        if now < saved:
            totals.lost.append(f"{run_dir.name}: {plan} lost step {saved}")
        if died:
            totals.deaths[plan.kind] += 1
            totals.moments[moment] += 1
        print(json.dumps({"run": run_dir.name, **vars(plan), "died": died, "moment": moment, "step": now}), flush=True)
        saved, words = max(saved, now), next_words(dice, first, run_dir)
        if code == 0:
            break
    finish(name, words, run_dir, straight, totals)


def has_died(code: int, run_dir: Path, plan: Plan, ranks: int, totals: Totals) -> bool:
    """Whether the plan came true. With several ranks the launcher says so by its exit code, and in time."""
    if ranks == 1:
        return code in (-signal.SIGKILL, -signal.SIGXFSZ)
    note = run_dir.with_suffix(".death")
    if not note.exists():
        return False
    took_s = time.time() - float(note.read_text())
    note.unlink()
    totals.longest_s = max(totals.longest_s, took_s)
    if took_s > BOUND_S:
        totals.lost.append(f"{run_dir.name}: {plan}: the others took {took_s:.1f} s to end")
    return code == 1


def finish(name: str, words: list[str], run_dir: Path, straight: Straight, totals: Totals) -> None:
    """Lets a run end, and compares; where all is well, nothing stays of it."""
    log = run_dir.with_suffix(".log")
    code = attempt(words, run_dir, Plan(), log, len(straight.events))
    if code:
        totals.lost.append(f"{run_dir.name}: did not end: exit code {code}, see {log}")
        return
    totals.ends += 1
    end = read_end(run_dir)
    differing = [key for key in straight.end if end[key] != straight.end[key]]
    if differing:
        totals.unequal.append(f"{run_dir.name} ({name}): {', '.join(differing)}")
    else:
        shutil.rmtree(run_dir)
        log.unlink()


def sweep(folder: Path, totals: Totals) -> int:
    """Dies before each event of a short run in turn; how many runs that were."""
    name, words = next(prepare(folder))
    short = [*words(folder / "short"), "max_steps=2", "validation_every_steps=1"]
    straight = run_straight(short, folder / "short")
    number, died = 0, True
    while died:
        number += 1
        run_dir = folder / f"event-{number}"
        first = [word.replace(str(folder / "short"), str(run_dir)) for word in short]
        died = attempt(first, run_dir, Plan("event", number), run_dir.with_suffix(".log")) == -signal.SIGKILL
        if died:
            moment = name_moment(run_dir, 0)
            totals.deaths["event"] += 1
            totals.moments[moment] += 1
            print(json.dumps({"run": run_dir.name, "died": True, "moment": moment}), flush=True)
            words_on = ["resume", str(run_dir)] if (run_dir / "config.yaml").exists() else first
            finish(name, words_on, run_dir, straight, totals)
    return number - 1


def run_straight(first: list[str], run_dir: Path, ranks: int = 1) -> Straight:
    """The undisturbed run, in this process, so that what it imports is there for all that are forked; then a second one
    that counts."""
    code = main(first)
    assert code == 0, f"the undisturbed run ended with {code}"
    if ranks > 1:
        return run_ranks(first, run_dir, ranks)
    end = read_end(run_dir)
    counted = run_dir.with_name(f"{run_dir.name}-counted")
    reading, writing = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        events = 0

        def at(number: int) -> None:
            nonlocal events
            events = number

        try:
            count_events(counted, at)
            main([word.replace(str(run_dir), str(counted)) for word in first])
            os.write(writing, str(events).encode())
        finally:
            os._exit(0)
    os.close(writing)
    events = int(os.read(reading, 100))
    os.waitpid(child, 0)
    return Straight(end, time.perf_counter() - began, [events])


def run_ranks(first: list[str], run_dir: Path, ranks: int) -> Straight:
    """The undisturbed run of several ranks, which counts as it goes."""
    import torch.distributed.run  # noqa: F401  (for all that are forked)

    began = time.perf_counter()
    straight = run_dir.with_name(f"{run_dir.name}-ranks")
    words = [word.replace(str(run_dir), str(straight)) for word in first]

    def arm(rank: int) -> None:
        file = os.open(run_dir.with_name(f"{run_dir.name}-events-{rank}"), os.O_WRONLY | os.O_CREAT)
        write = os.pwrite  # what counts is not counted

        def note(number: int) -> None:
            write(file, str(number).encode(), 0)

        count_events(straight, note)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = kill_ranks.launch(words, ranks, arm)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the undisturbed run of {ranks} ranks ended with {os.waitstatus_to_exitcode(status)}"
    events = [int(run_dir.with_name(f"{run_dir.name}-events-{rank}").read_text()) for rank in range(ranks)]
    return Straight(read_end(straight), time.perf_counter() - began, events)


def prepare(folder: Path) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """Each setup, and the words of its first command in a given run folder."""
    fixtures.write_model(folder / "m0")
    fixtures.write_rows(folder / "train.jsonl", fixtures.numbered_rows(12))
    fixtures.write_rows(folder / "validation.jsonl", fixtures.numbered_rows(5))
    (folder / "config.yaml").write_text(CONFIG)
    for name, (recipe, *overrides) in SETUPS.items():
        fixed = ["run", recipe, "--config", str(folder / "config.yaml"), *overrides]
        yield name, lambda run_dir, fixed=fixed: [*fixed, f"output_dir={run_dir}"]


def kill_runs(folder: Path, kills: int | None, seed: int, ranks: int = 1) -> int:
    """`kills` None sweeps. Returns the exit code."""
    os.chdir(folder)
    torch.set_num_threads(1)
    began = time.perf_counter()
    totals = Totals()
    number = sweep(folder, totals) if kills is None else roll_on(folder, kills, seed, totals, ranks)
    summary = {
        "seed": None if kills is None else seed,
        "deaths": sum(totals.deaths.values()),
        "by kind": dict(totals.deaths),
        "by moment": dict(totals.moments),
        "runs": number,
        "ranks": ranks,
        "longest end": round(totals.longest_s, 1),
        "equal": totals.ends - len(totals.unequal),
        "lost": totals.lost,
        "unequal": totals.unequal,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary), flush=True)
    return 1 if totals.lost or totals.unequal else 0


def roll_on(folder: Path, kills: int, seed: int, totals: Totals, ranks: int) -> int:
    """Plays runs until so many processes have died; how many runs that were."""
    setups = [
        (name, words, run_straight(words(folder / name), folder / name, ranks)) for name, words in prepare(folder)
    ]
    number = 0
    while sum(totals.deaths.values()) < kills:
        name, words, straight = setups[number % len(setups)]
        run_dir = folder / f"run-{number}"
        dice = random.Random(int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8], "big"))
        play(name, words(run_dir), run_dir, straight, dice, totals)
        number += 1
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=20250)
    parser.add_argument("--folder", type=Path, help="where the runs live, and stay where something is wrong")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    parser.add_argument("--sweep", action="store_true", help="die before every event of one run, in turn")
    options = parser.parse_args()
    kills = None if options.sweep else options.kills
    if options.folder:
        options.folder.mkdir(parents=True)
        sys.exit(kill_runs(options.folder.absolute(), kills, options.seed, options.ranks))
    # In memory where there is such a place: a kill does not ask whether the disk has it, and syncing takes long.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as temporary:
        sys.exit(kill_runs(Path(temporary), kills, options.seed, options.ranks))
