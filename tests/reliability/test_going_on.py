"""What a run may go on from, where it goes on, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optune import checkpoint, files
from tests import fixtures
from tests.recipes.running import RECIPES, assert_equal_runs
from tests.reliability.interrupting import EVERY_STEP, Place, all_metrics, assert_same_end, at_call, cut


class KilledError(Exception):
    """Stands for a SIGKILL: what is under way stays as it is."""


def die() -> None:
    raise KilledError


def contents(folder: Path) -> dict[str, str]:
    """The sum of every file but those that say when somebody was here."""
    return {
        str(path.relative_to(folder)): files.hash_file(path)
        for path in files.walk(folder)
        if path.name not in ("log.txt", ".lock")
    }


def test_a_finished_run_says_so_and_nothing_is_changed(place: Place) -> None:
    straight = place.straight()
    before = contents(straight.folder)
    result = place.resume(straight.folder.name)
    assert result.code == 0
    assert "nothing to train: step 12 of 12 is done" in result.err
    assert "epochs=… or max_steps=…" in result.err
    assert contents(straight.folder) == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_result_that_is_missing_is_made(place: Place, tmp_path: Path, recipe: str) -> None:
    straight = place.straight(EVERY_STEP, recipe=recipe)
    died = cut(straight, 12, tmp_path / "died")
    assert not (died / "model").exists()
    assert place.call("resume", str(died)).code == 0
    assert contents(died / "model") == contents(straight.folder / "model")


def test_a_result_of_earlier_weights_is_replaced_and_an_edited_one_stays(place: Place, tmp_path: Path) -> None:
    short = place.straight(EVERY_STEP, "max_steps=6")
    straight = place.straight(EVERY_STEP)
    died = cut(straight, 12, tmp_path / "died")
    shutil.copytree(short.folder / "model", died / "model")
    assert place.call("resume", str(died)).code == 0
    assert contents(died / "model") == contents(straight.folder / "model")
    (died / "model" / "generation_config.json").write_text("{}")
    assert place.call("resume", str(died)).code == 0
    assert (died / "model" / "generation_config.json").read_text() == "{}"


@pytest.mark.parametrize("longer", ["epochs=3", "max_steps=18"])
def test_a_longer_run_is_announced_and_its_lines_rise(place: Place, tmp_path: Path, longer: str) -> None:
    folder = cut(place.straight(EVERY_STEP), 12, tmp_path / "longer")
    first = (folder / "metrics.jsonl").read_text()
    overrides = [longer] if longer.startswith("epochs") else [longer, "epochs=9"]
    result = place.call("resume", str(folder), *overrides)
    assert result.code == 0
    assert "now ends at step 18, it was to end at 12" in result.err
    assert "follows the schedule of the new length" in result.err
    text = (folder / "metrics.jsonl").read_text()
    assert text.startswith(first)
    steps = [line["step"] for line in map(json.loads, text.splitlines()) if "loss" in line]
    assert steps == list(range(1, 19))


def test_an_end_that_the_run_has_passed_is_refused(place: Place, tmp_path: Path) -> None:
    folder = cut(place.straight(EVERY_STEP), 8, tmp_path / "passed")
    before = contents(folder)
    result = place.call("resume", str(folder), "max_steps=6")
    assert result.code == 2
    assert result.errors == ["error: max_steps: the run would end at step 6, and step-000008 is beyond it"]
    assert contents(folder) == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_from_another_ones_checkpoint_is_its_remainder_in_a_folder_of_its_own(
    place: Place, tmp_path: Path, recipe: str
) -> None:
    straight = place.straight(EVERY_STEP, recipe=recipe)
    before = contents(straight.folder)
    origin = straight.folder / "checkpoints" / "step-000005"
    result = place.call(
        "run", recipe, "--config", str(place.config), f"output_dir={tmp_path / 'other'}", f"resume={origin}"
    )
    assert result.code == 0
    assert f"goes on after step 5 from {origin}" in result.err
    other = place.finished(str(tmp_path / "other"))
    assert all_metrics(other) == [line for line in all_metrics(straight) if line["step"] > 5]
    assert other.weights.keys() == straight.weights.keys()
    assert all(torch.equal(tensor, straight.weights[name]) for name, tensor in other.weights.items())
    assert contents(straight.folder) == before


def test_a_run_from_another_ones_checkpoint_that_dies_early_goes_back_to_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its own is saved yet: from the base, it would be another run."""
    straight = place.straight(EVERY_STEP)
    origin = straight.folder / "checkpoints" / "step-000005"
    output = tmp_path / "other"
    words = ("run", "full_finetune", "--config", str(place.config), f"output_dir={output}", f"resume={origin}")
    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 3, die)
        assert place.call(*words).code == 1
    for _ in range(2):  # the second time, what the first one wrote is what is read
        with monkeypatch.context() as patch:
            at_call(patch, "optune.train.train_step", 2, die)
            died = place.call("resume", str(output))
        assert died.code == 1
        assert f"goes on after step 5 from {origin}" in died.err
    assert place.call("resume", str(output)).code == 0
    other = place.finished(str(output))
    assert all_metrics(other) == [line for line in all_metrics(straight) if line["step"] > 5]
    assert all(torch.equal(tensor, straight.weights[name]) for name, tensor in other.weights.items())
    assert place.call(*words).code == 2  # by now it holds a run


def test_a_used_folder_is_not_taken_for_another_ones_checkpoint(place: Place, tmp_path: Path) -> None:
    straight = place.straight(EVERY_STEP)
    other = cut(straight, 8, tmp_path / "used")
    before = contents(other)
    origin = straight.folder / "checkpoints" / "step-000005"
    result = place.call(
        "run", "full_finetune", "--config", str(place.config), f"output_dir={other}", f"resume={origin}"
    )
    assert result.code == 2
    assert "already holds a run" in result.errors[0]
    assert contents(other) == before


def test_auto_starts_in_a_fresh_folder_and_goes_on_in_a_used_one(place: Place, tmp_path: Path) -> None:
    words = ("run", "full_finetune", "--config", str(place.config), f"output_dir={tmp_path / 'auto'}", "resume=auto")
    first = place.call(*words)
    assert first.code == 0
    assert "holds no checkpoint yet: starting from the beginning" in first.err
    assert_same_end(place.finished(str(tmp_path / "auto")), place.straight())
    again = place.call(*words)
    assert again.code == 0
    assert "nothing to train" in again.err


def test_auto_takes_no_folder_that_is_not_a_runs(place: Place, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    result = place.call("run", "full_finetune", "--config", str(place.config), f"output_dir={tmp_path}", "resume=auto")
    assert result.code == 2
    assert "holds no checkpoint to go on from, only config.yaml" in result.errors[0]
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_result(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(place.straight().folder, folder)
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    result = place.call("resume", str(folder))
    assert result.code == 2
    assert "holds no checkpoint to go on from" in result.errors[0]
    assert contents(folder) == before


def test_what_a_run_logged_before_its_first_save_stays_in_the_log(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "early"
    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 3, die)
        words = ("run", "full_finetune", "--config", str(place.config), f"output_dir={output}")
        assert place.call(*words).code == 1
    resumed = place.call("resume", str(output))
    assert resumed.code == 0
    assert "metrics.jsonl: dropped 2 lines after step 0: those steps are taken again" in resumed.err
    assert (output / "log.txt").read_text().count("step 1/12 loss") == 2
    assert_same_end(place.finished(str(output)), place.straight())


def test_files_may_move_but_not_change(place: Place, tmp_path: Path) -> None:
    folder = cut(place.straight(EVERY_STEP), 9, tmp_path / "moved")
    for name in ("m0", "train.jsonl", "validation.jsonl"):
        source = place.folder / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / name)
    moved = [f"model.path={tmp_path / 'm0'}", f"data.train={tmp_path / 'train.jsonl'}"]
    moved.append(f"data.validation={tmp_path / 'validation.jsonl'}")
    tensors = load_file(tmp_path / "m0" / "model.safetensors")
    fixtures.write_model(tmp_path / "m0", seed=1)
    rows = fixtures.numbered_rows(12)
    fixtures.write_rows(tmp_path / "train.jsonl", [*rows[1:], rows[0]])
    before = contents(folder)
    refused = place.call("resume", str(folder), *moved)
    assert refused.code == 2
    assert "data: its content has changed" in refused.err and "model: its content has changed" in refused.err
    assert contents(folder) == before
    save_file(tensors, tmp_path / "m0" / "model.safetensors", metadata={"format": "pt"})
    fixtures.write_rows(tmp_path / "train.jsonl", rows)
    resumed = place.call("resume", str(folder), *moved)
    assert resumed.code == 0
    assert "elsewhere, with the same content" in resumed.err
    assert_equal_runs(place.finished(str(folder)), place.straight())


def test_changed_rows_are_taken_where_they_are_allowed_by_name(place: Place, tmp_path: Path) -> None:
    folder = cut(place.straight(EVERY_STEP), 9, tmp_path / "rows")
    fixtures.write_rows(tmp_path / "other.jsonl", [*fixtures.numbered_rows(11), fixtures.chat("boom", "yes")])
    change = f"data.train={tmp_path / 'other.jsonl'}"
    assert place.call("resume", str(folder), change).code == 2
    allowed = place.call("resume", str(folder), change, "--allow-change", "data")
    assert allowed.code == 0
    assert "warning: goes on with another data: its content has changed" in allowed.err


def test_an_allowed_change_stays_allowed_until_it_is_saved_and_no_longer(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch queue starts the same command again: it must not be stuck because the first start died too early."""
    folder = cut(place.straight(EVERY_STEP), 6, tmp_path / "allowed")
    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 1, die)
        words = ("resume", str(folder), "optimizer.lr=2e-3", "--allow-change", "optimizer.lr")
        assert place.call(*words).code == 1
    other = place.call("resume", str(folder), "optimizer.lr=3e-3")
    assert other.code == 2
    assert "optimizer.lr: 0.01 → 0.003" in other.err
    again = place.call("resume", str(folder))
    assert again.code == 0
    assert "warning: goes on with another optimizer.lr: 0.01 → 0.002" in again.err
    rates = {line["step"]: line["lr"] for line in place.finished(str(folder)).metrics}
    assert rates[7] == pytest.approx(rates[6] / 5, rel=0.2)


@pytest.mark.parametrize(
    ("stepper", "settings"),
    [
        ("after_backward", []),
        ("hold", ["optimizer_step=in_backward", "gradient_stash=hold"]),
        ("two_pass", ["optimizer_step=in_backward", "gradient_stash=two_pass"]),
    ],
)
def test_steps_skipped_in_a_row_are_counted_across_a_resume(
    place: Place, tmp_path: Path, stepper: str, settings: list[str]
) -> None:
    """`boom` has NaN for its embedding; the rows that hold it come last, so that steps 5 to 7 are skipped."""
    config = fixtures.model_config()
    tensors = fixtures.model_tensors(config)
    tensors["model.embed_tokens.weight"][fixtures.VOCABULARY.index("boom")] = float("nan")
    model = fixtures.write_model(tmp_path / "nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    rows = [*fixtures.numbered_rows(8), *(fixtures.chat("boom", f"w{index}") for index in range(8))]
    fixtures.write_rows(tmp_path / "boom.jsonl", rows)
    overrides = [
        f"model.path={model}", f"data.train={tmp_path / 'boom.jsonl'}", "data.validation=null", "data.shuffle=false",
        "max_skipped_steps=3", EVERY_STEP, *settings,
    ]  # fmt: skip
    words = ("run", "full_finetune", "--config", str(place.config), *overrides)
    straight = place.call(*words, f"output_dir={tmp_path / 'straight'}")
    assert straight.code == 1
    assert "in 3 steps in a row" in straight.errors[0]
    steps = checkpoint.list_checkpoints(tmp_path / "straight")
    assert [folder.name for folder in steps][-1] == "step-000006"
    for step in (5, 6):
        folder = cut(place.finished(str(tmp_path / "straight")), step, tmp_path / f"cut-{step}")
        resumed = place.call("resume", str(folder))
        assert resumed.code == 1
        assert resumed.errors == straight.errors
        assert all_metrics(place.finished(str(folder))) == all_metrics(place.finished(str(tmp_path / "straight")))


def test_counters_come_back(place: Place, tmp_path: Path) -> None:
    straight = place.straight(EVERY_STEP)
    saved = checkpoint.read_progress(straight.folder / "checkpoints" / "step-000007")
    assert saved["rows_seen"] == 14
    assert saved["epoch"] == pytest.approx(7 / 6)
    assert saved["targets_seen"] == sum(line["targets"] for line in straight.metrics[:7])
    folder = cut(straight, 7, tmp_path / "counted")
    assert place.call("resume", str(folder)).code == 0
    assert_same_end(place.finished(str(folder)), straight)


def test_only_a_validation_of_this_very_step_stands_in_its_checkpoint(place: Place) -> None:
    straight = place.straight(EVERY_STEP)
    carried = {
        folder.name: checkpoint.read_progress(folder).get("validation_loss") is not None
        for folder in checkpoint.list_checkpoints(straight.folder)
    }
    assert [name for name, has_one in carried.items() if has_one] == ["step-000004", "step-000008", "step-000012"]
    late = place.straight("checkpoint={save_every_steps: 5, keep_last: null}")
    saved = [checkpoint.read_progress(folder) for folder in checkpoint.list_checkpoints(late.folder)]
    assert ["validation_loss" in progress for progress in saved] == [False, False, True]


@pytest.mark.parametrize(
    ("resume", "problem"),
    [
        ("{folder}/nowhere", "is not a folder"),
        ("{folder}/m0", "is no checkpoint that a run can go on from"),
    ],
)
def test_what_is_no_checkpoint_is_refused(place: Place, resume: str, problem: str) -> None:
    result = place.run("refused", f"resume={resume.format(folder=place.folder)}")
    assert result.code == 2
    assert problem in result.errors[0]
    assert not (place.folder / "refused").exists()


def test_a_checkpoint_of_the_other_recipe_is_refused(place: Place) -> None:
    full, lora = place.straight(EVERY_STEP), place.straight(EVERY_STEP, recipe="lora_finetune")
    for recipe, other in (("lora_finetune", full), ("full_finetune", lora)):
        result = place.run("refused", f"resume={other.folder / 'checkpoints' / 'step-000006'}", recipe=recipe)
        assert result.code == 2
        assert "adapter" in result.errors[0]
        assert not (place.folder / "refused").exists()


def test_how_long_each_save_held_training_up_stands_in_the_log_and_the_sum_at_the_end(
    place: Place, tmp_path: Path
) -> None:
    words = ("run", "full_finetune", "--config", str(place.config), f"output_dir={tmp_path / 'run'}")
    shown = place.call(*words, EVERY_STEP)
    stalls = re.findall(
        r"saving after step (\d+) held training up for \d\.\d{3} s.*, \d+ KiB copied",
        (tmp_path / "run" / "log.txt").read_text(),
    )
    assert stalls == [str(step) for step in range(1, 12)]  # nothing goes on after the last one
    assert "held training up" not in shown.err
    assert re.search(r"saving +12 checkpoints, written in up to \d\.\d\d s; training stood still", shown.err)
