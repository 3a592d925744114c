"""Cases A09 to A13: files and rows as people have them. What is broken is named by line, what is left out counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fixtures
from tests.cases.place import FINGERPRINT, Place, alpaca, encode, expected, reference_loss, targets, turns

ROWS = fixtures.numbered_rows(4)
LINES = [json.dumps(row) for row in ROWS]
BOM = "\ufeff"

FILES = {
    "plain": "".join(f"{line}\n" for line in LINES),
    "no line end at the end": "\n".join(LINES),
    "byte order mark": BOM + "".join(f"{line}\n" for line in LINES),
    "Windows line ends": "".join(f"{line}\r\n" for line in LINES),
    "blank lines": f"\n{LINES[0]}\n\n  \t \n" + "\n \n".join(LINES[1:]) + "\n\n\n",
    "all at once": f"{BOM}\r\n \r\n" + "\r\n\r\n".join(LINES) + "\r\n\r\n\r\n",
}


@pytest.fixture
def plain(place: Place) -> list[float]:
    """The losses of the four rows, each alone."""
    return place.fingerprint(ROWS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_holds_the_same_rows_however_it_was_saved(place: Place, plain: list[float], name: str) -> None:
    """A09."""
    (place.folder / "train.jsonl").write_bytes(FILES[name].encode())
    assert place.train(*FINGERPRINT).losses == plain
    assert "4 of 4 rows" in place.said
    assert "skipped" not in place.said


def test_a_json_list_holds_the_rows_of_the_jsonl_file(place: Place, plain: list[float]) -> None:
    """A09."""
    for number, text in enumerate((json.dumps(ROWS, indent=2), BOM + json.dumps(ROWS).replace("}, {", "},\r\n {"))):
        (place.folder / f"{number}.json").write_bytes(text.encode())
        assert place.train(*FINGERPRINT, f"data.train={number}.json").losses == plain


def test_a_unicode_line_separator_inside_a_string_is_no_line_end(place: Place) -> None:
    """A09."""
    row = json.dumps(turns("ua", "w1\u2028w2\u0085w3", "w4"), ensure_ascii=False)
    (place.folder / "train.jsonl").write_text(f"{row}\n{LINES[0]}\n", encoding="utf-8", newline="")
    place.train(*FINGERPRINT)
    assert "2 of 2 rows" in place.said


def test_a_file_in_another_encoding_is_refused_by_line(place: Place, no_weights: None) -> None:
    """A09."""
    for encoding in ("utf-16", "latin-1"):
        text = f"{LINES[0]}\n" + json.dumps(turns("ua", "é", "w1"), ensure_ascii=False) + "\n"
        (place.folder / "train.jsonl").write_bytes(text.encode(encoding))
        message = place.refuse().err
        assert f"train.jsonl:{1 if encoding == 'utf-16' else 2}" in message
        assert "UTF-8" in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not JSON"),
        ('{"messages": [{"role": "user", "content": "secret"}]', "not JSON"),
        ("[]", "wanted an object"),
        ("3", "wanted an object"),
        ('"secret"', "wanted an object"),
        ("null", "wanted an object"),
        ("secret", "not JSON"),
        ("{'messages': 'secret'}", "not JSON"),
        ('{"messages": "secret"}', "messages"),
        ('{"messages": [3]}', "messages[0]"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"messages": [{"content": "secret"}]}', "messages[0].role"),
        ('{"other": "secret"}', "messages"),
        ('{"messages": [{"role": "user", "content": "\\ud800 secret"}]}', "surrogate"),
    ],
)
def test_a_broken_line_is_named_by_file_and_physical_line(
    place: Place, no_weights: None, line: str, reason: str
) -> None:
    """A10."""
    (place.folder / "train.jsonl").write_text(f"\n{LINES[0]}\n\n{line}\n{LINES[1]}\n", encoding="utf-8")
    message = place.refuse().err
    assert f"{place.folder / 'train.jsonl'}:4: " in message
    assert reason in message
    assert "secret" not in message


def test_all_broken_lines_are_counted(place: Place, no_weights: None) -> None:
    """A10."""
    (place.folder / "train.jsonl").write_text(f"{LINES[0]}\n[]\n{LINES[1]}\n{{\n3\n", encoding="utf-8")
    message = place.refuse().err
    assert "train.jsonl:2: " in message
    assert "train.jsonl:4" in message
    assert "train.jsonl:5" in message


def test_an_empty_optional_cell_never_becomes_a_word(place: Place) -> None:
    """A11."""
    row = alpaca("w1 w2", "w3")
    empties: list[Any] = [row, row | {"input": None}, row | {"input": float("nan")}, row | {"input": ""}]
    empties += [row | {"input": "  "}, row | {"system": None, "history": None}, row | {"system": float("nan")}]
    losses = place.fingerprint(empties)
    assert len(losses) == 7
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(reference_loss(place.folder / "m0", [expected(turns("ua", "w1 w2", "w3"))]), 1e-6)
    filled = place.fingerprint([row | {"input": "w9"}])
    told = expected(turns("ua", "w1 w2\n\nw9", "w3"))
    assert filled[0] == pytest.approx(reference_loss(place.folder / "m0", [told]), 1e-6)
    assert filled != losses[:1]


@pytest.mark.parametrize(
    ("output", "found"),
    [({"a": 1, "b": None}, "an object"), (3, "a number"), (["w1"], "a list"), (True, "true or false")],
)
def test_a_structured_answer_is_named_by_line_field_and_type(
    place: Place, no_weights: None, output: Any, found: str
) -> None:
    """A12."""
    place.write([alpaca("w1", "w2"), alpaca("w3", output)])
    message = place.refuse().err
    assert "train.jsonl:2: " in message
    assert "'output'" in message
    assert f"found {found}, wanted text" in message
    if isinstance(output, list):
        return  # in a message, a list is one of parts
    place.write([turns("ua", "w1", "w2"), turns("ua", "w1", output)])
    message = place.refuse().err
    assert "train.jsonl:2: field 'messages[1].content'" in message
    assert f"found {found}, wanted text" in message


EMPTY = {
    "empty answer": turns("ua", "w1", ""),
    "white answer": turns("ua", "w1", "   "),
    "null answer": turns("ua", "w1", None),
    "no messages": {"messages": []},
    "one of two answers": turns("uaua", "w1", "w2", "w3", " \n"),
    "missing answer": {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant"}]},
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_turn_is_counted_and_teaches_nothing(place: Place, name: str) -> None:
    """A13."""
    good = place.fingerprint(ROWS[:3])
    assert place.fingerprint([*ROWS[:2], EMPTY[name], ROWS[2]]) == good
    assert "3 of 4 rows" in place.said
    assert "skipped 1 " in place.said
    assert "fingerprint.jsonl:3" in place.said


def test_an_empty_alpaca_answer_is_counted(place: Place) -> None:
    """A13."""
    good = place.fingerprint([alpaca("w1", "w2")])
    assert place.fingerprint([alpaca("w1", "w2"), alpaca("w3", ""), alpaca("w3", None)]) == good
    assert "skipped 2 " in place.said


def test_a_file_of_empty_answers_alone_is_refused_with_the_count(place: Place, no_weights: None) -> None:
    """A13."""
    place.write([EMPTY["empty answer"], EMPTY["null answer"]])
    message = place.refuse().err
    assert "none of the 2 rows" in message
    assert "2 an empty answer" in message


def test_a_call_of_a_tool_without_words_is_no_empty_answer(place: Place) -> None:
    """A13: `content` may be null beside `tool_calls`."""
    template = fixtures.CHAT_TEMPLATE.replace(
        "message['content'] +", "(message['content'] or message['tool_calls'][0]['function']['name']) +"
    )
    (place.folder / "m0/chat_template.jinja").write_text(template, encoding="utf-8")
    call = {"type": "function", "function": {"name": "w7", "arguments": "{}"}}
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    place.write([{"messages": messages}])
    assert targets(place.train()) == [len(encode("w7 <end>"))]


def test_no_row_at_all_is_refused(place: Place, no_weights: None) -> None:
    """A13."""
    for content in (b"", b"\n\n", b"\xef\xbb\xbf"):
        (place.folder / "train.jsonl").write_bytes(content)
        assert "no rows" in place.refuse().err
    (place.folder / "empty.json").write_bytes(b"[]")
    assert "no rows" in place.refuse("data.train=empty.json").err
    assert not list(Path.cwd().glob("out"))
