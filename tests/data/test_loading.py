"""Which rows are kept, what of them is trained, and that whatever is left out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optune import data
from optune.errors import DataError
from tests import fixtures
from tests.data.chat_templates import load_ours
from tests.data.test_template import TOOL_CHAT, TOOLS, say


@pytest.fixture
def t0(tmp_path: Path) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))


def load(tmp_path: Path, tokenizer: data.Tokenizer, rows: list[Any], **options: Any) -> data.Rows:
    return data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", rows), tokenizer, **options)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


def targets(tokenizer: data.Tokenizer, row: data.Row) -> str:
    return tokenizer.decode(row.tokens[row.trained])


U, A, SYSTEM = (lambda text: say("user", text)), (lambda text: say("assistant", text)), say("system", "w0")
GOOD = [fixtures.chat("w1", "w2"), fixtures.chat("w3", "w4 w5"), fixtures.chat("w6", "w7")]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (chat(U("w1"), A("")), "an empty answer"),
        (chat(U("w1"), A("   ")), "an empty answer"),
        (chat(U("w1"), {"role": "assistant", "content": None}), "an empty answer"),
        (chat(), "no messages"),
        (chat(U("w1")), "no answer"),
    ],
)
def test_a13_an_empty_turn_is_one_counted_skip_and_changes_no_other_row(
    tmp_path: Path, t0: data.Tokenizer, bad: dict[str, Any], reason: str
) -> None:
    good = load(tmp_path, t0, GOOD)
    rows = load(tmp_path, t0, [*GOOD[:1], bad, *GOOD[1:]])
    assert rows.fingerprint() == good.fingerprint()
    assert rows.report.rows == 4
    assert rows.report.kept == 3
    assert rows.report.skipped_lines() == [f"1 {reason} ({tmp_path}/rows.jsonl:2)"]
    with pytest.raises(DataError, match=f"none of the 1 rows can be trained: 1 {reason} "):
        load(tmp_path, t0, [bad])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([U("w1"), U("w2"), A("w3")], "w3 <end>"),
        ([U("w1"), A("w2"), A("w3")], "w2 <end> w3 <end>"),
        ([U("w1"), A("w2"), U("w3")], "w2 <end>"),
        ([A("w1"), U("w2"), A("w3")], "w1 <end> w3 <end>"),
        ([SYSTEM, A("w1")], "w1 <end>"),
        ([SYSTEM, U("w1"), A("w2"), SYSTEM, U("w3"), A("w4")], "w2 <end> w4 <end>"),
    ],
)
def test_a14_a15_any_order_of_roles_that_the_template_takes_is_trained(
    tmp_path: Path, t0: data.Tokenizer, turns: list[dict[str, Any]], expected: str
) -> None:
    (row,) = load(tmp_path, t0, [chat(*turns)])
    assert targets(t0, row) == expected


def test_a15_tool_calls_and_results_between_turns_are_taken(tmp_path: Path) -> None:
    tokenizer = load_ours("qwen25")
    rows = load(tmp_path, tokenizer, [chat(*TOOL_CHAT, U("x"), A("y"), tools=TOOLS)])
    assert targets(tokenizer, rows[0]).count("<|im_end|>") == 3


def test_a14_a15_what_the_template_refuses_is_told_with_its_words_row_and_totals(tmp_path: Path) -> None:
    tokenizer = load_ours("mistral")
    rows = [chat(U("a"), A("b")), chat(U("a"), U("b"), A("c")), chat(U("a"), A("b")), chat(U("a"), A("b"), A("c"))]
    with pytest.raises(DataError, match="roles must alternate") as caught:
        load(tmp_path, tokenizer, rows)
    assert caught.value.where == f"{tmp_path}/rows.jsonl:2"
    assert f"of 4 rows 1 more cannot be used: {tmp_path}/rows.jsonl:4" in str(caught.value)


def test_messages_that_the_template_leaves_out_are_told(tmp_path: Path) -> None:
    tokenizer = load_ours("deepseek")
    rows = load(tmp_path, tokenizer, [chat(U("a"), A("b"), say("tool", "c"), U("d"), A("e"), tools=TOOLS)])
    assert list(rows.report.notes) == [
        "the chat template leaves out messages of role tool",
        "the chat template leaves out the tools",
    ]


LONG = chat(U(" ".join(["w1"] * 300)), A("w2 w3 w4"))


@pytest.mark.parametrize(
    ("truncation", "reason"),
    [("drop", "longer than max_length=64"), ("truncate_right", "no target within max_length=64")],
)
def test_a17_a_prompt_that_fills_the_limit_is_counted_and_skipped(
    tmp_path: Path, t0: data.Tokenizer, truncation: str, reason: str
) -> None:
    options = {"max_length": 64, "truncation": truncation}
    mixed = load(tmp_path, t0, [GOOD[0], LONG, *GOOD[1:]], **options)
    assert mixed.fingerprint() == load(tmp_path, t0, GOOD, **options).fingerprint()
    assert mixed.report.skipped[reason].count == 1
    with pytest.raises(DataError, match=f"none of the 2 rows can be trained: 2 {reason}"):
        load(tmp_path, t0, [LONG, LONG], **options)


def test_a17_truncation_error_names_the_row_and_its_length(tmp_path: Path, t0: data.Tokenizer) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/rows.jsonl:2: 314 tokens, more than max_length=64"):
        load(tmp_path, t0, [GOOD[0], LONG], max_length=64, truncation="error")


def test_a18_a_limit_that_cuts_nothing_changes_nothing(tmp_path: Path, t0: data.Tokenizer) -> None:
    rows = [fixtures.chat("w1 w2", "w3 w4"), fixtures.chat("w5 w6", "w7 w8")]
    free = load(tmp_path, t0, rows, max_length=None)
    length = len(free[0].tokens)
    for limit in (8192, length):
        for truncation in ("drop", "error", "truncate_right", "truncate_left"):
            kept = load(tmp_path, t0, rows, max_length=limit, truncation=truncation)
            assert kept.fingerprint() == free.fingerprint()
    assert [targets(t0, row) for row in free] == ["w3 w4 <end>", "w7 w8 <end>"]
    with pytest.raises(DataError):
        load(tmp_path, t0, rows, max_length=length - 1)


def test_cut_rows_keep_their_bos_and_get_no_end_token(tmp_path: Path, t0: data.Tokenizer) -> None:
    row = fixtures.chat("w1 w2 w3", "w4 w5 w6 w7")
    (whole,) = load(tmp_path, t0, [row])
    (right,) = load(tmp_path, t0, [row], max_length=14, truncation="truncate_right")
    assert right.tokens.tolist() == whole.tokens[:14].tolist()
    assert targets(t0, right) == "w4 w5"
    (left,) = load(tmp_path, t0, [row], max_length=6, truncation="truncate_left")
    assert left.tokens.tolist() == [0, *whole.tokens[-5:].tolist()]
    assert targets(t0, left) == "w5 w6 w7 <end>"


def test_a_first_token_is_never_a_target(tmp_path: Path, t0: data.Tokenizer) -> None:
    rows = load(tmp_path, t0, [{"text": "w1 w2"}], max_length=2, truncation="truncate_left")
    assert rows[0].trained.tolist() == [False, True]
    with pytest.raises(DataError, match="1 no target "):
        load(tmp_path, t0, [{"tokens": [5]}])


def test_completions_and_texts_are_closed_by_the_end_token(tmp_path: Path, t0: data.Tokenizer) -> None:
    (completion,) = load(tmp_path, t0, [{"prompt": "w1 w2", "completion": " w3"}])
    assert t0.decode(completion.tokens) == "w1 w2 w3 <end>"
    assert targets(t0, completion) == "w3 <end>"
    (everything,) = load(tmp_path, t0, [{"prompt": "w1 w2", "completion": " w3"}], train_on="all")
    assert targets(t0, everything) == "w2 w3 <end>"
    (text,) = load(tmp_path, t0, [{"text": "w1 w2"}])
    assert targets(t0, text) == "w2 <end>"
    tokens = load(tmp_path, t0, [{"tokens": [15, 16, 17], "labels": [-100, -100, 17]}])
    assert tokens[0].tokens.tolist() == [15, 16, 17]
    assert tokens[0].trained.tolist() == [False, False, True]


def test_a_completion_starts_inside_a_token_that_joins_the_space(tmp_path: Path) -> None:
    """One encoding of the whole: the token ' hello' begins in the completion and is trained."""
    tokenizer = load_ours("smollm2")
    (row,) = load(tmp_path, tokenizer, [{"prompt": "the quick", "completion": " brown fox"}])
    whole = tokenizer.encode("the quick brown fox")
    assert row.tokens.tolist() == [*whole, tokenizer.eos_id]
    assert targets(tokenizer, row) == " brown fox<|im_end|>"


def test_a_last_character_of_several_tokens_is_trained_whole(tmp_path: Path) -> None:
    tokenizer = load_ours("smollm2")
    (row,) = load(tmp_path, tokenizer, [{"prompt": "a", "completion": " 日🙂"}])
    assert targets(tokenizer, row) == " 日🙂<|im_end|>"
    assert row.trained.sum() > 4


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, t0: data.Tokenizer) -> None:
    with pytest.raises(DataError, match="found the id 5000, the vocabulary has 80"):
        load(tmp_path, t0, [{"tokens": [1, 5000]}])


def test_weights_of_messages_scale_their_answers(tmp_path: Path, t0: data.Tokenizer) -> None:
    turns = [U("w1"), A("w2 w3") | {"weight": 0}, U("w4"), A("w5") | {"weight": 0.25}, U("w6"), A("w7")]
    (row,) = load(tmp_path, t0, [chat(*turns)])
    assert targets(t0, row) == "w5 <end> w7 <end>"
    assert row.weights is not None
    assert row.weights[row.trained].tolist() == [0.25, 0.25, 1, 1]
    with pytest.raises(DataError, match="1 no target"):
        load(tmp_path, t0, [chat(*turns[:2])])
    (plain,) = load(tmp_path, t0, [chat(U("w1"), A("w2") | {"weight": 1})])
    assert plain.weights is None


def test_train_on_chooses_the_answers(tmp_path: Path, t0: data.Tokenizer) -> None:
    rows = [chat(U("w1"), A("w2"), U("w3"), A("w4"), U("w5"))]
    for train_on, expected in (("assistant", "w2 <end> w4 <end>"), ("last_assistant", "w4 <end>")):
        assert targets(t0, load(tmp_path, t0, rows, train_on=train_on)[0]) == expected
    (everything,) = load(tmp_path, t0, rows, train_on="all")
    assert everything.trained.tolist() == [False] + [True] * (len(everything.tokens) - 1)


def test_options_that_do_not_exist_are_refused_by_name(tmp_path: Path, t0: data.Tokenizer) -> None:
    for name, value in (("truncation", "cut"), ("train_on", "user"), ("format", "csv")):
        with pytest.raises(DataError, match=f"data.{name}: '{value}' is none of"):
            load(tmp_path, t0, GOOD, **{name: value})


def test_the_report_counts_what_is_there(tmp_path: Path, t0: data.Tokenizer) -> None:
    rows = load(tmp_path, t0, [*GOOD, LONG, chat()], max_length=64)
    report = rows.report
    assert (report.rows, report.kept, report.targets) == (5, 3, sum(int(row.trained.sum()) for row in rows))
    assert report.tokens == sum(len(row.tokens) for row in rows)
    assert report.longest == max(len(row.tokens) for row in rows)
    assert report.lines() == [
        f"3 of 5 rows (messages), 7 targets in {report.tokens} tokens ({7 / report.tokens:.1%}), "
        f"longest row {report.longest} tokens",
        f"skipped: 1 no messages ({tmp_path}/rows.jsonl:5)",
        f"skipped: 1 longer than max_length=64 ({tmp_path}/rows.jsonl:4)",
    ]


NO_STOP = "no target is an end-of-turn token, so the model does not learn to stop"
WITHOUT_END = "{% for m in messages %}{{ m.role + ' ' + m.content + '\n' }}{% endfor %}"


def test_answers_that_never_end_are_refused(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0", chat_template=WITHOUT_END))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: no answer in the 3 rows ends .*chat_template\.jinja"
    ) as caught:
        load(tmp_path, tokenizer, GOOD)
    assert "generation" in str(caught.value.hint)
    with pytest.raises(DataError, match="would not learn to stop"):
        load(tmp_path, tokenizer, GOOD, train_on="last_assistant")
    assert list(load(tmp_path, tokenizer, GOOD, train_on="all").report.notes) == [NO_STOP]


def test_rows_that_may_have_no_end_are_told(tmp_path: Path, t0: data.Tokenizer) -> None:
    assert list(load(tmp_path, t0, [{"tokens": [16, 17, 18]}]).report.notes) == [NO_STOP]
    assert list(load(tmp_path, t0, [{"tokens": [16, 17, 4]}, {"tokens": [16, 17]}]).report.notes) == []
    assert list(load(tmp_path, t0, [{"text": "w1 w2"}]).report.notes) == []
    long = [fixtures.chat("w1", " ".join([word] * 30)) for word in ("w2", "w3")]
    rows = load(tmp_path, t0, long, max_length=12, truncation="truncate_right")
    assert list(rows.report.notes) == [NO_STOP]
    with pytest.raises(DataError, match="or max_length cuts it off"):
        cut_and_whole = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t1", chat_template=WITHOUT_END))
        load(tmp_path, cut_and_whole, [*long, fixtures.chat("w1", "w2")], max_length=12, truncation="truncate_right")


def test_a_token_of_the_templates_own_that_closes_answers_teaches_to_stop(tmp_path: Path) -> None:
    """As where the next speaker's token ends an answer: `<turn>` is not the tokenizer's end token."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<turn>' }}"
        "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    )
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0", chat_template=source))
    assert load(tmp_path, tokenizer, GOOD).report.notes == {}


def test_rows_behave_as_a_sequence_and_their_fingerprint_follows_every_part(tmp_path: Path, t0: data.Tokenizer) -> None:
    rows = load(tmp_path, t0, GOOD)
    assert rows[-1].where == rows[2].where
    with pytest.raises(IndexError):
        rows[3]
    prints = {rows.fingerprint()}
    for part in ("tokens", "trained", "weights"):
        changed = [data.Row(row.tokens.copy(), row.trained.copy(), row.where) for row in rows]
        if part == "tokens":
            changed[1].tokens[2] += 1
        elif part == "trained":
            changed[1].trained[-1] ^= True
        else:
            weights = np.full(len(rows[0].tokens), 0.5, np.float32)
            changed[0] = data.Row(rows[0].tokens, rows[0].trained, rows[0].where, weights)
        prints.add(data.Rows(changed).fingerprint())
    merged = data.Rows([data.Row(rows.tokens, rows.trained, "x")])
    assert len(prints | {merged.fingerprint()}) == 5
    assert data.Rows(list(rows)).fingerprint() == rows.fingerprint()


def test_chunks_of_rows_are_encoded_as_rows_alone(tmp_path: Path, t0: data.Tokenizer, monkeypatch: Any) -> None:
    many = fixtures.numbered_rows(25)
    whole = load(tmp_path, t0, many)
    monkeypatch.setattr("optune.data.preparing.CHUNK", 4)
    assert load(tmp_path, t0, many).fingerprint() == whole.fingerprint()


def test_messages_are_only_read(tmp_path: Path, t0: data.Tokenizer) -> None:
    messages = [U("w1 <end>"), A("w2")]
    before = json.dumps(messages)
    t0.encode_chat(messages)
    assert json.dumps(messages) == before


def test_rows_whose_answers_the_template_leaves_out_say_so(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}"
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0", chat_template=source))
    with pytest.raises(DataError, match=r"3 no target .*the chat template leaves out messages of role assistant: 3"):
        load(tmp_path, tokenizer, GOOD)


def test_a_source_without_a_row_is_noted(t0: data.Tokenizer, tmp_path: Path) -> None:
    good = fixtures.write_rows(tmp_path / "good.jsonl", GOOD)
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    rows = data.load_rows([good, empty, {"path": good, "split": "[7:]"}], t0)
    assert len(rows) == len(GOOD)
    assert [line for line in rows.report.noted_lines() if "a source without a row" in line and str(empty) in line]
    with pytest.raises(DataError, match="no rows in the part that is taken"):
        data.load_rows({"path": good, "split": "[7:]"}, t0)
