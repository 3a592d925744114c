#!/usr/bin/env python
"""Trains on two "machines" that meet over a network of their own, cuts the line in the middle, and goes on.

    sudo python scripts/two_machines.py

The machines are two network namespaces of Linux, joined by a cable (a veth pair); the disk is shared, as several
machines need it. Each starts `optune run --nnodes 2 …`, and they find each other through a rendezvous on the first.
Three runs:

- straight: two processes on one machine;
- two machines: must end with the same weights, optimizer state and losses, bit for bit;
- cut: the network comes up a few seconds after the start, and the first machine takes its own name for loopback, as
  many an /etc/hosts has it. The line is cut once a checkpoint is there. Both sides must end by themselves, with a
  cause, within `--bound` seconds; the line is mended, the same command starts again with resume=auto, and must end as
  the straight run.

Prints one line of JSON. Exits with 1 when anything differs, with 77 where namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from optune import checkpoint, files  # noqa: E402
from tests import fixtures, forked  # noqa: E402
from tune_cli.machines import GLOO_INTERFACE  # noqa: E402

NAMESPACES = Path("/etc/netns")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("127.0.1.1 machine-a", f"{ADDRESSES[0]} machine-a")
"""What each machine's /etc/hosts says of the first one."""
LATE_S = 5.0
NOT_ALLOWED = 77
CONFIG = """
model: {path: m0, dtype: fp32}
data: {train: train.jsonl, max_length: 64}
batch_size: 1
epochs: 1000
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1}
checkpoint: {save_every_steps: 5, keep_last: 2}
schedule: {name: cosine, warmup_steps: 2}
seed: 3
device: cpu
"""


class Network:
    """Two namespaces and the cable between them; a context manager that takes them away again."""

    def __init__(self, *, is_forked: bool = False) -> None:
        self._is_forked = is_forked
        self.names = [f"optune-{os.getpid()}-{side}" for side in "ab"]
        self._ends = [f"ot{os.getpid() % 100000}{side}" for side in "ab"]

    def __enter__(self) -> Network:
        for name, hosts in zip(self.names, HOSTS, strict=True):
            call("ip", "netns", "add", name)
            # `ip netns exec` lays what is in this folder over /etc.
            folder = NAMESPACES / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}\n")
        call("ip", "link", "add", self._ends[0], "type", "veth", "peer", "name", self._ends[1])
        for name, end, address in zip(self.names, self._ends, ADDRESSES, strict=True):
            call("ip", "link", "set", end, "netns", name)
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "link", "set", end, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(NAMESPACES / name, ignore_errors=True)

    def get_python(self, name: str) -> list[str]:
        """The words that run Python on a machine."""
        enter = ["ip", "netns", "exec", name]
        return [forked.python(*enter)] if self._is_forked else [*enter, sys.executable]

    def cut(self) -> None:
        call("ip", "-n", self.names[0], "link", "set", self._ends[0], "down")

    def mend(self) -> None:
        call("ip", "-n", self.names[0], "link", "set", self._ends[0], "up")


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def are_allowed() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    try:
        with Network():
            return ""
    except FileNotFoundError:
        return "there is no `ip` command"
    except PermissionError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace").strip()


class Machine:
    """One launcher, run by the words `python`, with its words in a file."""

    def __init__(self, folder: Path, log: str, launch: list[str], words: list[str], python: list[str]) -> None:
        self.log = folder / log
        # A machine finds its own interface; that of whoever runs this, perhaps loopback, is none of its own.
        kept = {name: value for name, value in os.environ.items() if name != GLOO_INTERFACE}
        environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*python, "-m", "tune_cli.main", "run", *launch, "full_finetune", *words],
                cwd=folder, stdout=output, stderr=output, env=environment,
            )  # fmt: skip

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None where it is still running after `limit_s`, and is then killed."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def last_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-2:]


def start_both(folder: Path, network: Network, name: str, words: list[str], first: str = ADDRESSES[0]) -> list[Machine]:
    """The same command on both machines; `first` names the first one."""
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", name]
    launch += ["--rdzv-endpoint", f"{first}:29500"]
    return [
        Machine(folder, f"{name}-{space[-1]}.log", launch, words, network.get_python(space)) for space in network.names
    ]


def read_end(run_dir: Path) -> dict[str, Any]:
    """What a run has come to: the weights, the optimizer's state and the losses."""
    newest = checkpoint.list_checkpoints(run_dir)[-1]
    tensors = [*newest.rglob("*.safetensors"), *(run_dir / "model").glob("*.safetensors")]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "tensors": {str(path.relative_to(run_dir)): files.hash_file(path) for path in sorted(tensors)},
        "losses": [(line["step"], line["loss"], line["grad_norm"]) for line in lines],
        "not_whole": [path.name for path in checkpoint.list_checkpoints(run_dir) if checkpoint.check(path)],
    }


def wait_until(holds: Callable[[], bool], machines: list[Machine], limit_s: float) -> bool:
    """Whether `holds()` came true while all machines were running."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and all(machine.is_running for machine in machines):
        if holds():
            return True
        time.sleep(0.01)
    return False


def cut_and_go_on(folder: Path, network: Network, words: list[str], bound_s: float, limit_s: float) -> dict[str, Any]:
    """The third run; what was seen."""
    run_dir = folder / "cut"
    network.cut()
    machines = start_both(folder, network, "before", [*words, "output_dir=cut"], first="machine-a")
    time.sleep(LATE_S)
    network.mend()
    if not wait_until(lambda: any(run_dir.glob("checkpoints/step-*")), machines, limit_s):
        return {"problem": "no checkpoint came", "said": [machine.last_lines for machine in machines]}
    network.cut()
    began = time.monotonic()
    codes = [machine.wait(bound_s) for machine in machines]
    seen: dict[str, Any] = {
        "seconds": round(time.monotonic() - began, 1),
        "codes": codes,
        "said": [machine.last_lines for machine in machines],
        "newest": checkpoint.list_checkpoints(run_dir)[-1].name,
    }
    network.mend()
    again = start_both(folder, network, "again", [*words, "output_dir=cut", "resume=auto"])
    seen["codes again"] = [machine.wait(limit_s) for machine in again]
    causes = all(any(line.startswith("error: ") for line in said) for said in seen["said"])
    if codes != [1, 1] or not causes or seen["codes again"] != [0, 0]:
        seen["problem"] = "an end that is none"
    return seen


def main(folder: Path, steps: int, bound_s: float, limit_s: float, *, is_quick: bool, is_forked: bool) -> int:
    fixtures.write_model(folder / "m0")
    fixtures.write_rows(folder / "train.jsonl", fixtures.numbered_rows(12))
    (folder / "config.yaml").write_text(CONFIG)
    words = ["--config", "config.yaml", f"max_steps={steps}"]
    seen: dict[str, Any] = {}
    straight = Machine(
        folder, "straight.log", ["--nproc-per-node", "2"], [*words, "output_dir=straight"], [forked.python()]
    )
    seen["straight"] = straight.wait(limit_s)
    with Network(is_forked=is_forked) as network:
        both = [] if is_quick else start_both(folder, network, "two", [*words, "output_dir=two"])
        seen["two machines"] = [machine.wait(limit_s) for machine in both]
        seen["cut"] = cut_and_go_on(folder, network, words, bound_s, limit_s)
    problems = [seen["cut"]["problem"]] if "problem" in seen["cut"] else []
    if seen["straight"] != 0 or any(code != 0 for code in seen["two machines"]):
        problems.append("a run did not end well")
        seen["said"] = [machine.last_lines for machine in (straight, *both)]
    else:
        end = read_end(folder / "straight")
        names = ["cut"] if is_quick else ["two", "cut"]
        problems += [f"{name} differs" for name in names if not problems and read_end(folder / name) != end]
    print(json.dumps(seen | {"problems": problems}), flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bound", type=float, default=60.0, help="seconds that both sides have to end after the cut")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a run has to end otherwise")
    parser.add_argument(
        "--quick", action="store_true", help="leave out the run of two machines that nothing happens to"
    )
    parser.add_argument(
        "--forked", action="store_true", help="fork what runs on a machine from one process there, to spare time"
    )
    parser.add_argument("--folder", type=Path, help="where the runs live, and stay")
    options = parser.parse_args()
    if why := are_allowed():
        print(f"network namespaces are not allowed here: {why}", file=sys.stderr)
        sys.exit(NOT_ALLOWED)
    kinds = {"is_quick": options.quick, "is_forked": options.forked}
    if options.folder:
        options.folder.mkdir(parents=True)
        sys.exit(main(options.folder.absolute(), options.steps, options.bound, options.limit, **kinds))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary), options.steps, options.bound, options.limit, **kinds))
