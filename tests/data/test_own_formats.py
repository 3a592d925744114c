"""Formats of a user's own: functions of a row. And what `auto` says where a row fits several formats."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optune import data
from optune.data.formats import Chat, Pair, RowError, SkippedRow, get_format, name_format
from optune.errors import DataError
from tests import fixtures
from tests.data.test_template import say

Q, A = say("user", "w1"), say("assistant", "w2 w3")


def read_quiz(row: dict[str, Any], answer: str = "answer") -> Any:
    """A row in the format `messages`; None leaves one out."""
    if row.get("bad"):
        return None
    return {"messages": [say("user", row["question"]), say("assistant", row[answer])]}


def give(value: Any) -> Any:
    return get_format(lambda row: value)({})


def test_a_function_may_give_a_row_of_any_format_or_an_example() -> None:
    assert give({"messages": [Q, A]}) == Chat([Q, A])
    assert give(Chat([Q, A])) == Chat([Q, A])
    assert give({"chosen": [Q, A], "rejected": [Q, say("assistant", "w9")]}) == Pair([Q], [A], [say("assistant", "w9")])
    assert give(Pair("a", "b", "c")) == Pair("a", "b", "c")
    with pytest.raises(SkippedRow, match="left out by the format function"):
        give(None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([Q, A], "returned a list, wanted a row, an example or None"),
        ("w1", "returned text, wanted"),
        ({"messages": [Q, 3]}, r"in what .* returned: field 'messages\[1\]': found a number"),
        ({"talk": []}, "in what .* returned: no known format has the keys 'talk'"),
    ],
)
def test_what_a_function_gives_is_checked_like_a_row(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        give(value)


def test_rows_of_a_function_are_trained_and_its_errors_named_by_line(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    quiz = [{"question": "w1", "answer": "w2"}, {"question": "w1", "bad": 1}, {"question": "w3", "answer": "w4 w5"}]
    path = fixtures.write_rows(tmp_path / "quiz.jsonl", quiz)
    rows = data.load_rows(path, tokenizer, format=read_quiz)
    assert [tokenizer.decode(row.tokens[row.trained]) for row in rows] == ["w2 <end>", "w4 w5 <end>"]
    assert list(rows.report.formats.values()) == ["tests.data.test_own_formats.read_quiz"]
    assert rows.report.skipped["left out by the format function"].where == [f"{path}:2"]
    # Of one source alone, with a keyword bound, as the config gives it.
    named = fixtures.write_rows(tmp_path / "named.jsonl", [{"question": "w1", "reply": "w6"}])
    bound = partial(read_quiz, answer="reply")
    both = [{"path": str(path), "format": read_quiz}, {"path": str(named), "format": bound}]
    assert len(data.load_rows(both, tokenizer)) == 3
    assert name_format(bound) == "tests.data.test_own_formats.read_quiz"
    with pytest.raises(
        DataError, match=r"quiz\.jsonl:1: tests\.data\.test_own_formats\.read_quiz raised KeyError: 'repl"
    ):
        data.load_rows(path, tokenizer, format=bound)


def test_a_function_that_ends_the_program_is_named_with_its_row(tmp_path: Path) -> None:
    def leave(row: dict[str, Any]) -> Any:
        raise SystemExit(*row["text"])

    path = fixtures.write_rows(tmp_path / "rows.jsonl", [{"text": "3"}])
    with pytest.raises(DataError, match=rf"{path}:1: .*leave raised SystemExit: 3$"):
        data.load_rows(path, data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0")), format=leave)
    with pytest.raises(RowError, match=r"leave raised SystemExit$"):
        get_format(leave)({"text": ""})


def test_rows_that_fit_several_formats_are_named_with_what_was_taken(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    rows = [{"instruction": "w1", "output": "w2"}, {"instruction": "w1", "output": "w2", "text": "w1 w2"}]
    path = fixtures.write_rows(tmp_path / "rows.jsonl", rows)
    report = data.load_rows(path, tokenizer).report
    assert report.noted_lines() == [f"rows with keys of text too, read as alpaca: 1 ({path}:2)"]
    assert data.load_rows(path, tokenizer, format="alpaca").report.notes == {}
