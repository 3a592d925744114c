"""Interrupted equals uninterrupted, bit for bit: every recipe, every stepper, every cut of 12 steps in some epochs.

The product of axes is thinned to rows in which every pair of values of two axes still occurs, the step of the cut being
an axis; `test_the_thinned_tables_cover_every_pair` holds that.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.recipes.pairwise import Row, all_pairs, pairs_of, thin
from tests.recipes.running import RECIPES, Finished, assert_equal_runs, read_tensors, run, write_inputs
from tune_cli.main import main

STEPPERS = {
    "after_backward": [],
    "in_backward": ["optimizer_step=in_backward", "max_grad_norm=null"],
    "clipped_in_backward": ["optimizer_step=in_backward", "gradient_stash=hold"],
    "factored": ["optimizer_step=in_backward", "gradient_stash=factored"],
    "two_pass": ["optimizer_step=in_backward", "gradient_stash=two_pass"],
    "immediate": ["optimizer_step=immediate", "max_grad_norm=null"],
}
FEATURES = {
    "padded": [],
    "packed": ["data.packing=true", "data.max_length=40", "batch_size=1"],  # two rows a pack
    "accumulated": ["batch_size=1", "gradient_accumulation_steps=4", "epochs=4"],
    "breadth_first": ["batch_size=1", "gradient_accumulation_steps=4", "epochs=4", "accumulation=breadth_first"],
    "bf16": ["model.dtype=bf16"],
    "bf16_masters": ["model.dtype=bf16", "model.master_weights=fp32"],
}
AXES = {"recipe": RECIPES, "stepper": list(STEPPERS), "feature": list(FEATURES)}
STEPS = 12


def allowed(row: Row) -> bool:
    return not (row["stepper"] == "immediate" and row["feature"] in ("accumulated", "breadth_first", "bf16_masters"))


CASES = thin(AXES, allowed)
CUT_AXES = AXES | {"cut": range(1, STEPS)}


CUTS = thin(CUT_AXES, lambda row: {name: row[name] for name in AXES} in CASES)
MODES = ["after_backward", "clipped_in_backward", "two_pass"]
MODE_AXES = {"recipe": RECIPES, "first": MODES, "second": MODES, "cut": (1, 5, 6, 7)}
MODE_CHANGES = thin(MODE_AXES, lambda row: row["first"] != row["second"])
DROPOUT = {"lora_finetune": ["lora.dropout=0.3"]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), rows=12)


def cut(straight: Finished, step: int, folder: Path) -> Path:
    """The run folder as it was just after the save of `step`, with lines of two lost steps behind it."""
    shutil.copytree(straight.folder, folder, ignore=shutil.ignore_patterns("model", "plot.png", ".lock"))
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: step + 2]))
    return folder


def resume(folder: Path, *overrides: str) -> Finished:
    assert main(["resume", str(folder), *overrides]) == 0
    return Finished(folder)


def comparable(finished: Finished) -> list[dict[str, object]]:
    """The metrics lines without what a clock or a machine decides."""
    machine = ("tokens_per_s", "peak_memory_gib", "step_s")
    return [{key: value for key, value in line.items() if key not in machine} for line in finished.metrics]


def test_the_thinned_tables_cover_every_pair():
    assert set().union(*map(pairs_of, CASES)) == all_pairs(AXES, allowed)
    assert set().union(*map(pairs_of, CUTS)) == all_pairs(CUT_AXES, allowed)
    assert set().union(*map(pairs_of, MODE_CHANGES)) == all_pairs(MODE_AXES, lambda row: row["first"] != row["second"])


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory):
    """The run that nothing happens to, saved after every step; made once for the same settings."""

    @cache
    def make(recipe: str, stepper: str, feature: str) -> Finished:
        settings = [*STEPPERS[stepper], *FEATURES[feature], *DROPOUT.get(recipe, [])]
        output = tmp_path_factory.mktemp("straight") / "run"
        return run(recipe, config, output, "checkpoint={save_every_steps: 1, keep_last: null}", *settings)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["-".join(case.values()) for case in CASES])
def test_a_run_resumed_after_any_step_is_the_uninterrupted_run(case: Row, straight, tmp_path: Path):
    expected = straight(**case)
    assert len(expected.checkpoints) == STEPS and expected.metrics[-1]["epoch"] >= 2.0
    for step in (row["cut"] for row in CUTS if row.items() >= case.items()):
        resumed = resume(cut(expected, step, tmp_path / f"cut-{step}"))
        assert_equal_runs(resumed, expected)
        assert comparable(resumed) == comparable(expected), f"metrics after a cut at step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("row", MODE_CHANGES, ids=["-".join(map(str, row.values())) for row in MODE_CHANGES])
def test_a_run_resumed_in_another_mode_is_the_uninterrupted_run(row: Row, straight, tmp_path: Path):
    expected = straight(row["recipe"], row["first"], "padded")
    reset = ["optimizer_step=after_backward", "gradient_stash=auto"]
    resumed = resume(cut(expected, row["cut"], tmp_path / "cut"), *(STEPPERS[row["second"]] or reset))
    assert_equal_runs(resumed, expected)


def test_a_log_window_that_a_resume_falls_into_is_logged_as_in_the_straight_run(config, tmp_path: Path):
    settings = ["checkpoint={save_every_steps: 1, keep_last: null}", "log_every_steps=2"]
    straight = run("full_finetune", config, tmp_path / "straight", *settings)
    resumed = resume(cut(straight, 3, tmp_path / "cut"))
    assert comparable(resumed) == comparable(straight)
    steps = [line["step"] for line in resumed.metrics]
    assert steps == list(range(2, 13, 2))


def test_a_changed_rate_is_shown_and_refused_unless_allowed(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight", "checkpoint.save_every_steps=5")
    shutil.rmtree(straight.checkpoints[-1])
    before = {path: path.stat().st_mtime_ns for path in straight.folder.rglob("*") if path.is_file()}
    assert main(["resume", str(straight.folder), "optimizer.lr=1e-3"]) == 2
    message = capsys.readouterr().err
    assert "optimizer.lr: 0.01 → 0.001" in message and "--allow-change optimizer.lr" in message
    assert {path: path.stat().st_mtime_ns for path in straight.folder.rglob("*") if path.is_file()} == before
    assert main(["resume", str(straight.folder), "--allow-change", "optimizer.lr", "optimizer.lr=1e-3"]) == 0
    rates = {line["step"]: line["lr"] for line in Finished(straight.folder).metrics}
    assert rates[10] > 1e-3 > rates[11]


def test_a_step_of_another_number_of_rows_is_refused_by_its_numbers(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight", "checkpoint.save_every_steps=5")
    shutil.rmtree(straight.checkpoints[-1])
    assert main(["resume", str(straight.folder), "batch_size=1"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "a step had 2 rows on 1 process" in message and "would have 1 on 1" in message
    assert main(["resume", str(straight.folder), "batch_size=1", "gradient_accumulation_steps=2", "max_steps=11"]) == 0


def test_changed_rows_are_refused(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight", "checkpoint.save_every_steps=5")
    shutil.rmtree(straight.checkpoints[-1])
    rows = [json.loads(line) for line in (config.parent / "train.jsonl").read_text().splitlines()]
    rows[3]["messages"][1]["content"] = "boom"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["resume", str(straight.folder), f"data.train={other}"]) == 2
    message = capsys.readouterr().err
    assert "data: its content has changed" in message


def test_a_longer_run_says_what_happens_to_the_schedule(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight", "max_steps=6")
    assert main(["resume", str(straight.folder), "max_steps=10"]) == 0
    assert "ends at step 10, it was to end at 6" in capsys.readouterr().err
    assert [line["step"] for line in Finished(straight.folder).metrics] == list(range(1, 11))


def test_the_saved_config_of_a_resumed_run_repeats_the_run(config, tmp_path: Path):
    straight = run("full_finetune", config, tmp_path / "straight", "checkpoint.save_every_steps=5")
    saved = (straight.folder / "config.yaml").read_text()
    shutil.rmtree(straight.checkpoints[-1])
    resumed = resume(straight.folder, "--allow-change", "optimizer")
    assert (resumed.folder / "config.yaml").read_text().startswith(saved)  # a comment says what was allowed
    again = run("full_finetune", resumed.folder / "config.yaml", tmp_path / "again")
    assert_equal_runs(again, resumed)


def test_auto_restarts_a_run_that_died_before_its_first_save(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight")
    died = tmp_path / "died"
    shutil.copytree(straight.folder, died, ignore=shutil.ignore_patterns("model", "step-*"))
    capsys.readouterr()
    restarted = run("full_finetune", config, died, "resume=auto")
    assert "dropped 12 lines" in capsys.readouterr().err
    assert_equal_runs(restarted, straight)
    assert [line["step"] for line in restarted.metrics] == list(range(1, 13))


def test_a_checkpoint_of_another_run_starts_a_run_in_a_folder_of_its_own(config, tmp_path: Path, capsys):
    straight = run("full_finetune", config, tmp_path / "straight", "checkpoint={save_every_steps: 5, keep_last: null}")
    other = run("full_finetune", config, tmp_path / "other", f"resume={straight.checkpoints[0]}")
    assert [line["step"] for line in other.metrics] == list(range(6, 13))
    assert other.losses == straight.losses[5:]
    code = main(
        [
            "run",
            "full_finetune",
            "--config",
            str(config),
            f"output_dir={other.folder}",
            f"resume={straight.checkpoints[0]}",
        ]
    )
    assert code == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_run_in_which_no_gradient_was_finite_fails_and_saves_nothing(config, tmp_path: Path, capsys):
    tensors = read_tensors(config.parent / "m0")
    tensors["model.norm.weight"][0] = float("nan")
    shutil.copytree(config.parent / "m0", tmp_path / "broken")
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / "run"
    words = [f"model.path={tmp_path / 'broken'}", f"output_dir={output}", "max_steps=3", "schedule.warmup_steps=0"]
    assert main(["run", "full_finetune", "--config", str(config), *words]) == 1
    assert "not finite in any of 3 steps" in capsys.readouterr().err
    assert not (output / "model").exists() and not list((output / "checkpoints").iterdir())
