"""Cases A17 to A19: limits of length and padding take no target away and invent none."""

from __future__ import annotations

import pytest

from tests import fixtures
from tests.cases.place import Place, assert_equal, expected, reference_loss, targets, turns

LONG = turns("ua", " ".join(["w1"] * 300), "w2 w3 w4")
GOOD = fixtures.numbered_rows(3)


@pytest.mark.parametrize("truncation", ["drop", "truncate_right"])
def test_rows_with_nothing_left_to_learn_are_a_failure_with_their_count(
    place: Place, no_weights: None, truncation: str
) -> None:
    """A17."""
    place.write([LONG, LONG])
    message = place.refuse("data.max_length=64", f"data.truncation={truncation}").err
    assert "none of the 2 rows" in message
    assert "max_length=64" in message
    assert "train.jsonl:1" in message


@pytest.mark.parametrize("truncation", ["drop", "truncate_right"])
def test_rows_with_nothing_left_to_learn_leave_the_good_ones_as_they_are(place: Place, truncation: str) -> None:
    """A17."""
    place.write(GOOD)
    good = place.train("batch_size=2", "optimizer.lr=1")
    place.write([GOOD[0], LONG, *GOOD[1:]])
    mixed = place.train("batch_size=2", "optimizer.lr=1", "data.max_length=64", f"data.truncation={truncation}")
    assert mixed.losses == good.losses
    assert_equal(mixed.weights, good.weights)
    assert "3 of 4 rows" in place.said
    assert "skipped 1 " in place.said


def test_a_row_that_is_cut_on_the_left_keeps_its_answer_and_its_beginning(place: Place) -> None:
    """A17."""
    place.write([LONG])
    run = place.train("optimizer.lr=0", "data.max_length=64", "data.truncation=truncate_left")
    ids, labels = expected(LONG)
    cut = ([ids[0], *ids[-63:]], [-100, *labels[-63:]])
    assert targets(run) == [4]
    assert run.losses[0] == pytest.approx(reference_loss(place.folder / "m0", [cut]), rel=1e-6)


def test_a_row_that_is_cut_on_the_right_gets_no_end_of_its_own(place: Place) -> None:
    """A17."""
    row = turns("ua", "w1", "w2 w3 w4 w5 w6")
    place.write([row])
    run = place.train("optimizer.lr=0", "data.max_length=12", "data.truncation=truncate_right")
    ids, labels = expected(row)
    assert targets(run) == [sum(label != -100 for label in labels[:12])] == [2]
    assert run.losses[0] == pytest.approx(reference_loss(place.folder / "m0", [(ids[:12], labels[:12])]), rel=1e-6)
    assert "does not learn to stop" in place.said


def test_a_row_that_must_not_be_cut_is_named(place: Place, no_weights: None) -> None:
    """A17."""
    place.write([GOOD[0], LONG])
    message = place.refuse("data.max_length=64", "data.truncation=error").err
    assert "train.jsonl:2: 3" in message
    assert "max_length=64" in message


@pytest.mark.parametrize("truncation", ["drop", "error", "truncate_right", "truncate_left"])
def test_a_limit_that_cuts_nothing_changes_nothing(place: Place, truncation: str) -> None:
    """A18."""
    rows = [turns("ua", "w1 w2", "w3 w4"), turns("ua", "w5 w6", "w7 w8")]
    place.write(rows)
    length = len(expected(rows[0])[0])
    without = place.train("optimizer.lr=1", "data.max_length=null")
    assert targets(without) == [3, 3]
    for limit in (8192, length):
        limited = place.train("optimizer.lr=1", f"data.max_length={limit}", f"data.truncation={truncation}")
        assert targets(limited) == [3, 3]
        assert limited.losses == without.losses
        assert_equal(limited.weights, without.weights)


@pytest.mark.parametrize("pad_token", ["<end>", "<pad>", "<s>"])
def test_padding_is_told_by_its_place_so_the_end_of_an_answer_is_trained(place: Place, pad_token: str) -> None:
    """A19."""
    fixtures.write_tokenizer(place.folder / "m0", pad_token=pad_token)
    rows = [turns("ua", "w1", "w2 w3 w4"), turns("ua", "w5 w6 w7", "w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19")]
    place.write(rows)
    padded = place.train("optimizer.lr=1", "batch_size=2")
    alone = place.train("optimizer.lr=1", "batch_size=1", "gradient_accumulation_steps=2")
    assert targets(padded) == targets(alone) == [4 + 13]
    assert padded.losses == pytest.approx(alone.losses, rel=1e-6)
    assert_equal(padded.weights, alone.weights, 1e-5)
    reference = reference_loss(place.folder / "m0", [expected(row) for row in rows])
    assert padded.losses[0] == pytest.approx(reference, rel=1e-6)
