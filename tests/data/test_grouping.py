"""Grouping by length saves padding, keeps every row, and stays a pure function of (seed, step)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.grouping import WINDOW, group_steps
from optune.data.summary import padding_share
from optune.errors import DataError
from tests import fixtures
from tests.data.test_batching import epoch_rows, make_rows, seen


@given(lengths=st.lists(st.integers(1, 500), max_size=700), per_step=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_steps_hold_neighbours_in_length_of_their_window(lengths: list[int], per_step: int, seed: int) -> None:
    """Against a slow reference: the windows of the random order, each sorted and dealt out to its steps."""
    random = np.random.default_rng(seed)
    order, whole = random.permutation(len(lengths)), len(lengths) // per_step
    step_order = random.permutation(whole)
    grouped = group_steps(np.array(lengths, np.int64), order, per_step, step_order).tolist()
    steps: list[list[int]] = []
    for window in range(0, whole, WINDOW):
        rows = order[window * per_step : min(window + WINDOW, whole) * per_step].tolist()
        rows.sort(key=lambda row: lengths[row])
        steps += [rows[start : start + per_step] for start in range(0, len(rows), per_step)]
    expected = [row for step in step_order for row in steps[step]]
    assert grouped[: whole * per_step] == expected
    assert sorted(grouped[whole * per_step :]) == sorted(order[whole * per_step :].tolist())


def build(lengths: list[int], **options: Any) -> data.Batches:
    batches = data.build_batches(
        make_rows(lengths), **({"batch_size": 4, "group_by_length": True, "seed": 3} | options)
    )
    assert isinstance(batches, data.Batches)
    return batches


def test_padding_becomes_rare_and_every_row_is_trained_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 1003).tolist()
    grouped, plain = build(lengths), build(lengths, group_by_length=False)
    assert padding_share(plain) > 0.3
    assert padding_share(grouped) < 0.05
    assert sorted(epoch_rows(grouped, 1)) == sorted(epoch_rows(plain, 0))
    assert grouped.steps_per_epoch == plain.steps_per_epoch


def test_short_rows_come_neither_first_nor_last_and_no_two_epochs_have_the_same_steps() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 800).tolist()
    batches = build(lengths)
    widths = [batches.microbatches(step)[0].tokens_BT.shape[1] for step in range(batches.steps_per_epoch)]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.2
    steps = [
        {frozenset(seen(batches.microbatches(epoch * batches.steps_per_epoch + step))) for step in range(200)}
        for epoch in range(2)
    ]
    assert len(steps[0] & steps[1]) <= 1


def test_the_split_of_a_step_changes_no_row_and_another_grouping_is_another_run() -> None:
    lengths = np.random.default_rng(0).integers(2, 60, 50).tolist()
    one = build(lengths, batch_size=2, gradient_accumulation_steps=2, world_size=2)
    other = build(lengths, batch_size=8)
    for step in range(one.steps_per_epoch):
        ranks = [seen(one.microbatches(step, rank)) for rank in range(2)]
        assert sorted(ranks[0] + ranks[1]) == sorted(seen(other.microbatches(step)))
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != build(lengths, batch_size=8, group_by_length=False).fingerprint()


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 16}, {"shuffle": False}])
def test_what_excludes_grouping_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"data\.group_by_length: rows cannot be grouped") as caught:
        build([3, 4, 5], **options)
    assert caught.value.hint


def test_rows_that_are_streamed_are_refused(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    path = fixtures.write_rows(tmp_path / "rows.jsonl", fixtures.numbered_rows(3))
    with pytest.raises(DataError, match=r"data\.group_by_length: .*streaming"):
        data.build_batches(data.load_rows(path, tokenizer, streaming=True), batch_size=1, group_by_length=True)
