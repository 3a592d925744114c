"""Weights say how often an epoch has a source's rows; the choice depends on seed and epoch alone."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.mixing import check_mixture, epoch_rows
from optune.errors import DataError
from tests import fixtures
from tests.data.test_batching import make_rows, seen

SOURCES = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0, 1.5, 2.0, 0.3, 2.75])), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path_factory.mktemp("t0")))


@given(sources=SOURCES, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 50))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_an_epoch_has_each_row_as_often_as_its_weight_says(
    sources: list[tuple[int, float]], seed: int, epoch: int
) -> None:
    counts, weights = zip(*sources, strict=True)
    rows = epoch_rows(counts, weights, seed, epoch)
    assert rows.tolist() == epoch_rows(counts, weights, seed, epoch).tolist()
    times, start = Counter(rows.tolist()), 0
    for count, weight in sources:
        often = [times.pop(start + index, 0) for index in range(count)]
        assert sum(often) == round(count * weight)
        assert set(often) <= {int(weight), int(weight) + 1}
        start += count
    assert not times


def test_a_fraction_is_drawn_anew_in_each_epoch_and_evenly() -> None:
    drawn = [epoch_rows([40], [0.5], 7, epoch) for epoch in range(200)]
    assert len({tuple(rows) for rows in drawn}) == 200
    assert {len(rows) for rows in drawn} == {20}
    times = np.bincount(np.concatenate(drawn), minlength=40)
    assert times.min() > 60
    assert times.max() < 140  # 100 expected, standard deviation 7
    assert tuple(epoch_rows([40], [0.5], 8, 0)) != tuple(drawn[0])
    twins = epoch_rows([40, 40], [0.5, 0.5], 7, 0)
    assert set(twins[twins < 40]) != set(twins[twins >= 40] - 40)  # sources do not draw alike


def mixed(lengths: list[int], counts: list[int], weights: list[float]) -> data.Rows:
    rows = make_rows(lengths)
    rows.mixture = check_mixture(counts, weights, [f"source{i}" for i in range(len(counts))])
    return rows


@pytest.mark.parametrize("shuffle", [False, True])
def test_weighted_batches_do_not_depend_on_the_split_into_processes(shuffle: bool) -> None:
    def steps(batch_size: int, accumulation: int, world_size: int) -> list[list[str]]:
        batches = data.build_batches(
            mixed([3, 4, 5, 6, 7], [2, 3], [2.0, 0.4]),
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            world_size=world_size,
            shuffle=shuffle,
            seed=5,
        )
        assert batches.units == 5
        assert batches.steps_per_epoch == 2
        assert batches.epoch(2) == 1.0
        return [
            sorted(seen([each for rank in range(world_size) for each in batches.microbatches(step, rank)]))
            for step in range(8)
        ]

    assert steps(4, 1, 1) == steps(2, 2, 1) == steps(1, 2, 2) == steps(1, 1, 4)


def test_whole_weights_are_packed_and_fractions_are_refused() -> None:
    rows = mixed([3, 4, 5, 6, 7], [2, 3], [3.0, 1.0])
    batches = data.build_batches(rows, batch_size=1, packing=True, max_length=10, seed=1)
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        times = Counter(seen([each for step in steps for each in batches.microbatches(step)]))
        assert times == Counter({rows[i].where: 3 if i < 2 else 1 for i in range(5)})
    assert batches.fill == pytest.approx((3 * (3 + 4) + 5 + 6 + 7) / (10 * batches.units))
    with pytest.raises(DataError, match=r"data\.packing: a source with a weight that is no whole number"):
        data.build_batches(mixed([3, 4], [2], [0.5]), batch_size=1, packing=True, max_length=10)


def test_weights_are_part_of_the_fingerprint_and_a_weight_of_one_is_none() -> None:
    def fingerprint(weights: list[float], seed: int = 0) -> str:
        rows = mixed([3, 4, 5, 6], [2, 2], weights)
        return data.build_batches(rows, batch_size=1, shuffle=False, seed=seed).fingerprint()

    plain = data.build_batches(make_rows([3, 4, 5, 6]), batch_size=1, shuffle=False).fingerprint()
    assert fingerprint([1.0, 1.0]) == plain
    assert len({plain, fingerprint([2.0, 1.0]), fingerprint([1.0, 2.0]), fingerprint([1.0, 0.5])}) == 4
    assert fingerprint([1.0, 0.5]) != fingerprint([1.0, 0.5], seed=1)


def test_weights_follow_the_rows_that_are_kept(tmp_path: Path, t0: data.Tokenizer) -> None:
    first = fixtures.write_rows(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": ""}, {"text": "w2"}])
    second = fixtures.write_rows(tmp_path / "b.jsonl", [{"text": "w3"}] * 4)

    def load(*train: Any) -> data.Rows:
        return data.load_rows(list(train), t0)

    rows = load({"path": str(first), "weight": 2}, {"path": str(second), "weight": 0.5})
    assert rows.mixture is not None
    assert (rows.mixture.counts, rows.mixture.weights, rows.mixture.size) == ((2, 4), (2.0, 0.5), 6)
    assert load(str(first), {"path": str(second), "weight": 1}).mixture is None
    with pytest.raises(DataError, match=r"b\.jsonl: weight 0\.1 of 4 rows takes no row"):
        load({"path": str(second), "weight": 0.1})
    for weight in (-1, 0, math.nan, 1e9):
        with pytest.raises(DataError, match=f"weight: {weight} must be above 0 and at most 10,000".replace("+", ".")):
            load({"path": str(second), "weight": weight})
    with pytest.raises(DataError, match="a validation takes every row once"):
        data.build_validation_batches(rows, 2)


def test_weights_that_would_make_an_epoch_beyond_memory_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match="b: weight 10000 of 20,000 rows makes 200,000,000 rows an epoch") as caught:
        check_mixture([5, 20_000], [2, 10_000], ["a", "b"])
    assert "134,217,728 are the most" in str(caught.value)
    assert check_mixture([200_000_000], [0.9], ["a"]).size == 180_000_000


def test_files_that_are_meant_twice_are_noted(tmp_path: Path, t0: data.Tokenizer) -> None:
    """Whatever their name, unless the parts share no row; between training and validation too."""
    path = fixtures.write_rows(tmp_path / "a.jsonl", [{"text": f"w{i}"} for i in range(4)])
    (tmp_path / "b.jsonl").symlink_to(path)
    what = "files that are read twice (a weight does that in one entry)"
    head, tail = ({"path": str(path), "split": split} for split in ("[:2]", "[2:]"))
    for train, names in (
        ([path, tmp_path / "b.jsonl"], [f"{tmp_path}/b.jsonl"]),
        ([path, f"{tmp_path}/../{tmp_path.name}/a.jsonl", head], [f"{tmp_path}/../{tmp_path.name}/a.jsonl", str(path)]),
        ([head, tail], []),
        ([head, {"path": str(path), "split": "[1:]"}], [str(path)]),
    ):
        rows = data.load_rows(train, t0)
        noted = rows.report.notes.get(what)
        assert (noted.where if noted else []) == names
        streamed = data.build_batches(data.load_rows(train, t0, streaming=True), batch_size=2)
        assert (what in streamed.describe().get("note", "")) == bool(names)
    for train, is_noted in ((path, True), (tmp_path / "b.jsonl", True), (tail, False)):
        for streaming in (False, True):
            validation = data.load_rows(head, t0)
            trained = data.load_rows(train, t0, streaming=streaming)
            batches = data.build_validation_batches(validation, 2, trained=trained)
            assert ("files of data.validation that are trained too" in batches.describe()) == is_noted
