"""A run that is killed by SIGKILL and goes on, over and over. Started by `test_kills.py` as a process of its own.

Each trial is a fork: it opens the run folder, goes on from the newest whole checkpoint, saves in the background, and is
killed at the n-th call that touches the folder, or after a time. Prints one line of JSON a trial.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from optune import checkpoint, files, run_folder
from tests.checkpoint import runs

LAST_STEP = 6


def go_on(run_dir: Path, last_step: int) -> None:
    """Train from the newest whole checkpoint to `last_step`, saving after every step."""
    with run_folder.open_run(run_dir, "seed: 0\n", resume=True) as run:
        newest = checkpoint.find(run_dir)
        if newest is None:
            model, first = runs.Net(), 0
            optimizer = runs.adamw(model)
        else:
            (model, optimizer), first = runs.load(newest), checkpoint.read_progress(newest)["step"]
        with checkpoint.Saver(
            run_dir,
            write_model=runs.write_tensors,
            model_tensors=model.named_parameters(),
            optimizer=optimizer,
            named_parameters=model.named_parameters(),
            keep_last=1,
            first_step=first,
        ) as saver:
            for step in range(first + 1, last_step + 1):
                runs.train(model, optimizer, range(step, step + 1))
                saver.save(step, {})
        newest = checkpoint.find(run_dir)
        assert newest is not None
        run.publish_model(newest)


def kill_at_event(run_dir: Path, number: int) -> None:
    """SIGKILL this process right before the `number`-th call that opens, makes, renames or removes something there."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if (event == "open" or event.startswith("os.")) and str(arguments[0]).startswith(str(run_dir)):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def attempt(run_dir: Path, last_step: int, *, event: int | None = None, after_s: float | None = None) -> bool:
    """One trial in a fork, killed at an event, after a time, or not at all. True when it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if event is not None:
                kill_at_event(run_dir, event)
            go_on(run_dir, last_step)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the trial failed by itself"
    return False


def sums(run_dir: Path) -> dict[str, str]:
    """What a run has come to: the content of its weights and its state."""
    paths = [*run_dir.glob("model/*"), *run_dir.glob("checkpoints/*/*"), *run_dir.glob("checkpoints/*/optune/opt*")]
    return {str(path.relative_to(run_dir)): files.hash_file(path) for path in sorted(paths) if path.is_file()}


def report(run_dir: Path, last_step: int, least: int, **facts: Any) -> int:
    """What a kill has left, and what the run comes to when it goes on. Returns the newest step that was left."""
    left = {folder.name: checkpoint.check(folder) for folder in checkpoint.list_checkpoints(run_dir)}
    newest = checkpoint.find(run_dir)
    step = 0 if newest is None else checkpoint.read_progress(newest)["step"]
    facts |= {"step": step, "lost": step < least, "not_whole": [name for name, faults in left.items() if faults]}
    if facts.pop("finish"):
        attempt(run_dir, last_step)
        facts["sums"] = sums(run_dir)
        facts["leftovers"] = sorted(str(path) for path in run_dir.rglob(f"{files.ASIDE}*"))
    sys.stdout.write(json.dumps(facts) + "\n")
    return step


def kill_at_every_event(folder: Path) -> None:
    """A run with one checkpoint makes its second: killed before each event of that in turn. Every third goes on."""
    template = folder / "template"
    attempt(template, 1)
    event, killed = 0, True
    while killed:
        event += 1
        run_dir = folder / f"event-{event}"
        shutil.copytree(template, run_dir)
        killed = attempt(run_dir, 2, event=event)
        report(run_dir, 2, 1, event=event, killed=killed, finish=event % 3 == 0 or not killed)
        shutil.rmtree(run_dir)


def kill_at_random(folder: Path, kills: int, seed: int) -> None:
    """One run after another, each killed at random moments until it gets through, `kills` times in all."""
    generator = random.Random(seed)
    start = time.perf_counter()
    attempt(folder / "straight", LAST_STEP)
    duration = time.perf_counter() - start
    sys.stdout.write(json.dumps({"sums": sums(folder / "straight")}) + "\n")
    done = number = 0
    while done < kills:
        run_dir, step, killed = folder / f"run-{number}", 0, True
        number += 1
        while killed and done < kills:
            killed = attempt(run_dir, LAST_STEP, after_s=generator.uniform(0, duration / 2))
            done += killed
            step = report(run_dir, LAST_STEP, step, killed=killed, finish=not killed or done == kills)
        shutil.rmtree(run_dir)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What torch imports at its first step would cost every fork seconds.
    warm = runs.Net()
    runs.train(warm, runs.adamw(warm), range(1))
    if sys.argv[2] == "events":
        kill_at_every_event(Path(sys.argv[1]))
    else:
        kill_at_random(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
