"""A layout is checked without training, and without the processes; resuming is proven with several of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.recipes.running import write_inputs
from tune_cli import verify_resume
from tune_cli.main import main


def validate(folder: Path, *words: str) -> int:
    return main(
        ["validate", "full_finetune", "--config", str(write_inputs(folder)), f"output_dir={folder}/run", *words]
    )


def test_a_layout_of_processes_that_are_not_here_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    layout = ["parallel.tensor=2", "parallel.replicate=2", "batch_size=1"]
    assert validate(tmp_path, "--processes", "8", *layout) == 0
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert "8: 2 replicas x 2 shards x 2 tensor parts" in said
    assert "steps 6 steps of 4 rows" in said  # 12 rows, two epochs; a row for each of four data ranks
    assert out.count("model:") == 1
    assert not (tmp_path / "run").exists()
    assert (dict(os.environ), torch.distributed.is_initialized()) == (before, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "6", "parallel.replicate=4"], "makes 4, which does not divide the number of processes, 6"),
        (["--processes", "8", "parallel.tensor=8"], "cannot be split over 8 ranks: num_attention_heads is 4"),
        (["--processes", "2", "optimizer_step=immediate", "parallel.shard=2"], "parallel.shard: is 2, but"),
        (["--processes", "0"], "--processes must be 1 or more, not 0"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert validate(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
    assert not torch.distributed.is_initialized()


def test_started_processes_and_imagined_ones_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_inputs(tmp_path))
    words = ["validate", "--nproc-per-node", "2", "full_finetune", "--config", config, "--processes", "2"]
    assert main(words) == 2
    assert "--processes starts none" in capsys.readouterr().err


def test_verify_resume_starts_both_runs_with_the_options_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is compared then, and how, is for `test_verify_resume.py`."""
    started: list[list[str]] = []

    def train(words: list[str], what: str) -> None:
        started.append(words)
        for step in (3, 6) if len(started) == 1 else ():
            (tmp_path / f"run.verify-resume/straight/checkpoints/step-{step:06}").mkdir(parents=True)

    monkeypatch.setattr(verify_resume, "_train", train)
    monkeypatch.setattr("optune.checkpoint.compare", lambda one, other: [])
    monkeypatch.setattr(verify_resume, "_metrics", lambda folder: [])
    config = ["--config", str(write_inputs(tmp_path)), f"output_dir={tmp_path}/run"]
    assert main(["verify-resume", "--nproc-per-node", "2", "full_finetune", *config]) == 0
    assert [words[:3] for words in started] == [["run", "--nproc-per-node", "2"], ["resume", "--nproc-per-node", "2"]]
    assert "equal: a run resumed after step 3" in capsys.readouterr().out
    assert main(["verify-resume", "--nnodes", "2", "full_finetune", *config]) == 2
    assert "--nnodes: it works on one machine" in capsys.readouterr().err
