"""Two ranks that save together, one of which is killed by SIGKILL. Started by `test_shards_kills.py` as a process.

Each trial forks both ranks: they go on from the newest whole checkpoint and save the next one, and one of them dies
before the n-th call that touches the run folder. Prints one line of JSON a trial.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor  # noqa: F401 (imported before the forks, for their sake)

from optune import checkpoint, files
from optune.errors import CheckpointError
from tests.checkpoint import kill_harness, runs
from tests.checkpoint.test_shards_saver import Case

PATIENCE_S = 60


def save_next(run_dir: Path, rank: int, store: Path) -> int:
    """One rank of a run that does one step more and saves it."""
    timeout = timedelta(seconds=PATIENCE_S / 2)
    torch.distributed.init_process_group(
        "gloo", store=FileStore(str(store), 2), rank=rank, world_size=2, timeout=timeout
    )
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    case = Case(run_dir, init_device_mesh("cpu", (2,)), group)
    newest = checkpoint.find(run_dir)
    done = 0
    if newest is not None:
        checkpoint.load_optimizer(case.optimizer, case.model.named_parameters(), newest)
        done = checkpoint.read_progress(newest)["step"]
    case.step(done + 1)
    try:
        with case.saver(first_step=done, keep_last=1) as saver:
            saver.save(done + 1, {})
    except CheckpointError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        return 3
    return 0


def attempt(run_dir: Path, *, victim: int | None, event: int) -> dict[int, int]:
    """Both ranks in forks, the `victim` killed before its call number `event`; their exit codes, -9 for killed."""
    store = run_dir.with_name(f"store-{time.monotonic_ns()}")
    children: dict[int, int] = {}
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(1)  # else threads that ask at once may find no pool of torch's: a fork left none
                if rank == victim:
                    kill_harness.kill_at_event(run_dir, event)
                status = save_next(run_dir, rank, store)
            finally:
                sys.stderr.flush()
                os._exit(status)
        children[child] = rank
    codes: dict[int, int] = {}
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    return codes


def main(folder: Path, every: int, victims: list[int]) -> None:
    """A run with one checkpoint makes its second; each victim in turn dies before every `every`-th of its calls."""
    template = folder / "template"
    assert attempt(template, victim=None, event=0) == {0: 0, 1: 0}
    for victim in victims:
        event, killed = 1, True
        while killed:
            run_dir = folder / f"rank-{victim}-event-{event}"
            shutil.copytree(template, run_dir)
            start = time.monotonic()
            codes = attempt(run_dir, victim=victim, event=event)
            waited_s = time.monotonic() - start
            killed = codes[victim] == -9
            newest = checkpoint.find(run_dir)
            left = {path.name: checkpoint.check(path) for path in checkpoint.list_checkpoints(run_dir)}
            facts = {"victim": victim, "event": event, "killed": killed, "codes": codes, "left": left, "s": waited_s}
            facts["newest"] = newest and newest.name
            facts["again"] = attempt(run_dir, victim=None, event=0)
            facts["asides"] = [path.name for path in run_dir.rglob(f"{files.ASIDE}*")]
            facts["then"] = [path.name for path in checkpoint.list_checkpoints(run_dir)]
            sys.stdout.write(json.dumps(facts) + "\n")
            shutil.rmtree(run_dir)
            event += every


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What torch imports at its first step would cost every fork seconds.
    warm = runs.Net()
    runs.train(warm, runs.adamw(warm), range(1))
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(rank) for rank in sys.argv[3:]] or [0, 1])
