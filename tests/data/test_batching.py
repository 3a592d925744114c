"""Batches are a pure function of (seed, step): every row once an epoch, whatever the batch, window or process count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.collating import permute
from optune.errors import DataError
from optune.types import IGNORE, Microbatch
from tests import fixtures


def make_rows(lengths: list[int], *, weights: bool = False) -> data.Rows:
    """Rows of random tokens, the second half trained; the first token claims to be, which nothing may believe."""
    random = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        trained = (np.arange(length) >= max(1, length // 2)) | (np.arange(length) == 0)
        values = random.uniform(0.1, 2, length).astype(np.float32) if weights else None
        rows.append(data.Row(random.integers(6, 80, length), trained, f"rows.jsonl:{index + 1}", values))
    return data.Rows(rows)


def seen(microbatches: Sequence[Microbatch]) -> list[str]:
    return [row for microbatch in microbatches for row in microbatch.rows]


def epoch_rows(batches: data.Batches, epoch: int, world_size: int = 1) -> list[str]:
    first = epoch * batches.steps_per_epoch
    return [
        row
        for step in range(first, first + batches.steps_per_epoch)
        for rank in range(world_size)
        for row in seen(batches.microbatches(step, rank))
    ]


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=40),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 5),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    arrangement=st.sampled_from(["rows", "packs", "groups"]),
    pad_to_multiple=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**63),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_every_row_is_seen_exactly_once_in_every_epoch(
    lengths: list[int],
    batch_size: int,
    accumulation: int,
    world_size: int,
    epoch: int,
    shuffle: bool,
    arrangement: str,
    pad_to_multiple: int,
    seed: int,
) -> None:
    rows = make_rows(lengths)
    options: dict[str, Any] = {
        "shuffle": shuffle or arrangement == "groups",
        "packing": arrangement == "packs",
        "group_by_length": arrangement == "groups",
        "pad_to_multiple": pad_to_multiple,
        "max_length": 12,
        "seed": seed,
    }
    batches = data.build_batches(
        rows, batch_size=batch_size, gradient_accumulation_steps=accumulation, world_size=world_size, **options
    )
    assert sorted(epoch_rows(batches, epoch, world_size)) == sorted(row.where for row in rows)
    last = (epoch + 1) * batches.steps_per_epoch - 1
    counts = {len(batches.microbatches(last, rank)) for rank in range(world_size)}
    assert len(counts) == 1, "every rank runs as many microbatches"
    assert 1 <= counts.pop() <= accumulation
    # One process with a batch as large as that of all ranks together sees the same rows in the same microbatches.
    alone = data.build_batches(
        rows, batch_size=batch_size * world_size, gradient_accumulation_steps=accumulation, **options
    )
    for step in (epoch * batches.steps_per_epoch, last):
        parts = [batches.microbatches(step, rank) for rank in range(world_size)]
        together = [seen([part[index] for part in parts]) for index in range(len(parts[0]))]
        assert together == [seen([microbatch]) for microbatch in alone.microbatches(step)]
        targets = sum(microbatch.count_targets() for part in parts for microbatch in part)
        assert targets == sum(microbatch.count_targets() for microbatch in alone.microbatches(step)) > 0
    assert alone.fingerprint() == batches.fingerprint()


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=20),
    packing=st.booleans(),
    multiple=st.sampled_from([1, 8]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_microbatches_hold_the_rows_and_nothing_else(lengths: list[int], packing: bool, multiple: int) -> None:
    rows = make_rows(lengths, weights=True)
    by_name = {row.where: row for row in rows}
    batches = data.build_batches(
        rows, batch_size=3, packing=packing, max_length=12, pad_id=2, seed=5, pad_to_multiple=multiple
    )
    for step in range(batches.steps_per_epoch):
        (batch,) = batches.microbatches(step)
        names = list(batch.rows)
        assert batch.weights_BT is not None
        assert batch.tokens_BT.shape[1] % multiple == 0
        assert batch.num_tokens == sum(len(by_name[name].tokens) for name in names)
        for line in range(len(batch.tokens_BT)):
            place = 0
            while names:
                row = by_name[names[0]]
                span = slice(place, place + len(row.tokens))
                if batch.tokens_BT[line, span].tolist() != row.tokens.tolist() or (place and not packing):
                    break
                names.pop(0)
                assert batch.positions_BT[line, span].tolist() == list(range(len(row.tokens)))
                expected = [
                    int(token) if on else IGNORE for token, on in zip(row.tokens[1:], row.trained[1:], strict=True)
                ]
                assert batch.labels_BT[line, span].tolist() == [*expected, IGNORE], "no label across the seam"
                weights, trained = batch.weights_BT[line, span][:-1].numpy(), row.trained[1:]
                assert row.weights is not None
                assert np.array_equal(weights[trained], row.weights[1:][trained])
                if batch.documents_BT is not None:
                    documents = set(batch.documents_BT[line, span].tolist())
                    assert len(documents) == 1
                    assert documents.isdisjoint(batch.documents_BT[line, span.stop :].tolist())
                place = span.stop
            assert place > 0
            assert (batch.tokens_BT[line, place:] == 2).all()
            assert (batch.labels_BT[line, place:] == IGNORE).all()
        assert not names


def test_a27_the_ragged_last_window_steps_alone() -> None:
    batches = data.build_batches(make_rows([5] * 7), batch_size=1, gradient_accumulation_steps=4, shuffle=False)
    assert batches.steps_per_epoch == 2
    assert [len(batches.microbatches(step)) for step in range(4)] == [4, 3, 4, 3]
    assert seen(batches.microbatches(1)) == ["rows.jsonl:5", "rows.jsonl:6", "rows.jsonl:7"]
    assert seen(batches.microbatches(2)) == seen(batches.microbatches(0))


@pytest.mark.parametrize(("count", "batch_size", "accumulation"), [(3, 2, 8), (1, 4, 1), (1, 1, 16)])
def test_a28_fewer_rows_than_a_batch_still_make_a_step(count: int, batch_size: int, accumulation: int) -> None:
    batches = data.build_batches(
        make_rows([5] * count), batch_size=batch_size, gradient_accumulation_steps=accumulation
    )
    assert batches.steps_per_epoch == 1
    assert len(epoch_rows(batches, 0)) == count
    assert batches.epoch(1) == 1


def test_a29_steps_are_rounded_up_and_epochs_end_on_whole_numbers() -> None:
    batches = data.build_batches(make_rows([5] * 9), batch_size=2, gradient_accumulation_steps=2, seed=3)
    assert batches.steps_per_epoch == 3
    rows = [row for step in range(9) for row in seen(batches.microbatches(step))]
    assert sorted(rows) == sorted([f"rows.jsonl:{number + 1}" for number in range(9)] * 3)
    assert [batches.epoch(step) for step in (0, 1, 3, 6, 9)] == [0, 4 / 9, 1, 2, 3]


def test_a50_ranks_without_rows_get_a_microbatch_that_trains_nothing() -> None:
    batches = data.build_batches(make_rows([5] * 3), batch_size=1, world_size=2, shuffle=False, pad_id=2)
    assert [seen(batches.microbatches(1, rank)) for rank in (0, 1)] == [["rows.jsonl:3"], []]
    (empty,) = batches.microbatches(1, 1)
    assert empty.tokens_BT.tolist() == [[2]]
    assert empty.labels_BT.tolist() == [[IGNORE]]
    assert empty.count_targets() == empty.num_tokens == 0
    ranks = [data.build_validation_batches(make_rows([5]), 4, pad_id=2, world_size=2, rank=rank) for rank in (0, 1)]
    assert [seen(rank) for rank in ranks] == [["rows.jsonl:1"], []]
    assert [len(rank) for rank in ranks] == [1, 1]


def test_epochs_differ_seeds_differ_and_any_step_can_be_asked_for_first() -> None:
    rows = make_rows([5] * 20)
    straight = data.build_batches(rows, batch_size=1, seed=7)
    orders = [seen(straight.microbatches(step)) for step in range(60)]
    assert orders[:20] != orders[20:40] != orders[40:]
    backwards = data.build_batches(rows, batch_size=1, seed=7)
    assert [seen(backwards.microbatches(step)) for step in reversed(range(60))] == orders[::-1]
    other = data.build_batches(rows, batch_size=1, seed=8)
    assert [seen(other.microbatches(step)) for step in range(20)] != orders[:20]
    unshuffled = data.build_batches(rows, batch_size=1, shuffle=False)
    assert epoch_rows(unshuffled, 0) == epoch_rows(unshuffled, 3) == [row.where for row in rows]


def test_the_order_is_that_of_every_machine_and_version() -> None:
    """Numbers from an independent Philox 4x64-10 (Salmon et al., 2011); a change here would break every resumed run."""
    assert permute(10, seed=0, epoch=0).tolist() == _permute_slowly(10, 0, 0)
    assert permute(257, seed=123, epoch=45, stream=1).tolist() == _permute_slowly(257, 123, 45, 1)
    assert permute(4, seed=-1, epoch=0).tolist() == _permute_slowly(4, 2**64 - 1, 0)


def _permute_slowly(count: int, seed: int, epoch: int, stream: int = 0) -> list[int]:
    mask, numbers = 2**64 - 1, []
    for block in range(1, math.ceil(count / 4) + 1):
        counter, keys = [block, 0, 0, stream], [seed, epoch]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [
                (second >> 64) ^ counter[1] ^ keys[0],
                second & mask,
                (first >> 64) ^ counter[3] ^ keys[1],
                first & mask,
            ]
            keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
        numbers += counter
    return sorted(range(count), key=numbers.__getitem__)


def test_a19_padding_equal_to_the_end_token_hides_no_end(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0", pad_token="<end>"))
    chats = [fixtures.chat("w1", "w2 w3"), fixtures.chat("w4", " ".join(["w5"] * 11))]
    rows = data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", chats), tokenizer)
    assert tokenizer.pad_id == tokenizer.eos_id == 4
    (padded,) = data.build_batches(rows, batch_size=2, shuffle=False, pad_id=tokenizer.pad_id).microbatches(0)
    single = data.build_batches(rows, batch_size=1, gradient_accumulation_steps=2, shuffle=False).microbatches(0)
    assert padded.count_targets() == sum(microbatch.count_targets() for microbatch in single) == 3 + 12
    assert [(line == 4).sum().item() for line in padded.labels_BT] == [1, 1]
    assert padded.num_tokens == sum(microbatch.num_tokens for microbatch in single)


def test_a24_targets_are_counted_by_token_not_by_row() -> None:
    lengths = (1, 9)
    rows = data.Rows([data.Row(np.arange(n + 2), np.arange(n + 2) >= 2, f"rows.jsonl:{n}") for n in lengths])
    (both,) = data.build_batches(rows, batch_size=2, shuffle=False).microbatches(0)
    apart = data.build_batches(rows, batch_size=1, gradient_accumulation_steps=2, shuffle=False).microbatches(0)
    assert (both.labels_BT != IGNORE).sum(1).tolist() == list(lengths)
    assert both.count_targets() == sum(microbatch.count_targets() for microbatch in apart) == 10


def test_fingerprints_follow_what_decides_the_order() -> None:
    rows = make_rows([5, 6, 7, 8])

    def fingerprint(rows: data.Rows = rows, **options: Any) -> str:
        return data.build_batches(rows, **({"batch_size": 2, "max_length": 16} | options)).fingerprint()

    assert (
        fingerprint()
        == fingerprint(batch_size=1, gradient_accumulation_steps=2)
        == fingerprint(batch_size=1, world_size=2)
    )
    assert fingerprint(pad_id=7) == fingerprint()
    assert fingerprint(shuffle=False, seed=1) == fingerprint(shuffle=False)
    different = [
        {"batch_size": 1},
        {"shuffle": False},
        {"seed": 1},
        {"packing": True},
        {"packing": True, "max_length": 20},
    ]
    different.append({"rows": make_rows([5, 6, 8, 7])})
    assert len({fingerprint(), *(fingerprint(**options) for options in different)}) == 7


def test_no_rows_are_an_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        data.build_batches(data.Rows([]), batch_size=1)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("split", [(1, 1, 1), (3, 2, 1), (2, 1, 3), (4, 3, 2)])
@pytest.mark.parametrize("multiple", [1, 8])
def test_positions_of_an_epoch_are_those_of_its_microbatches(
    packing: bool, split: tuple[int, int, int], multiple: int
) -> None:
    batch_size, accumulation, world_size = split
    batches = data.build_batches(
        make_rows([5, 3, 9, 2, 7, 4, 4, 3, 8, 2, 6]), batch_size=batch_size, gradient_accumulation_steps=accumulation,
        packing=packing, max_length=12, pad_id=2, world_size=world_size, pad_to_multiple=multiple,
    )  # fmt: skip
    for epoch in (0, 1):
        fed = [
            (microbatch, units)
            for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
            for rank in range(world_size)
            for microbatch, units in zip(batches.microbatches(step, rank), batches.rows_of(step, rank), strict=True)
        ]
        assert batches.positions(epoch) == sum(microbatch.tokens_BT.numel() for microbatch, _ in fed)
        for microbatch, units in fed:
            assert microbatch.rows == tuple(batches.rows[int(row)].where for unit in units for row in unit)
