"""The study's runs and its report: resumable, and right about what it read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import study_report
from tests import forked

ROOT = Path(__file__).resolve().parents[2]


def record(mode: str, lr: float, seed: int, losses: list[float], diverged: int | None = None) -> dict[str, Any]:
    validation = [[10 * index, loss] for index, loss in enumerate(losses)]
    return {
        "optimizer": "SGD", "mode": mode, "lr": lr, "seed": seed, "steps": 20, "validation": validation,
        "step_s": 0.1 if mode == "standard" else 0.2, "diverged": diverged,
    }  # fmt: skip


def test_summary_compares_each_mode_at_its_own_best_rate_with_the_same_seeds() -> None:
    records = [
        *(record("standard", lr, seed, [4.0, 3.0, lr + seed]) for lr in (1.0, 2.0) for seed in (0, 1)),
        *(record("immediate", 1.0, seed, [4.0, 2.0, 1.5 + seed]) for seed in (0, 1)),
        record("immediate", 2.0, 0, [4.0, 0.5]),
        record("immediate", 2.0, 1, [4.0], diverged=3),
    ]
    summary = study_report.summarize(records)
    standard, immediate = summary["SGD standard"], summary["SGD immediate"]
    assert (standard["best_rate"], immediate["best_rate"]) == (1.0, 1.0)
    assert standard["final_loss"][0] == 1.5
    assert immediate["difference_to_standard_by_seed"] == (0.5, 0.0)
    assert immediate["diverged_by_rate"] == {"1": 0, "2": 1}
    assert immediate["steps_to_standard_final_loss"] is None
    assert standard["steps_to_standard_final_loss"] == 20
    assert (standard["step_s"], immediate["step_s"]) == (0.1, 0.2)
    assert study_report.steps_to_reach(records[:2], 2.25) == pytest.approx(15)
    assert "| SGD immediate | 1 | 2.0000 ± 0.7071 | +0.5000 ± 0.0000 | never of 20 | 0.200 |" in study_report.table(
        "x", summary
    )


@pytest.mark.slow
def test_the_study_runs_goes_on_where_it_was_and_writes_its_report(tmp_path: Path) -> None:
    def study(*arguments: str) -> str:
        command = [forked.python(), str(ROOT / "scripts" / "study_immediate.py"), "--results", str(tmp_path / "runs")]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=300)
        return done.stdout

    grid = ["run", "tiny", "--steps", "3", "--seeds", "1", "--optimizer", "SGD", "--rates", "0.1", "--threads", "1"]
    assert "tiny: 2 runs, 0 are there already" in study(*grid, "--modes", "standard", "immediate")
    assert "tiny: 3 runs, 2 are there already" in study(*grid)
    losses = {
        mode: json.loads((tmp_path / "runs" / "tiny" / f"tiny-SGD-0.1-{mode}-seed0.json").read_text())["losses"]
        for mode in ("standard", "immediate", "exact")
    }
    assert losses["standard"][0] == pytest.approx(losses["immediate"][0], abs=1e-5)
    assert losses["immediate"][0] == pytest.approx(losses["exact"][0], abs=1e-5)
    assert len({loss[2] for loss in losses.values()}) == 3
    page = tmp_path / "immediate.md"
    page.write_text("before <!-- study -->old<!-- /study --> after")
    study_report.write_report(tmp_path / "runs", tmp_path / "images", page)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after")
    assert "| SGD exact | 0.1 |" in text
    assert "old" not in text
    assert "![losses and rates](images/immediate_tiny.png)" in text
    assert (tmp_path / "images" / "immediate_tiny.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "images" / "immediate_study.json").read_text())["tiny"]["SGD immediate"]["seeds"] == 1
