"""--multirun: the grid, where each run goes, what one failure does, and the comparison at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tune_cli.multirun
from tests import forked
from tests.tune_cli.conftest import Optune
from tune_cli.main import main

RUN = ("run", "fake.py", "--config", "c.yaml", "--multirun")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs each job in this process; returns the words of the jobs."""
    jobs: list[list[str]] = []

    def run_job(command: list[str]) -> int:
        assert command[:3] == [sys.executable, "-m", "tune_cli.main"]
        jobs.append(command[3:])
        return main(command[3:])

    monkeypatch.setattr(tune_cli.multirun, "_run_job", run_job)
    return jobs


def table(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_grid_runs_every_combination_in_its_own_folder_and_compares(
    optune: Optune, folder: Path, in_process: list[list[str]]
) -> None:
    result = optune(*RUN, "optimizer.lr=1e-5,3e-5", "seed=choice(1,2)", "device=007")
    assert result.code == 0
    rows = table(result.out)
    assert rows[0] == ["run", "optimizer.lr", "seed", "loss", "validation_loss", "seconds", "exit"]
    assert [row[:5] for row in rows[1:]] == [
        ["0", "1e-5", "1", "1.0000", "2.5000"],
        ["1", "1e-5", "2", "1.0000", "2.5000"],
        ["2", "3e-5", "1", "3.0000", "2.5000"],
        ["3", "3e-5", "2", "3.0000", "2.5000"],
    ]
    names = sorted(path.name for path in (folder / "runs/x").iterdir())
    assert names[0] == "0_optimizer.lr=1e-5,seed=1"
    assert names[3] == "3_optimizer.lr=3e-5,seed=2"
    assert (folder / "runs/x" / names[0] / "ran-0").read_text(encoding="utf-8") == "007"


def test_failed_run_does_not_stop_the_others_and_the_worst_code_is_returned(
    optune: Optune, in_process: list[list[str]]
) -> None:
    result = optune(*RUN, "behaviour=fail,fine,model")
    assert result.code == 2
    assert [row[-1] for row in table(result.out)[1:]] == ["1", "0", "2"]
    assert table(result.out)[1][2:4] == ["-", "-"]


def test_signal_ends_the_grid(optune: Optune, in_process: list[list[str]]) -> None:
    result = optune(*RUN, "behaviour=fine,stopped,fine")
    assert result.code == 143
    assert len(in_process) == 2
    assert result.out.splitlines()[3].endswith("not run")


def test_wrong_value_anywhere_in_the_grid_runs_nothing(
    optune: Optune, folder: Path, in_process: list[list[str]]
) -> None:
    result = optune(*RUN, "optimizer.lr=1e-5,fast")
    assert result.code == 2
    assert "optimizer.lr must be a number of at least 0, not 'fast'" in result.err
    assert not in_process
    assert not (folder / "runs").exists()


def test_range_and_quoted_values_and_lists_are_swept_as_written(optune: Optune, in_process: list[list[str]]) -> None:
    assert optune(*RUN, "seed=range(1,4)").code == 0
    assert [words[4] for words in in_process] == ["seed=1", "seed=2", "seed=3"]
    in_process.clear()
    assert optune(*RUN, "data.train=[a.jsonl],[b.jsonl,c.jsonl]", "device='a=b','c,d'", "output_dir=runs/z").code == 0
    assert [words[5:7] for words in in_process[:2]] == [
        ["data.train=[a.jsonl]", "device='a=b'"],
        ["data.train=[a.jsonl]", "device='c,d'"],
    ]


def test_grid_over_the_output_folder_is_refused(optune: Optune, in_process: list[list[str]]) -> None:
    result = optune(*RUN, "output_dir=a,b")
    assert result.code == 2
    assert "output_dir=a,b: cannot be part of a grid" in result.err


def test_launch_options_and_allowed_packages_reach_every_job(optune: Optune, in_process: list[list[str]]) -> None:
    from tune_cli import multirun, run

    request = run.Request(run.load_recipe("fake.py"), Path("c.yaml"), ["seed=1,2"], ["my_opt"])
    assert multirun.run_grid(request, ["--nproc-per-node", "0x"]) != 0  # refused by torchrun, after it was passed on
    assert in_process[0][:8] == [
        *["run", "--nproc-per-node", "0x", "fake.py", "--config", "c.yaml", "--allow-target", "my_opt"]
    ]


def test_comparison_reads_a_metrics_file_that_was_cut(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo', encoding="utf-8")
    assert tune_cli.multirun.read_last(metrics, ("loss", "validation_loss")) == [1.5, None]
    assert tune_cli.multirun.read_last(folder / "nope", ("loss",)) == [None]


@pytest.mark.slow
def test_terminated_grid_stops_its_run_prints_the_table_and_says_143(folder: Path) -> None:
    (folder / "mine.py").write_text(
        (folder / "fake.py").read_text(encoding="utf-8").replace('    if cfg.behaviour == "model":', WAIT),
        encoding="utf-8",
    )
    command = [forked.python(), "-m", "tune_cli.main", "run", "mine.py", "--config", "c.yaml", "--multirun", "seed=1,2"]
    process = subprocess.Popen([*command, "behaviour=wait"], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert table(out)[1][-1] == "143"
    assert out.splitlines()[2].endswith("not run")


WAIT = """    if cfg.behaviour == "wait":
        Path("waiting").touch()
        time.sleep(60)
    if cfg.behaviour == "model":"""
