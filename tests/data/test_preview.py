"""What is shown of a batch is what the batch holds, and the text of its tokens is the tokenizer's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data import preview
from optune.data.summary import count_lengths, describe_lengths, padding_share
from optune.types import IGNORE
from tests import fixtures
from tests.data.test_batching import make_rows

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ROOT / "assets/tiny/model"


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path_factory.mktemp("t0")))


@pytest.fixture(scope="module")
def tiny() -> data.Tokenizer:
    return data.load_tokenizer(TINY)


@pytest.fixture(scope="module")
def pieces_of_words(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    """As sentencepiece does it: a space belongs to the word behind it, the decoder takes the first one off, and what is
    not in the vocabulary is spelled in bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "ab", "▁▁"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {word: number for number, word in enumerate(words)},
            [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    return data.load_tokenizer(folder)


TEXTS = st.text(st.sampled_from("ab  é漢🙂\n\t,.") | st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("name", ["tiny", "pieces_of_words"])
def test_pieces_join_to_the_decoded_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    pieces = preview.split_text(tokenizer, ids)
    judge = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    assert "".join(pieces) == judge.decode(ids, skip_special_tokens=False)
    assert len(pieces) == len(ids)


def batch(rows: data.Rows, **options: Any) -> data.Batches:
    defaults: dict[str, Any] = {"batch_size": 2, "pad_id": 2}
    batches = data.build_batches(rows, **(defaults | options))
    assert isinstance(batches, data.Batches)
    return batches


def test_the_last_token_of_a_character_has_it(tiny: data.Tokenizer) -> None:
    ids = tiny.encode("a🙂b")
    assert len(ids) == 6
    assert preview.split_text(tiny, ids) == ["a", "", "", "", "🙂", "b"]
    # Bytes that are no character keep their places too.
    broken = [*ids[1:3], *ids[1:3], ids[0]]
    assert "".join(preview.split_text(tiny, broken)) == tiny.decode(broken)


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"pad_to_multiple": 8}, {"world_size": 3}])
@pytest.mark.parametrize("weights", [False, True])
def test_units_are_the_tensors_of_the_microbatches(t0: data.Tokenizer, options: dict[str, Any], weights: bool) -> None:
    rows = make_rows([5, 3, 9, 2, 7, 4, 4, 3], weights=weights)
    batches = batch(rows, gradient_accumulation_steps=2, max_length=14, seed=3, **options)
    seen = []
    for step in range(batches.steps_per_epoch):
        units = list(preview.show_step(batches, t0, step + 1))
        fed = [
            (rank, number + 1, place, microbatch)
            for number in range(len(batches.microbatches(step)))
            for rank in range(batches.world_size)
            for microbatch in [batches.microbatches(step, rank)[number]]
            for place in range(len(microbatch.tokens_BT))
        ]
        assert [(unit.rank, unit.microbatch, unit.place - 1) for unit in units] == [at[:3] for at in fed]
        for unit, (_, _, place, microbatch) in zip(units, fed, strict=True):
            labels = [IGNORE if label is None else label for label in unit.labels]
            assert (unit.ids, labels) == (microbatch.tokens_BT[place].tolist(), microbatch.labels_BT[place].tolist())
            assert unit.positions == microbatch.positions_BT[place].tolist()
            assert (unit.documents is None) == (microbatch.documents_BT is None)
            assert (unit.weights is None) == (microbatch.weights_BT is None)
            assert unit.targets == (microbatch.labels_BT[place] != IGNORE).sum()
            seen += unit.split()
    assert sorted(row.numbers[0] for row in seen) == list(range(1, len(rows) + 1))
    for shown in seen:
        row = rows[shown.numbers[0] - 1]
        assert shown.rows == [row.where]
        assert shown.ids == row.tokens.tolist()
        assert shown.positions == list(range(len(row.tokens)))
        assert shown.trained == [False, *row.trained[1:].tolist()]
        assert not any(shown.padding)
        if row.weights is not None:
            wanted = np.where(row.trained, row.weights, 0)[1:]
            assert [shown.weight(index) for index in range(1, len(shown.ids))] == pytest.approx(wanted.tolist())


def test_a_row_is_found_wherever_a_shuffled_pack_has_it(t0: data.Tokenizer) -> None:
    rows = make_rows([5, 3, 9, 2, 7, 4, 4, 3])
    for packing in (False, True):
        batches = batch(rows, packing=packing, max_length=14, world_size=2)
        for index in range(len(rows)):
            unit = preview.show_row(batches, t0, index)
            assert (unit.rows, unit.ids) == ([rows[index].where], rows[index].tokens.tolist())
            fed = batches.microbatches(unit.step - 1, unit.rank)[unit.microbatch - 1]
            assert rows[index].where in fed.rows
    with pytest.raises(IndexError):
        preview.show_row(batches, t0, len(rows))


def test_the_first_units_are_those_of_the_first_steps(t0: data.Tokenizer) -> None:
    batches = batch(make_rows([5, 3, 9, 2, 7]))
    shown = preview.show_first(batches, t0, 4)
    order = [name for step in range(2) for microbatch in batches.microbatches(step) for name in microbatch.rows]
    assert [unit.rows[0] for unit in shown] == order
    assert len(preview.show_first(batches, t0, 100)) == 5
    assert preview.show_first(batches, t0, 0) == []


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 5000) | st.integers(90, 110), min_size=1, max_size=60))
def test_every_row_is_counted_once_in_its_bar(lengths: list[int]) -> None:
    found = count_lengths(np.array(lengths))
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.median in lengths
    assert sum(length <= found.median for length in lengths) * 2 >= len(lengths)
    wanted = [
        sum(low < length <= high for length in lengths) for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert found.counts == wanted
    assert sum(wanted) == len(lengths)
    assert len(wanted) <= 14
    assert found.counts[0] > 0 < found.counts[-1]
    _, bars = describe_lengths(found).split("  ")
    assert [bar != "·" for bar in bars] == [count > 0 for count in found.counts]


@pytest.mark.parametrize("packing", [False, True])
def test_the_share_of_padding_is_that_of_an_epoch(packing: bool) -> None:
    rows = make_rows([5, 3, 9, 2, 7, 4, 4, 3])
    batches = batch(rows, batch_size=3, packing=packing, max_length=14)
    fed = [microbatch for step in range(batches.steps_per_epoch) for microbatch in batches.microbatches(step)]
    positions = sum(math.prod(microbatch.tokens_BT.shape) for microbatch in fed)
    assert padding_share(batches) == pytest.approx(1 - sum(microbatch.num_tokens for microbatch in fed) / positions)
    assert padding_share(batches) > 0
