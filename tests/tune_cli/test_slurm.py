"""The scripts for Slurm, under a Slurm that is played: `srun` starts tasks here, `scontrol` notes what it was told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import forked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RECIPE = '''"""Says who is there; with `waits`, until a signal asks for the end."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from optune.config import RunConfig
from optune.signals import Requests


@dataclass
class Config(RunConfig):
    waits: bool = False


def main(cfg, validate_only=False):
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with Requests(is_relayed=True) as requests:
        (folder / f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").write_text(str(cfg.resume))
        while cfg.waits and requests.stop is None:
            time.sleep(0.05)
        return requests.exit_code
'''
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> calls
count=1
while [[ $1 == --* ]]; do
    if [[ $1 == --ntasks=* ]]; then count=${1#*=}; fi
    shift
done
pids=()
for ((task = 0; task < count; task++)); do
    SLURM_PROCID=$task "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || { ended=$?; ((ended > code)) && code=$ended; }
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> calls
[[ $1 == show ]] && printf 'localhost\\nelsewhere\\n'
exit 0
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and what Slurm puts into a job's environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    optune = f'#!/usr/bin/env bash\nexec "{sys.executable}" -m tune_cli.main "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "optune": optune}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text("model: {path: m0}\ndata: {train: a.jsonl}\noutput_dir: out\n")
    monkeypatch.chdir(tmp_path)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "localhost,elsewhere",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def submit(script: str, *words: str) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "scripts/slurm" / script), "recipe.py", "--config", "c.yaml", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(folder: Path, count: int) -> None:
    end = time.monotonic() + 300
    while len(list(folder.glob("out/rank-*"))) < count:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_launcher_on_each_machine_and_all_find_each_other(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESSES_PER_NODE", "1")
    program = cluster / "bin/optune"
    program.write_text(program.read_text().replace(sys.executable, forked.python()))
    job = submit("finetune_nodes.sbatch")
    said, _ = job.communicate(timeout=600)
    assert job.returncode == 0, said
    ranks = {path.name: path.read_text() for path in cluster.glob("out/rank-*")}
    assert ranks == {"rank-0-of-2": "auto", "rank-1-of-2": "auto"}
    assert "requeue" not in (cluster / "calls").read_text()


def test_a_job_whose_time_is_nearly_over_is_queued_again(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM goes to every process of the step, and from the launcher to its workers once more."""
    monkeypatch.setenv("PROCESSES_PER_NODE", "2")
    job = submit("finetune.sbatch", "waits=true")
    wait_for(cluster, 2)
    for process in psutil.Process(job.pid).children(recursive=True):
        if "tune_cli.main" in process.cmdline():
            process.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=600)
    assert job.returncode == 143, said
    assert "error" not in said
    assert (cluster / "calls").read_text().splitlines()[-1] == f"scontrol requeue {os.getpid()}"
