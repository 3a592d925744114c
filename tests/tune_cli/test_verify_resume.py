"""`optune verify-resume` on recipes that are exact, and on one that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optune.config.sections import ScheduleSection
from tests import forked
from tests.recipes.running import ROOT, write_inputs
from tune_cli.main import main
from tune_cli.verify_resume import _shorten_schedule


@pytest.fixture(autouse=True)
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", forked.python())


LEAKY = ("seed=cfg.seed,", "seed=__import__('os').getpid(),")
"""Random numbers that belong to the process and not to the step."""


@pytest.mark.slow
def test_an_exact_recipe_is_found_equal_and_nothing_stays(tmp_path: Path, capsys):
    config = write_inputs(tmp_path)
    words = [
        "verify-resume",
        "lora_finetune",
        "--config",
        str(config),
        f"output_dir={tmp_path}/run",
        "lora.dropout=0.3",
    ]
    assert main(words) == 0
    assert "equal: a run resumed after step 3 is bit for bit the straight run" in capsys.readouterr().out
    assert not list(tmp_path.glob("run*"))


@pytest.mark.slow
def test_a_recipe_whose_random_numbers_hang_on_the_process_is_found_out(tmp_path: Path, capsys):
    config = write_inputs(tmp_path)
    source = (ROOT / "recipes" / "lora_finetune.py").read_text()
    head, loop = source.split("run.steps()")
    leaky = tmp_path / "leaky.py"
    leaky.write_text(head + "run.steps()" + loop.replace(*LEAKY))
    assert leaky.read_text() != source
    words = ["verify-resume", str(leaky), "--config", str(config), f"output_dir={tmp_path}/run", "lora.dropout=0.3"]
    assert main([*words, "--steps", "4", "--cut", "1"]) == 1
    out = capsys.readouterr().out
    assert "not equal" in out and "adapter_model.safetensors" in out and "metrics.jsonl" in out


def test_a_cut_outside_the_run_is_refused(tmp_path: Path, capsys):
    words = ["verify-resume", "full_finetune", "--config", "tiny/full", "--steps", "4", "--cut", "4"]
    assert main(words) == 2
    assert "between step 1 and step 3" in capsys.readouterr().err


def test_a_schedule_that_does_not_fit_is_shortened_and_said(capsys):
    assert _shorten_schedule(ScheduleSection(warmup_steps=20), 6) == ["schedule.warmup_steps=3"]
    assert "schedule.warmup_steps=3" in capsys.readouterr().err
    both = ScheduleSection(name="wsd", warmup_steps=4, decay_steps=9)
    assert _shorten_schedule(both, 6) == ["schedule.decay_steps=2"]
    assert _shorten_schedule(ScheduleSection(warmup_steps=6), 6) == []
    assert _shorten_schedule({"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 9}, 6) == []


def test_a_config_that_the_run_refuses_is_no_difference(tmp_path: Path, capfd):
    words = ["verify-resume", "full_finetune", "--config", "tiny/full", f"output_dir={tmp_path}/run"]
    assert main([*words, f"model.path={tmp_path}/none"]) == 2
    err = capfd.readouterr().err
    assert f"{tmp_path}/none" in err
    assert "error: verify-resume: the run was refused" in err
