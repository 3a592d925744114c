"""Cases A24 and A26 to A29: what a step is divided by, what is logged, and how many steps there are."""

from __future__ import annotations

from typing import Any

import pytest

from tests import fixtures
from tests.cases.place import FINGERPRINT, Place, assert_equal, largest, moved, targets, turns
from tests.recipes.running import Finished


def tokens_row(*trained: int) -> dict[str, Any]:
    """A row of ids of which the last ones are trained."""
    prompt = [0, 20, 21, 22]
    return {"tokens": [*prompt, *trained], "labels": [-100] * len(prompt) + list(trained)}


def answers(*lengths: int) -> list[dict[str, Any]]:
    """Rows whose answers have so many trained tokens, all different."""
    return [tokens_row(*range(25 + 5 * index, 25 + 5 * index + length)) for index, length in enumerate(lengths)]


def mean(losses: list[float], counts: list[float]) -> float:
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_each_trained_token_weighs_the_same_however_a_step_is_split(place: Place, recipe: str) -> None:
    """A24."""
    place.write(answers(1, 9))
    short, long = place.train(*FINGERPRINT, recipe=recipe).losses
    together = place.train("optimizer.lr=1", "batch_size=2", recipe=recipe)
    apart = place.train("optimizer.lr=1", "gradient_accumulation_steps=2", recipe=recipe)
    assert targets(together) == targets(apart) == [10]
    assert together.losses == pytest.approx([(short + 9 * long) / 10], rel=1e-6)
    assert apart.losses == pytest.approx(together.losses, rel=1e-6)
    assert_equal(apart.weights, together.weights, 1e-5)
    assert short != pytest.approx(long, rel=1e-3)


def test_the_logged_loss_is_the_mean_over_the_step_however_it_is_split(place: Place) -> None:
    """A26."""
    place.write(answers(1, 9, 2, 7, 3, 3, 8, 1))
    alone = place.train(*FINGERPRINT)
    counts = targets(alone)
    assert len(set(alone.losses)) == 8
    wanted = [mean(alone.losses[:4], counts[:4]), mean(alone.losses[4:], counts[4:])]
    for split in (
        ("batch_size=4",),
        ("gradient_accumulation_steps=4",),
        ("batch_size=2", "gradient_accumulation_steps=2"),
    ):
        for mode in ((), ("optimizer_step=in_backward",), ("accumulation=breadth_first",)):
            run = place.train("optimizer.lr=0", *split, *mode)
            assert run.losses == pytest.approx(wanted, rel=1e-6)
            assert [line["step"] for line in run.metrics] == [1, 2]


def test_a_line_for_two_steps_is_the_mean_over_both(place: Place) -> None:
    """A26."""
    place.write(answers(1, 9, 2, 7, 3))
    every = place.train("optimizer.lr=0")
    second = place.train("optimizer.lr=0", "log_every_steps=2")
    counts = targets(every)
    assert [line["step"] for line in second.metrics] == [2, 4, 5]
    assert targets(second) == [10, 9, 3]
    wanted = [mean(every.losses[i : i + 2], counts[i : i + 2]) for i in (0, 2, 4)]
    assert second.losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("log_every", [1, 2, 3])
def test_lines_after_a_resume_are_those_of_the_straight_run(place: Place, log_every: int) -> None:
    """A26: stopped after a line."""
    place.write(answers(1, 9, 2, 7, 3, 3, 8, 1))
    words = (f"log_every_steps={log_every}", "optimizer.lr=0.1")
    straight = place.train(*words)
    place.stop_at(log_every, *words)
    resumed = place.resume()
    assert comparable(resumed) == comparable(straight)
    assert [line["step"] for line in resumed.metrics] == sorted({*range(log_every, 9, log_every), 8})


@pytest.mark.parametrize("log_every", [1, 2, 3, 5])
def test_a_line_that_was_half_done_at_a_checkpoint_is_the_straight_runs(place: Place, log_every: int) -> None:
    """A26: a new run goes on from the middle of the steps that one line stands for."""
    place.write(answers(1, 9, 2, 7, 3, 3, 8, 1))
    words = (f"log_every_steps={log_every}", "optimizer.lr=0.1", "checkpoint.save_every_steps=1")
    straight = place.train(*words, "checkpoint.keep_last=null")
    resumed = place.train(*words, f"resume={straight.folder}/checkpoints/step-000004")
    assert comparable(resumed) == [line for line in comparable(straight) if line["step"] > 4]
    assert_equal(resumed.weights, straight.weights)


def comparable(run: Finished) -> list[dict[str, Any]]:
    """The lines without what a clock or the machine decides."""
    machine = ("tokens_per_s", "peak_memory_gib", "step_s")
    return [{key: value for key, value in line.items() if key not in machine} for line in run.metrics]


@pytest.mark.parametrize("mode", [(), ("optimizer_step=in_backward",), ("accumulation=breadth_first",)])
def test_the_rest_of_an_epoch_is_never_carried_into_the_next(place: Place, mode: tuple[str, ...]) -> None:
    """A27."""
    place.write(answers(1, 9, 2, 7, 3, 3, 8))
    words = ("gradient_accumulation_steps=4", "optimizer.lr=0.5", *mode)
    first = place.train(*words)
    assert targets(first) == [19, 14]
    again = place.train(*words, f"model.path={first.folder / 'model'}")
    both = place.train(*words, "epochs=2")
    assert targets(both) == [19, 14, 19, 14]
    assert both.losses == first.losses + again.losses
    assert_equal(both.weights, again.weights)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (3, ("batch_size=2", "gradient_accumulation_steps=8")),
        (1, ("batch_size=4",)),
        (1, ("batch_size=4", "gradient_accumulation_steps=4", "data.packing=true", "data.max_length=64")),
        (2, ("batch_size=1", "gradient_accumulation_steps=3", "optimizer_step=in_backward")),
    ],
)
def test_fewer_rows_than_a_step_takes_are_a_step_all_the_same(place: Place, rows: int, words: tuple[str, ...]) -> None:
    """A28."""
    place.write(fixtures.numbered_rows(rows))
    run = place.train("optimizer.lr=1", *words)
    assert len(run.metrics) == 1
    assert largest(moved(run, place.folder / "m0")) > 0
    alone = place.fingerprint(fixtures.numbered_rows(rows))
    counts = [len(row["messages"][1]["content"].split()) + 1.0 for row in fixtures.numbered_rows(rows)]
    assert run.losses == pytest.approx([mean(alone, counts)], rel=1e-6)


def test_an_epoch_has_every_row_once_and_the_schedule_every_step(place: Place) -> None:
    """A29."""
    rows = fixtures.numbered_rows(9)
    alone = place.fingerprint(rows)
    place.write(rows)
    words = ("batch_size=2", "gradient_accumulation_steps=2", "epochs=3", "data.shuffle=true")
    counted = place.train("optimizer.lr=0", *words)
    assert [line["step"] for line in counted.metrics] == list(range(1, 10))
    assert [line["epoch"] for line in counted.metrics][2::3] == [1, 2, 3]
    per_row = [len(row["messages"][1]["content"].split()) + 1.0 for row in rows]
    whole = sum(loss * count for loss, count in zip(alone, per_row, strict=True))
    for epoch in range(3):
        lines = counted.metrics[3 * epoch : 3 * epoch + 3]
        assert sum(line["targets"] for line in lines) == sum(per_row)
        assert sum(line["loss"] * line["targets"] for line in lines) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_rate_is_at_its_floor_no_earlier_than_at_the_last_step(place: Place, name: str) -> None:
    """A29."""
    place.write(fixtures.numbered_rows(9))
    words = ("batch_size=2", "gradient_accumulation_steps=2", "epochs=3", "optimizer.lr=1e-3")
    for floor in (0.0, 0.25):
        run = place.train(*words, f"schedule.name={name}", f"schedule.min_lr_ratio={floor}")
        rates = [line["lr"] for line in run.metrics]
        assert len(rates) == 9
        assert rates[0] == pytest.approx(1e-3)
        assert rates == sorted(rates, reverse=True)
        assert min(rates[:-1]) > 1e-3 * floor + 1e-9


def test_every_row_of_one_word_trains_that_word(place: Place) -> None:
    """A24: with rate 1 and plain SGD the step is the gradient of the mean over all trained tokens."""
    place.write([turns("ua", "w1", "w2"), turns("ua", "w3", "w4 w5 w6 w7 w8 w9 w10 w11")])
    whole = place.train("optimizer.lr=1", "batch_size=2")
    parts = []
    for row in ([turns("ua", "w1", "w2")], [turns("ua", "w3", "w4 w5 w6 w7 w8 w9 w10 w11")]):
        place.write(row)
        parts.append(moved(place.train("optimizer.lr=1"), place.folder / "m0"))
    wanted = {name: (2 * parts[0][name] + 9 * parts[1][name]) / 11 for name in parts[0]}
    assert_equal(moved(whole, place.folder / "m0"), wanted, 1e-6)
