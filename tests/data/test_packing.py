"""Packing changes no loss: rows in one sequence do not see each other, and packs are as full as best-fit makes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from optune import data, models
from optune.data.packing import assign_packs
from optune.errors import DataError
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.data.test_batching import epoch_rows, make_rows


@pytest.fixture(scope="module")
def judge() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).double().eval()


@torch.no_grad()
def loss_sum(model: LlamaForCausalLM, batch: Microbatch) -> float:
    """The summed loss by transformers' Llama; packs through a mask made of `documents_BT` alone."""
    width = batch.tokens_BT.shape[1]
    allowed_BTT = torch.ones(width, width, dtype=torch.bool).tril().expand(len(batch.tokens_BT), -1, -1)
    if batch.documents_BT is not None:
        allowed_BTT = allowed_BTT & (batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :])
    mask = torch.zeros(allowed_BTT.shape, dtype=torch.float64).masked_fill(~allowed_BTT, -math.inf)[:, None]
    logits_BTV = model(batch.tokens_BT, attention_mask=mask, position_ids=batch.positions_BT).logits
    losses = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return float((losses * (1 if batch.weights_BT is None else batch.weights_BT.flatten())).sum())


@pytest.mark.parametrize("weights", [False, True])
def test_a32_packed_loss_equals_padded_loss_equals_rows_alone(judge: LlamaForCausalLM, weights: bool) -> None:
    rows = make_rows([3, 9, 4, 7, 12, 5, 2, 2, 6, 8], weights=weights)
    alone = sum(loss_sum(judge, batch) for batch in data.build_validation_batches(rows, 1))
    for packing in (False, True):
        batches = data.build_batches(rows, batch_size=2, packing=packing, max_length=14, seed=1)
        total = sum(
            loss_sum(judge, batch) for step in range(batches.steps_per_epoch) for batch in batches.microbatches(step)
        )
        assert total == pytest.approx(alone, rel=1e-9)


def test_a32_a_changed_row_changes_the_loss_of_the_pack_by_its_own_alone(judge: LlamaForCausalLM) -> None:
    first, second = make_rows([6, 6]), make_rows([6, 6])
    second.tokens[1:3] += 1
    packed, changed = (
        loss_sum(judge, data.build_batches(rows, batch_size=1, packing=True, max_length=12).microbatches(0)[0])
        for rows in (first, second)
    )
    alone, alone_changed = (
        loss_sum(judge, data.build_validation_batches(data.Rows([rows[0]]), 1)[0]) for rows in (first, second)
    )
    assert changed - packed == pytest.approx(alone_changed - alone, rel=1e-9)
    assert abs(changed - packed) > 1e-3


def test_a32_rows_longer_than_a_pack_are_counted_before_and_refused_here(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    chats = [fixtures.chat("w1", "w2"), fixtures.chat(" ".join(["w1"] * 60), "w2"), fixtures.chat("w3", "w4")]
    rows = data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", chats), tokenizer, max_length=28)
    assert rows.report.skipped["longer than max_length=28"].count == 1
    assert len(epoch_rows(data.build_batches(rows, batch_size=1, packing=True, max_length=28), 0)) == 2
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 13 tokens do not fit into a pack of 10"):
        data.build_batches(rows, batch_size=1, packing=True, max_length=10)
    with pytest.raises(DataError, match=r"data\.max_length: packing needs"):
        data.build_batches(rows, batch_size=1, packing=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> models.Decoder:
    return models.load(fixtures.write_model(tmp_path_factory.mktemp("m0")), dtype=torch.float32).double()


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=10),
    capacity=st.integers(12, 30),
    batch_size=st.integers(1, 3),
    weights=st.booleans(),
    multiple=st.sampled_from([1, 8]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a32_any_rows_have_the_same_loss_packed_grouped_padded_and_alone(
    decoder: models.Decoder, lengths: list[int], capacity: int, batch_size: int, weights: bool, multiple: int
) -> None:
    """By the model and the loss that train, which have to honour documents and positions themselves."""
    rows = make_rows(lengths, weights=weights)

    def total(batches: data.Batches) -> float:
        steps = [batch for step in range(batches.steps_per_epoch) for batch in batches.microbatches(step)]
        with torch.no_grad():
            hidden = [decoder.hidden(each.tokens_BT, each.positions_BT, each.documents_BT) for each in steps]
            return sum(
                float(next_token_loss(decoder, hidden_BTD, each))
                for hidden_BTD, each in zip(hidden, steps, strict=True)
            )

    options = {"batch_size": batch_size, "pad_to_multiple": multiple, "seed": 1}
    alone = total(data.build_batches(rows, batch_size=1, shuffle=False))
    for arrangement in ({}, {"packing": True, "max_length": capacity}, {"group_by_length": True}):
        assert total(data.build_batches(rows, **options, **arrangement)) == pytest.approx(alone, rel=1e-6)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 32))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_packs_are_those_of_a_slow_best_fit(lengths: list[int], capacity: int) -> None:
    lengths = sorted(lengths, reverse=True)
    filled: list[list[int]] = []  # The pack filled last stands last.
    for length in lengths:
        fitting = [pack for pack in filled if sum(pack) + length <= capacity]
        best = max(reversed(fitting), key=sum, default=[])
        filled = [pack for pack in filled if pack is not best] + [[*best, length]]
    packs = assign_packs(np.array(lengths), capacity)
    ours = [[length for length, pack in zip(lengths, packs, strict=True) if pack == p] for p in range(packs.max() + 1)]
    assert sorted(ours) == sorted(filled)


def test_packs_have_the_same_lengths_in_every_epoch_and_other_rows() -> None:
    batches = data.build_batches(make_rows([4, 5, 6, 7] * 10), batch_size=1, packing=True, max_length=16, seed=2)
    epochs = [
        [batch for step in range(batches.units) for batch in batches.microbatches(epoch * batches.units + step)]
        for epoch in range(2)
    ]
    assert sorted(b.num_tokens for b in epochs[0]) == sorted(b.num_tokens for b in epochs[1])
    assert {frozenset(b.rows) for b in epochs[0]} != {frozenset(b.rows) for b in epochs[1]}
    assert batches.fill == sum(b.num_tokens for b in epochs[0]) / (16 * batches.units)
    in_order = data.build_batches(make_rows([4] * 9), batch_size=1, packing=True, max_length=16, shuffle=False)
    assert epoch_rows(in_order, 0) == [f"rows.jsonl:{number + 1}" for number in range(9)]
