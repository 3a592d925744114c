"""What happens to runs of two processes, played in one process that forks: `python -m tests.reliability.rank_scenarios
FOLDER` writes `results.json` there, which the tests read.

Launcher, torch's agent and workers are real; only the start of Python is spared (`scripts/kill_ranks.py`). What happens
is tied to the number of a step: a worker sends a signal, or dies, when it takes it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import kill_ranks  # noqa: E402  # pyright: ignore[reportMissingImports]
import torch  # noqa: E402
import torch.distributed.run  # noqa: E402

import optune.train  # noqa: E402
from tests import fixtures  # noqa: E402
from tune_cli.main import main  # noqa: E402

AT = 2
"""The step, of those that a process takes, at which it happens."""
LATE_S = 3.0
"""How much later than the others rank 0 comes after a restart: what it left in torch's store is read before."""
SLOWLY_S = 0.3
"""How long the steps after it take, so that a signal finds the run where it is meant to."""
Deed = Callable[[int], None]
CONFIG = """
model: {path: m0, dtype: fp32}
data: {train: train.jsonl, validation: validation.jsonl, max_length: 64}
batch_size: 1
epochs: 6
max_steps: 16
validation_every_steps: 4
checkpoint: {save_every_steps: 2, keep_last: null}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1}
schedule: {name: cosine, warmup_steps: 2}
seed: 3
device: cpu
"""


def at_step(deed: Deed, slowly_s: float = SLOWLY_S) -> Deed:
    """Arms a worker: `deed(rank)` before the `AT`-th step that it takes in its first attempt."""

    def arm(rank: int) -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            time.sleep(LATE_S if rank == 0 else 0.0)
            return
        step = optune.train.train_step
        calls = 0

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == AT:
                deed(rank)
            if calls >= AT:
                time.sleep(slowly_s)
            return step(*arguments, **keywords)

        optune.train.train_step = counted

    return arm


def to_launcher(number: signal.Signals) -> Deed:
    return lambda rank: os.kill(os.getppid(), number) if rank == 0 else None


def save_then_stop(rank: int) -> None:
    """The launcher hears SIGUSR1, and three slow steps later SIGINT."""
    if rank == 0:
        launcher = os.getppid()
        os.kill(launcher, signal.SIGUSR1)
        threading.Timer(3 * SLOWLY_S, os.kill, (launcher, signal.SIGINT)).start()


def to_rank(which: int, number: signal.Signals) -> Deed:
    return lambda rank: os.kill(os.getpid(), number) if rank == which else None


def to_all(number: signal.Signals) -> Deed:
    """As a batch system does, which signals every process of a job."""

    def deed(rank: int) -> None:
        os.kill(os.getpid(), number)
        to_launcher(number)(rank)

    return deed


def twice_in_a_hung_step(rank: int) -> None:
    """Rank 1 hangs; the launcher hears SIGINT, and a second later again."""
    if rank == 1:
        time.sleep(600)
    launcher = os.getppid()
    os.kill(launcher, signal.SIGINT)
    threading.Timer(1.0, os.kill, (launcher, signal.SIGINT)).start()


def nothing(rank: int) -> None: ...


def play(folder: Path, name: str, words: list[str], arm: Deed = nothing, *, ranks: int = 2) -> dict[str, Any]:
    """One command in a process of its own; its exit code, how long it took, and what it wrote."""
    log = folder / f"{name}.log"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kill_ranks.mend_libraries()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = kill_ranks.launch(words, ranks, arm) if ranks > 1 else main(words)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    return {"code": os.waitstatus_to_exitcode(status), "seconds": seconds, "said": log.read_text(errors="replace")}


def write_poison(folder: Path) -> None:
    """M0 whose word "boom" is not a number, and rows that use it."""
    from safetensors.torch import load_file, save_file

    path = fixtures.write_model(folder / "boom") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][fixtures.VOCABULARY.index("boom")] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    fixtures.write_rows(folder / "boom.jsonl", [fixtures.chat("boom", "w1"), fixtures.chat("w2", "boom")] * 4)


def wait_for_release(run_dir: Path, limit_s: float) -> float:
    """How long it takes until no process holds the run folder."""
    from optune import folder_lock
    from optune.errors import ConfigError

    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        try:
            folder_lock.refuse_held(run_dir)
        except ConfigError:
            time.sleep(0.05)
        else:
            break
    return time.monotonic() - began


def main_scenarios(folder: Path) -> dict[str, Any]:
    fixtures.write_model(folder / "m0")
    fixtures.write_rows(folder / "train.jsonl", fixtures.numbered_rows(12))
    fixtures.write_rows(folder / "validation.jsonl", fixtures.numbered_rows(5))
    write_poison(folder)
    for count in (1, 3):
        fixtures.write_rows(folder / f"rows{count}.jsonl", fixtures.numbered_rows(count))
    (folder / "config.yaml").write_text(CONFIG)

    def run(name: str) -> list[str]:
        return ["run", "full_finetune", "--config", "config.yaml", f"output_dir={folder / name}"]

    def resume(name: str) -> list[str]:
        return ["resume", str(folder / name)]

    results: dict[str, Any] = {}

    def do(name: str, words: list[str], arm: Deed = nothing, *, ranks: int = 2) -> None:
        results[name] = play(folder, name, words, arm, ranks=ranks)

    do("straight", run("straight"))
    do("save, then int", run("chain"), at_step(save_then_stop))
    do("term of one rank", resume("chain"), at_step(to_rank(1, signal.SIGTERM)))
    do("term of all", resume("chain"), at_step(to_all(signal.SIGTERM)))
    do("chain's end", resume("chain"))
    do("second signal", run("second"), at_step(twice_in_a_hung_step))
    do("launcher killed", run("orphans"), at_step(to_launcher(signal.SIGKILL)))
    results["launcher killed"]["seconds"] = wait_for_release(folder / "orphans", 60)
    do("orphans' end", resume("orphans"))
    restart = ["run", "--max-restarts", "1", *run("restarted")[1:]]
    do("restart", restart, at_step(to_rank(1, signal.SIGKILL)))
    for name, ranks in (("two", 2), ("one", 1)):
        rows = "data.train=rows3.jsonl"
        do(f"three rows, {name}", [*run(f"three-{name}"), rows, f"batch_size={3 - ranks}"], ranks=ranks)
    do("broken", [*run("broken"), "model.path=boom", "data.train=boom.jsonl", "max_skipped_steps=1"])
    few = ["data.train=rows1.jsonl", "data.validation=rows1.jsonl"]
    do("one row", [*run("one-row"), *few])
    return results


if __name__ == "__main__":
    place = Path(sys.argv[1])
    os.chdir(place)
    torch.set_num_threads(1)
    (place / "results.json").write_text(json.dumps(main_scenarios(place)))
