"""Streamed batches: the rows of the files, each once an epoch, shuffled inside windows, found again from a cursor."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.streams import windows
from optune.data.streams.batches import StreamedBatches
from optune.errors import DataError
from optune.types import Microbatch
from tests import fixtures


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path_factory.mktemp("t0")))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that small files have many."""
    monkeypatch.setattr("optune.data.streams.blocks._BLOCK", 3)
    monkeypatch.setattr("optune.data.streams.blocks._PACKED_BLOCK", 5)


ROWS: list[dict[str, Any]] = [{"text": " ".join(f"w{(7 * i + k) % 65}" for k in range(1 + i % 5))} for i in range(23)]
for index in (0, 4, 11, 12, 13, 22):
    ROWS[index] = {"text": ""}  # skipped
KEPT = [index + 1 for index, row in enumerate(ROWS) if row["text"]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def stream(train: Any, tokenizer: data.Tokenizer, *, window: int | None = None, **options: Any) -> StreamedBatches:
    rows = data.load_rows(train, tokenizer, streaming=True, shuffle_window=window, max_length=12)
    options = {"batch_size": 2, "seed": 3, "max_length": 12} | options
    batches = data.build_batches(rows, **options)
    assert isinstance(batches, StreamedBatches)
    return batches


def lines(microbatches: Sequence[Microbatch]) -> list[int]:
    return [int(row.rpartition(":")[2]) for each in microbatches for row in each.rows]


def epochs(batches: StreamedBatches, count: int = len(KEPT)) -> Iterator[list[list[int]]]:
    """The lines of each step, epoch by epoch; no step may hold rows of two epochs of `count` rows."""
    step = 0
    while True:
        steps: list[list[int]] = []
        while sum(map(len, steps)) < count:
            steps.append(lines(batches.microbatches(step)))
            step += 1
        assert sum(map(len, steps)) == count
        yield steps


def assert_same(ours: Sequence[Microbatch], theirs: Sequence[Microbatch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.rows == other.rows
        for name in ("tokens_BT", "labels_BT", "positions_BT", "documents_BT"):
            mine, its = getattr(one, name), getattr(other, name)
            assert (mine is None) == (its is None)
            assert mine is None or torch.equal(mine, its)


@pytest.mark.parametrize("world_size", [1, 3])
def test_in_file_order_a_stream_has_the_batches_of_the_file_in_memory(
    path: Path, t0: data.Tokenizer, world_size: int
) -> None:
    options: dict[str, Any] = {"batch_size": 2, "gradient_accumulation_steps": 2, "shuffle": False}
    options["world_size"] = world_size
    whole = data.build_batches(data.load_rows(path, t0), **options)
    assert isinstance(whole, data.Batches)
    streamed = stream(path, t0, **options)
    for step in range(3 * whole.steps_per_epoch):
        for rank in range(world_size):
            assert_same(streamed.microbatches(step, rank), whole.microbatches(step, rank))
        if (step + 1) % whole.steps_per_epoch == 0:
            assert streamed.epoch(step + 1) == whole.epoch(step + 1)
    assert streamed.positions_per_step == whole.positions_per_step


@given(
    window=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    packing=st.booleans(),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_every_row_comes_once_an_epoch_and_stays_in_its_window(
    path: Path, t0: data.Tokenizer, window: int, batch_size: int, accumulation: int, packing: bool, seed: int
) -> None:
    batches = stream(
        path, t0, window=window, batch_size=batch_size, gradient_accumulation_steps=accumulation, packing=packing,
        seed=seed,
    )  # fmt: skip
    orders = []
    for steps, _ in zip(epochs(batches), range(3), strict=False):
        order = [line for step in steps for line in step]
        assert sorted(order) == KEPT
        assert [(line - 1) // window for line in order] == sorted((line - 1) // window for line in order)
        if not packing:
            assert {len(step) for step in steps[:-1]} <= {batch_size * accumulation}
        orders.append(order)
    if window > 10:
        assert orders[0] != orders[1]


def test_the_split_into_microbatches_and_processes_changes_no_step(path: Path, t0: data.Tokenizer) -> None:
    def steps(batch_size: int, accumulation: int, world_size: int) -> list[list[int]]:
        options = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "world_size": world_size}
        batches = stream(path, t0, window=7, **options)
        sizes = {len(batches.microbatches(4, rank)) for rank in range(world_size)}
        assert len(sizes) == 1  # every rank has as many, also in the ragged step
        return [
            sorted(line for rank in range(world_size) for line in lines(batches.microbatches(step, rank)))
            for step in range(12)
        ]

    assert steps(4, 1, 1) == steps(2, 2, 1) == steps(1, 2, 2) == steps(1, 1, 4)


def count_calls(thing: Any, name: str) -> list[None]:
    """A list that grows by one with each call of a method."""
    calls: list[None] = []
    method = getattr(thing, name)
    setattr(thing, name, lambda *arguments: (calls.append(None), method(*arguments))[1])
    return calls


SAVED = [{"text": "w1 w2"}, {"text": "w3"}] * 10


def write_kinds(folder: Path) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([row | {"n": i} for i, row in enumerate(SAVED)])
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=6)
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    (folder / "a.csv").write_text("n,text\r\n" + "".join(f'{i},"{row["text"]}"\r\n\r\n' for i, row in enumerate(SAVED)))
    (folder / "a.txt").write_text("\n\n".join(row["text"] for row in SAVED))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in SAVED)))
    fixtures.write_rows(folder / "b.jsonl", SAVED[:3])
    kinds: dict[str, Any] = {name: str(folder / f"a.{name}") for name in ("parquet", "arrow", "csv", "txt", "jsonl.gz")}
    kinds["several, weighted"] = [
        {"path": str(folder / "b.jsonl"), "weight": 2},
        {"path": str(folder / "a.jsonl.gz"), "weight": 0.5},
        {"path": str(folder / "a.parquet"), "split": "[2:15]", "max_rows": 9},
    ]
    return kinds


def test_a_cursor_goes_on_bit_for_bit_in_every_kind_of_file(tmp_path: Path, t0: data.Tokenizer) -> None:
    for name, train in write_kinds(tmp_path).items():
        for options in ({"window": 7}, {"window": 7, "packing": True, "batch_size": 1}, {"shuffle": False}):
            straight = stream(train, t0, **options)
            steps = [straight.microbatches(step) for step in range(30)]
            shares = [straight.epoch(step) for step in range(31)]
            assert shares == sorted(set(shares)), name
            reports = [straight.report(step) for step in range(31)]
            for cut in (1, 6, 29):
                resumed = stream(train, t0, **options)
                again = json.loads(json.dumps(straight.cursor(cut)))
                resumed.seek(cut, again)
                walked = count_calls(resumed, "_walk")
                for step in range(cut, min(cut + 4, 30)):
                    assert_same(resumed.microbatches(step), steps[step])
                    assert resumed.epoch(step + 1) == shares[step + 1]
                    assert resumed.report(step + 1) == reports[step + 1]
                assert len(walked) <= 1 + 5, "steps before the cut were read again"


def test_any_step_can_be_asked_for_first_and_a_cursor_of_other_data_is_not_believed(
    path: Path, t0: data.Tokenizer, tmp_path: Path
) -> None:
    straight = stream(path, t0, window=5)
    steps = [straight.microbatches(step) for step in range(20)]
    assert_same(stream(path, t0, window=5).microbatches(17), steps[17])
    assert_same(straight.microbatches(2), steps[2])
    other = stream(fixtures.write_rows(tmp_path / "other.jsonl", ROWS[::-1]), t0, window=5)
    expected = [other.microbatches(step) for step in range(12)]
    assert other.fingerprint() != straight.fingerprint()
    fresh = stream(tmp_path / "other.jsonl", t0, window=5)
    fresh.seek(11, straight.cursor(11))
    assert_same(fresh.microbatches(11), expected[11])


def test_fingerprints_follow_the_files_and_what_decides_the_order(
    path: Path, t0: data.Tokenizer, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(path.read_bytes())
    plain = stream(path, t0).fingerprint()
    assert stream(copy, t0).fingerprint() == plain
    assert stream(path, t0, batch_size=1, gradient_accumulation_steps=2).fingerprint() == plain
    changed = [
        stream(path, t0, seed=4), stream(path, t0, window=9), stream(path, t0, batch_size=3),
        stream(path, t0, shuffle=False), stream(path, t0, packing=True),
        stream({"path": str(path), "max_rows": 9}, t0), stream({"path": str(path), "weight": 2}, t0),
    ]  # fmt: skip
    copy.write_bytes(path.read_bytes().replace(b"w7 ", b"w8 ", 1))
    changed.append(stream(copy, t0))
    assert len({plain, *(batches.fingerprint() for batches in changed)}) == 1 + len(changed)


def test_a_broken_row_stops_the_step_that_meets_it_and_is_named(t0: data.Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"text": f"w{i % 60}"}) for i in range(12)]
    path.write_text("\n".join([*good, "", "{", *good]), encoding="utf-8")
    batches = stream(path, t0, shuffle=False)
    assert [lines(batches.microbatches(step)) for step in range(6)] == [[i, i + 1] for i in range(1, 13, 2)]
    for _ in range(2):
        with pytest.raises(DataError, match="not JSON") as caught:
            batches.microbatches(6)
        assert caught.value.where == f"{path}:14"
    assert lines(batches.microbatches(5)) == [11, 12]


def test_files_that_are_emptied_meanwhile_end_the_run(t0: data.Tokenizer, tmp_path: Path) -> None:
    """Otherwise the next epoch would be looked for without end, by a thread that outlives the run."""
    path = fixtures.write_rows(tmp_path / "rows.jsonl", [{"text": f"w{i}"} for i in range(4)])
    batches = stream(path, t0, shuffle=False)
    assert lines(batches.microbatches(0)) == [1, 2]
    path.write_text("")
    with pytest.raises(DataError, match=rf"{path}: a whole epoch had no row .* the files have changed meanwhile"):
        for step in range(1, 5):
            batches.microbatches(step)
    # A fraction may leave out all rows of an epoch, and of some more.
    one = fixtures.write_rows(tmp_path / "one.jsonl", [{"text": "w1"}])
    rare = stream({"path": str(one), "weight": 0.1}, t0, batch_size=1)
    assert [lines(rare.microbatches(step)) for step in range(5)] == [[1]] * 5


def test_what_is_skipped_is_counted_as_it_is_met(path: Path, t0: data.Tokenizer) -> None:
    batches = stream(path, t0, shuffle=False)
    steps = next(epochs(batches))
    report = batches.report(len(steps))
    assert (report.rows, report.kept, report.skipped["an empty text"].count) == (23, 17, 6)
    assert report.skipped["an empty text"].where == [f"{path}:1", f"{path}:5", f"{path}:12"]
    whole = data.load_rows(path, t0)
    assert isinstance(whole, data.Rows)
    expected = whole.report
    assert (report.tokens, report.targets, report.longest) == (expected.tokens, expected.targets, expected.longest)
    end = batches.describe_end(len(steps))
    assert "17 of 23 rows" in end["rows read"]
    assert end["skipped"].startswith("6 an empty text")


def test_entries_are_read_side_by_side_and_weights_repeat_rows_in_place(t0: data.Tokenizer, tmp_path: Path) -> None:
    first = fixtures.write_rows(tmp_path / "a.jsonl", [{"text": "w1"}] * 40)
    second = fixtures.write_rows(tmp_path / "b.jsonl", [{"text": "w2"}] * 10)

    def one_epoch(batches: StreamedBatches) -> list[str]:
        step, rows = 0, []
        while batches.epoch(step) < 1:  # no row is skipped, so the epoch ends on the number
            rows += [row for each in batches.microbatches(step) for row in each.rows]
            step += 1
        assert batches.epoch(step) == 1
        return rows

    rows = one_epoch(stream([str(first), str(second)], t0, shuffle=False))
    places = [index for index, row in enumerate(rows) if row.startswith(str(second))]
    assert len(rows) == 50
    assert all(abs(place - 5 * number) <= 5 for number, place in enumerate(places))
    train = [{"path": str(first), "weight": 2.0}, {"path": str(second), "weight": 0.5}]
    batches = stream(train, t0, window=8)
    times = Counter(one_epoch(batches))
    assert all(times[f"{first}:{line}"] == 2 for line in range(1, 41))
    drawn = {row for row in times if row.startswith(str(second))}
    assert 0 < len(drawn) < 10
    assert {times[row] for row in drawn} == {1}
    report = batches.report(30)
    assert report.kept == report.rows > 0  # of the file, however often they come


def test_windows_are_bounded_in_bytes_too(path: Path, t0: data.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_BYTES", 60)
    batches = stream(path, t0)
    assert sorted(line for step in next(epochs(batches)) for line in step) == KEPT
    assert len(batches._blocks.window(batches._position(1)).items) < 6


def test_what_cannot_be_streamed_is_refused(path: Path, t0: data.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "w1"}]')
    with pytest.raises(DataError, match=r"a\.json: a \.json list can only be read whole"):
        stream(tmp_path / "a.json", t0)
    with pytest.raises(DataError, match="a streamed file is not read ahead"):
        stream({"path": str(path), "split": "[:50%]"}, t0)
    with pytest.raises(DataError, match=r"data\.shuffle_window: is for shuffling"):
        stream(path, t0, window=5, shuffle=False)
    with pytest.raises(DataError, match=r"data\.shuffle_window: is only for data\.streaming"):
        data.load_rows(path, t0, shuffle_window=5)
    with pytest.raises(DataError, match="packing needs a length"):
        stream(path, t0, packing=True, max_length=None)
    empty = fixtures.write_rows(tmp_path / "empty.jsonl", [{"text": ""}] * 4)
    with pytest.raises(DataError, match=r"empty\.jsonl: none of the 4 rows can be trained: 4 an empty text"):
        stream(empty, t0).microbatches(0)
    with pytest.raises(DataError, match=r"none\.jsonl: no rows"):
        stream(fixtures.write_rows(tmp_path / "none.jsonl", []), t0).microbatches(0)
