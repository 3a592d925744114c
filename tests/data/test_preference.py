"""Pairs of a chosen and a rejected answer: every way to write one, and their log-probabilities against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optune import data, models
from optune.data.formats import Pair, RowError, SkippedRow, detect_format
from optune.data.preference import read_preference
from optune.errors import DataError
from tests import fixtures
from tests.data.test_template import CALL, TOOLS, say

Q, A, B, S = say("user", "w1 w2"), say("assistant", "w3"), say("assistant", "w4 w5"), say("system", "w0")
PAIR = Pair([Q], [A], [B])
LONGER = [Q, say("assistant", "w6"), say("user", "w7")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"}, Pair("w1 w2", "w3", "w4 w5")),
        ({"prompt": [Q], "chosen": [A], "rejected": [B]}, PAIR),
        ({"prompt": [Q], "chosen": "w3", "rejected": "w4 w5"}, PAIR),
        ({"prompt": "w1 w2", "chosen": [A], "rejected": [B]}, PAIR),
        ({"chosen": [Q, A], "rejected": [Q, B]}, PAIR),
        ({"prompt": None, "chosen": [Q, A], "rejected": [Q, B]}, PAIR),
        ({"prompt": "w1 w2", "chosen": [Q, A], "rejected": [Q, B], "score_chosen": 9.5, "messages_id": 3}, PAIR),
        ({"prompt": [Q], "chosen": [Q, A], "rejected": [Q, B]}, PAIR),
        ({"prompt": "w1 w2", "chosen": [S, Q, A], "rejected": [S, Q, B]}, Pair([S, Q], [A], [B])),
        ({"prompt": [S, Q], "chosen": [Q, A], "rejected": [Q, B]}, Pair([S, Q], [A], [B])),
        ({"chosen": [*LONGER, A], "rejected": [*LONGER, B]}, Pair(LONGER, [A], [B])),
        ({"prompt": LONGER, "chosen": [A], "rejected": [B]}, Pair(LONGER, [A], [B])),
        # They part ways before their last answers.
        ({"chosen": [Q, A, Q, A], "rejected": [Q, B, Q, A]}, Pair([Q], [A, Q, A], [B, Q, A])),
        # Whole texts: what they share, in whole words, is the prompt.
        ({"chosen": "w1 w2 w3", "rejected": "w1 w2 w31"}, Pair("w1 w2", " w3", " w31")),
        ({"chosen": "Q: a\nA: b", "rejected": "Q: a\nA: c"}, Pair("Q: a\nA:", " b", " c")),
        ({"chosen": "Q\nb", "rejected": "Q\nc"}, Pair("Q\n", "b", "c")),
        ({"chosen": "ab", "rejected": "ac"}, Pair("", "ab", "ac")),
        (
            {
                "input": {"messages": [Q], "tools": TOOLS, "parallel_tool_calls": True},
                "preferred_output": [A],
                "non_preferred_output": [{"role": "assistant", "tool_calls": [CALL]}],
            },
            Pair([Q], [A], [{"role": "assistant", "tool_calls": [CALL]}], TOOLS),
        ),
    ],
)
def test_every_form_of_a_pair_is_read(row: dict[str, Any], expected: Pair) -> None:
    before = json.dumps(row)
    assert detect_format(row) == "preference"
    assert read_preference(row) == expected
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "field 'rejected': found nothing, wanted text or a list of messages"),
        ({"chosen": 3, "rejected": "b"}, "field 'chosen': found a number, wanted text or a list of messages"),
        ({"chosen": [Q, A], "rejected": "b"}, "field 'rejected': found text, wanted a list as in field 'chosen'"),
        ({"prompt": 3, "chosen": [A], "rejected": [B]}, "field 'prompt': found a number, wanted text or a list"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "field 'prompt': found a number, wanted text"),
        ({"chosen": [Q, 3], "rejected": [Q, B]}, r"field 'chosen\[1\]': found a number, wanted an object"),
        ({"prompt": "w9", "chosen": [Q, A], "rejected": [Q, B]}, "field 'prompt': the answers begin with a question"),
        ({"input": [], "preferred_output": [A]}, "field 'rejected': found nothing"),
    ],
)
def test_what_is_no_pair_is_named_by_its_field(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        read_preference(row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "a b", "rejected": "a b"}, "chosen and rejected are the same"),
        ({"chosen": [Q, A], "rejected": [Q, A]}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "an empty answer"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "an empty answer"),
        ({"chosen": [Q, A], "rejected": [Q, say("assistant", " ")]}, "an empty answer"),
        ({"chosen": [Q, A], "rejected": [Q]}, "no answer"),
        ({"chosen": [A], "rejected": [B]}, "no prompt"),
    ],
)
def test_pairs_with_nothing_to_compare_are_skipped_for_a_stated_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SkippedRow, match=f"^{reason}$"):
        read_preference(row)


def load(tmp_path: Path, rows: list[Any], **options: Any) -> data.Rows:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    return data.load_pairs(fixtures.write_rows(tmp_path / "pairs.jsonl", rows), tokenizer, **options)


def test_pairs_stand_side_by_side_and_a_pair_is_left_out_whole(tmp_path: Path) -> None:
    long = say("assistant", " ".join(["w9"] * 50))
    rows = load(
        tmp_path,
        [
            {"chosen": [*LONGER, A], "rejected": [*LONGER, B]},
            {"chosen": [Q, A], "rejected": [Q, long]},
            {"prompt": "w1", "chosen": " w3", "rejected": " w4 w5"},
        ],
        max_length=40,
    )
    decode = data.load_tokenizer(tmp_path / "t0").decode
    assert [decode(row.tokens[row.trained]) for row in rows] == ["w3 <end>", "w4 w5 <end>"] * 2
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "1", "3", "3"]
    assert (rows.report.rows, rows.report.kept) == (3, 2)
    assert rows.report.skipped["longer than max_length=40"].where == [f"{tmp_path}/pairs.jsonl:2"]
    batches = data.build_batches(rows, batch_size=2, shuffle=False)
    assert [batch.rows for step in (0, 1) for batch in batches.microbatches(step)] == [
        (rows[0].where, rows[0].where),
        (rows[2].where, rows[2].where),
    ]


def test_pairs_stay_together_in_every_order_split_and_process(tmp_path: Path) -> None:
    """Each pair once an epoch, chosen in front of rejected, whatever the seed; what would part them is refused."""
    rows = load(tmp_path, [{"prompt": f"w{i}", "chosen": f" w{i + 1}", "rejected": f" w{i + 2}"} for i in range(7)])
    orders = set()
    for seed, size, world in ((0, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 3)):
        batches = data.build_batches(rows, batch_size=size, gradient_accumulation_steps=2, seed=seed, world_size=world)
        for epoch in range(2):
            steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
            fed = [
                [int(row) for unit in units for row in unit]
                for step in steps
                for rank in range(world)
                for units in batches.rows_of(step, rank)
            ]
            assert all(chosen % 2 == 0 and rejected == chosen + 1 for one in fed for chosen, rejected in batched(one))
            assert sorted(row for one in fed for row in one) == list(range(14))
            orders.add(tuple(row for one in fed for row in one))
    assert len(orders) > 4
    for options, where in (
        ({"batch_size": 3}, "batch_size"),
        ({"batch_size": 2, "packing": True, "max_length": 64}, "data.packing"),
        ({"batch_size": 2, "group_by_length": True}, "data.group_by_length"),
    ):
        with pytest.raises(DataError, match=f"{where}: .*a chosen and a rejected answer are trained together"):
            data.build_batches(rows, **options)


def batched(rows: list[int]) -> list[tuple[int, int]]:
    assert len(rows) % 2 == 0
    return list(zip(rows[::2], rows[1::2], strict=True))


def test_rows_that_hold_no_pair_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: field 'chosen': found nothing"):
        load(tmp_path, [{"chosen": [Q, A], "rejected": [Q, B]}, {"messages": [Q, A]}])
    with pytest.raises(DataError, match="none of the 1 rows can be trained: 1 chosen and rejected are the same"):
        load(tmp_path, [{"chosen": [Q, A], "rejected": [Q, A]}])


def test_pairs_are_refused_where_single_answers_are_trained(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    path = fixtures.write_rows(tmp_path / "pairs.jsonl", [{"chosen": [Q, A], "rejected": [Q, B]}])
    for options, where in (({}, f"{path}:1"), ({"format": "preference"}, "data.format")):
        with pytest.raises(DataError, match=f"{where}: rows of chosen and rejected answers") as caught:
            data.load_rows(path, tokenizer, **options)
        assert "optune.data.formats.read_chosen" in str(caught.value.hint)
        assert "data.load_pairs" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("has_bos", "adds_bos", "template"),
    [
        (True, True, fixtures.CHAT_TEMPLATE),
        (True, False, fixtures.CHAT_TEMPLATE),
        (True, True, fixtures.CHAT_TEMPLATE.replace("{{ bos_token }}", "")),
        (False, False, fixtures.CHAT_TEMPLATE.replace("{{ bos_token }}", "")),
    ],
    ids=["both write it", "only the template", "only the tokenizer", "there is none"],
)
def test_a46_log_probabilities_of_a_pair_are_those_of_transformers(
    tmp_path: Path, has_bos: bool, adds_bos: bool, template: str
) -> None:
    """Prompt and answer as one chat: one BOS at most, one end token, and the answer alone counted."""
    folder = fixtures.write_model(tmp_path / "m0", tokenizer=False)
    fixtures.write_tokenizer(folder, chat_template=template, adds_bos=adds_bos)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config if has_bos else {key: value for key, value in config.items() if key != "bos_token"})
    )
    row = {"chosen": [*LONGER, A], "rejected": [*LONGER, B]}
    path = fixtures.write_rows(tmp_path / "pairs.jsonl", [row])
    rows = data.load_pairs(path, data.load_tokenizer(folder))
    (batch,) = data.build_batches(rows, batch_size=2, shuffle=False).microbatches(0)
    model = models.load(folder, dtype=torch.float32)
    with torch.no_grad():
        logs_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT).log_softmax(-1)
    kept_BT = batch.labels_BT != -100
    found_B = (logs_BTV.gather(-1, batch.labels_BT.clamp(min=0)[..., None])[..., 0] * kept_BT).sum(1)

    tokenizer, judge = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    begin = [0] if has_bos and template != fixtures.CHAT_TEMPLATE else []
    for ours, answer in zip(found_B.tolist(), (A, B), strict=True):
        prompt = tokenizer.apply_chat_template(LONGER, add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*LONGER, answer], return_dict=True)["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert whole.count(0) + len(begin) == has_bos
        last = len(whole) - 1 - whole[::-1].index(4)  # the end token; a line end follows
        ids = torch.tensor([begin + whole[: last + 1]])
        with torch.no_grad():
            logs_TV = judge(input_ids=ids).logits[0].log_softmax(-1)
        places = range(len(begin) + len(prompt), ids.shape[1])
        expected = sum(float(logs_TV[place - 1, ids[0, place]]) for place in places)
        assert ours == pytest.approx(expected, abs=1e-4)
        assert len(places) == len(answer["content"].split()) + 1
