"""Cases A34 to A39: the rate, the order of rows, and going on from the right checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fixtures
from tests.cases.place import Place, assert_equal
from tests.recipes.running import Finished

SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


def rates(run: Finished) -> list[float]:
    return [line["lr"] for line in run.metrics]


def rows_of(run: Finished) -> list[float]:
    """What stands for the rows of a run at rate 0, in order."""
    return [line["loss"] for line in run.metrics]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (4, 1), (4, 3), (4, 4), (1, 0), (1, 1)])
def test_every_warm_up_that_fits_reaches_the_rate(place: Place, name: str, steps: int, warmup: int) -> None:
    """A34."""
    place.write(fixtures.numbered_rows(steps))
    run = place.train("optimizer.lr=0.5", f"schedule.name={name}", f"schedule.warmup_steps={warmup}")
    assert len(rates(run)) == steps
    assert max(rates(run)) == pytest.approx(0.5)
    assert all(0 < rate <= 0.5 for rate in rates(run))
    rising = rates(run)[: max(1, warmup)]
    assert rising == pytest.approx([0.5 * (step + 1) / max(1, warmup) for step in range(len(rising))])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_longer_than_the_run_is_refused_with_both_numbers(place: Place, no_weights: None, name: str) -> None:
    """A34."""
    place.write(fixtures.numbered_rows(4))
    message = place.refuse(f"schedule.name={name}", "schedule.warmup_steps=10").err
    assert "schedule.warmup_steps" in message
    assert "10" in message
    assert "4" in message.split("10", 1)[1]


SCHEDULE = ("optimizer.lr=0.1", "schedule.name=cosine", "schedule.warmup_steps=3", "schedule.min_lr_ratio=0.1")


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_the_rate_goes_on_where_it_was(place: Place, stop: int) -> None:
    """A35."""
    place.write(fixtures.numbered_rows(10))
    straight = place.train(*SCHEDULE)
    place.stop_at(stop, *SCHEDULE)
    resumed = place.resume()
    assert rates(resumed) == rates(straight)
    assert_equal(resumed.weights, straight.weights)


def test_a_schedule_of_torch_goes_on_where_it_was(place: Place) -> None:
    """A35."""
    place.write(fixtures.numbered_rows(10))
    words = ("optimizer.lr=0.1", "schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3, gamma: 0.5}")
    straight = place.train(*words)
    place.stop_at(5, *words)
    assert rates(place.resume()) == rates(straight)
    assert len(set(rates(straight))) == 4


def test_a_longer_run_is_announced_and_keeps_what_is_done(place: Place) -> None:
    """A35."""
    place.write(fixtures.numbered_rows(10))
    done = rates(place.train(*SCHEDULE, "output_dir=out"))
    longer = place.train(*SCHEDULE, "epochs=2")
    resumed = place.resume("out", "epochs=2")
    assert "now ends at step 20, it was to end at 10" in place.said
    assert "learning rate" in place.said
    assert rates(resumed) == [*done, *rates(longer)[10:]]


def test_a_rate_that_was_changed_by_hand_is_refused_unless_allowed(place: Place) -> None:
    """A35."""
    place.write(fixtures.numbered_rows(10))
    place.stop_at(5, *SCHEDULE)
    before = place.listing()
    refused = place.call("resume", "out", "loggers=[]", "optimizer.lr=0.2")
    assert refused.code in (1, 2)
    assert "optimizer.lr: 0.1 → 0.2" in refused.err
    assert place.listing() == before
    resumed = place.resume("out", "optimizer.lr=0.2", "--allow-change", "optimizer.lr")
    assert rates(resumed)[5:] == pytest.approx([2 * rate for rate in rates(place.train(*SCHEDULE))[5:]])


ROWS = fixtures.numbered_rows(20)
SHUFFLED = ("data.shuffle=true", "epochs=2", "checkpoint.keep_last=null")


@pytest.mark.parametrize("stop", [7, 20, 25])
def test_a_run_goes_on_with_the_rows_that_it_has_not_seen(place: Place, stop: int) -> None:
    """A36."""
    place.write(ROWS)
    straight = place.train("optimizer.lr=0", *SHUFFLED)
    place.stop_at(stop, "optimizer.lr=0", *SHUFFLED)
    assert rows_of(place.resume()) == rows_of(straight)
    first, second = rows_of(straight)[:20], rows_of(straight)[20:]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(place.fingerprint(ROWS))
    assert len(set(first)) == 20


@pytest.mark.parametrize("stop", [7, 25])
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_a_run_that_goes_on_ends_bit_for_bit_where_the_straight_one_does(place: Place, recipe: str, stop: int) -> None:
    """A36, A37: in the middle of an epoch, optimizer state and dropout included."""
    place.write(ROWS)
    words = (*SHUFFLED, "optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-2", "max_grad_norm=1")
    words = (*words, *(("lora.dropout=0.3",) if recipe == "lora_finetune" else ()))
    straight = place.train(*words, recipe=recipe)
    place.stop_at(stop, *words, recipe=recipe)
    resumed = place.resume()
    assert resumed.losses == straight.losses
    assert_equal(resumed.weights, straight.weights)
    assert_equal(resumed.optimizer_state, straight.optimizer_state)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def flip(folder: Path) -> None:
    file = folder / "optune/optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights cut in half": (cut_weights, "model.safetensors"),
    "no optimizer": (lambda folder: (folder / "optune/optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "no progress": (lambda folder: (folder / "optune/progress.json").unlink(), "progress.json"),
    "no manifest": (lambda folder: (folder / "optune/manifest.json").unlink(), "manifest.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "empty files": (empty_all, "manifest.json"),
    "one bit": (flip, "optimizer.safetensors"),
    "a copy under another name": (lambda folder: None, "step 4"),
}


EIGHT = ("optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-2", "checkpoint.save_every_steps=3")


@pytest.fixture
def straight(place: Place) -> Finished:
    """A run of 8 steps."""
    place.write(fixtures.numbered_rows(8))
    return place.train(*EIGHT)


@pytest.fixture
def half_done(place: Place, straight: Finished) -> Place:
    """The same run in `out`, ended after step 4; step 3 is there too."""
    place.stop_at(4, *EIGHT)
    return place


@pytest.mark.parametrize("name", DAMAGE)
def test_a_newer_checkpoint_that_is_not_whole_is_skipped_aloud(half_done: Place, straight: Finished, name: str) -> None:
    """A38."""
    damage, file = DAMAGE[name]
    checkpoints = half_done.folder / "out/checkpoints"
    shutil.copytree(checkpoints / "step-000004", checkpoints / "step-000006")
    damage(checkpoints / "step-000006")
    resumed = half_done.resume()
    assert "step-000006" in half_done.said
    assert file in half_done.said
    assert "after step 4" in half_done.said
    assert [line["step"] for line in resumed.metrics] == list(range(1, 9))
    assert_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize("name", [name for name in DAMAGE if not name.startswith("a copy")])
def test_a_damaged_newest_checkpoint_is_left_for_the_one_before(
    half_done: Place, straight: Finished, name: str
) -> None:
    """A38."""
    damage, file = DAMAGE[name]
    damage(half_done.folder / "out/checkpoints/step-000004")
    resumed = half_done.resume()
    assert file in half_done.said
    assert "after step 3" in half_done.said
    assert [line["step"] for line in resumed.metrics] == list(range(1, 9))
    assert_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize("name", [name for name in DAMAGE if not name.startswith("a copy")])
def test_without_a_whole_checkpoint_no_run_starts_afresh_in_silence(half_done: Place, name: str) -> None:
    """A38."""
    damage, file = DAMAGE[name]
    shutil.rmtree(half_done.folder / "out/checkpoints/step-000003")
    damage(half_done.folder / "out/checkpoints/step-000004")
    before = half_done.listing()
    lines = (half_done.folder / "out/metrics.jsonl").read_bytes()
    for result in (
        half_done.call("resume", "out", "loggers=[]"),
        half_done.run("resume=auto"),
        half_done.run("resume=out/checkpoints/step-000004", "output_dir=new"),
    ):
        assert result.code in (1, 2)
        assert len(result.errors) == 1
        assert file in result.err
        assert half_done.listing() == before
    assert (half_done.folder / "out/metrics.jsonl").read_bytes() == lines


def test_the_newest_checkpoints_stay_and_a_used_folder_is_refused(place: Place) -> None:
    """A39."""
    place.write(fixtures.numbered_rows(12))
    words = ("checkpoint.save_every_steps=1", "output_dir=out")
    run = place.train(*words, "checkpoint.keep_last=2")
    assert [path.name for path in run.checkpoints] == ["step-000011", "step-000012"]
    weights = run.weights
    assert "already holds a run" in place.refuse(*words).err
    assert "optune resume" in place.refuse(*words).err
    assert_equal(Finished(place.folder / "out").weights, weights)
    assert [path.name for path in run.checkpoints] == ["step-000011", "step-000012"]


@pytest.mark.parametrize(("keep", "count"), [("1", 1), ("3", 3), ("null", 12), ("100", 12)])
def test_as_many_checkpoints_stay_as_were_asked_for(place: Place, keep: str, count: int) -> None:
    """A39: across the ninth step, where names sorted as text or numbers could differ."""
    place.write(fixtures.numbered_rows(12))
    run = place.train("checkpoint.save_every_steps=1", f"checkpoint.keep_last={keep}")
    assert [path.name for path in run.checkpoints] == [f"step-{step:06d}" for step in range(13 - count, 13)]


@pytest.mark.parametrize("keep", ["0", "-1"])
def test_keeping_no_checkpoint_is_refused(place: Place, no_weights: None, keep: str) -> None:
    """A39."""
    place.write(fixtures.numbered_rows(4))
    assert "checkpoint.keep_last" in place.refuse(f"checkpoint.keep_last={keep}").err


def test_leftovers_of_another_run_are_never_taken_for_this_one(place: Place) -> None:
    """A39: a folder with checkpoints alone holds a run too."""
    place.write(fixtures.numbered_rows(4))
    run = place.train("output_dir=out")
    for name in ("config.yaml", "metrics.jsonl", "log.txt"):
        (run.folder / name).unlink()
    shutil.rmtree(run.folder / "model")
    assert "already holds a run" in place.refuse("output_dir=out").err
