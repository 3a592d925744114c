"""Files are read as bytes, and what is broken is named by file and physical line."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.sources import BadRow, list_sources, read_rows
from optune.errors import DataError
from tests import fixtures

ROWS = [
    fixtures.chat("w1 w2", "w3"),
    fixtures.chat("w4", "w5"),
    fixtures.chat("w6", "w7 w8"),
    fixtures.chat("w9", "ok"),
]
LINES = [json.dumps(row).encode() for row in ROWS]


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path_factory.mktemp("t0")))


def read(path: Path) -> list[tuple[int, Any]]:
    return [pair for source in list_sources(path) for pair in read_rows(source)]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"\n".join(LINES) + b"\n", [1, 2, 3, 4]),
        (b"\xef\xbb\xbf" + b"\n".join(LINES), [1, 2, 3, 4]),
        (b"\r\n".join(LINES) + b"\r\n", [1, 2, 3, 4]),
        (b"\n" + LINES[0] + b"\n\n   \n" + b"\n \t\n".join(LINES[1:]) + b"\n\n\n", [2, 5, 7, 9]),
        (b"\xef\xbb\xbf\n" + b"\n".join(LINES), [2, 3, 4, 5]),
    ],
    ids=["plain", "byte order mark", "CRLF", "blank lines", "mark on a blank line"],
)
def test_a09_line_ends_blank_lines_and_marks_change_nothing(
    tmp_path: Path, t0: data.Tokenizer, content: bytes, lines: list[int]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert read(path) == list(zip(lines, ROWS, strict=True))
    rows = data.load_rows(path, t0)
    assert rows.fingerprint() == data.load_rows(fixtures.write_rows(tmp_path / "plain.jsonl", ROWS), t0).fingerprint()
    assert [row.where for row in rows] == [f"{path}:{line}" for line in lines]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', r"not JSON: Expecting value at column 15: the line ends inside the row.*`jq -c \.`"),
        (b'{"messages": "w', "not JSON: Unterminated string starting at column 14: the line ends inside the row"),
        (b'{"messages": "\x01"}', "not JSON: Invalid control character at column 15$"),
        (b'[{"messages": 1},', r"column 18: the line ends inside the row.*`jq -c '\.\[\]'`"),
        (b"[]", "found a list, wanted an object"),
        (b"3", "found a number, wanted an object"),
        (b'"x"', "found text, wanted an object"),
        (b'{"messages": "\xff"}', "not UTF-8: byte 0xff at position 15"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a10_a_broken_line_is_named_by_file_and_physical_line(
    tmp_path: Path, t0: data.Tokenizer, line: bytes, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + LINES[0] + b"\n\n" + line + b"\n" + LINES[1] + b"\n")
    with pytest.raises(DataError, match=reason) as caught:
        data.load_rows(path, t0)
    assert caught.value.where == f"{path}:4"
    assert "messages" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_broken_lines_are_told_at_once(tmp_path: Path, t0: data.Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([LINES[0], b"[]", LINES[1], b"{", b"7"]))
    with pytest.raises(DataError, match=rf"{path}:2: .* \(of 5 rows 2 more cannot be used: {path}:4, {path}:5\)"):
        data.load_rows(path, t0)


def test_only_lf_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    odd = {"text": "a\u2028b\u2029c\x85d\x0be\x0cf"}
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\n" + json.dumps({"text": "x"}) + "\n", encoding="utf-8")
    assert read(path) == [(1, odd), (2, {"text": "x"})]


def test_json_lists_know_the_line_of_every_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2))
    text = path.read_text().splitlines()
    assert [row for _, row in read(path)] == ROWS
    assert [number for number, _ in read(path)] == [n for n, line in enumerate(text, start=1) if line == "  {"]
    path.write_bytes(b"\xef\xbb\xbf\n[]\n")
    assert read(path) == []
    path.write_bytes(b"\n".join(LINES))  # JSONL under the wrong name.
    assert [row for _, row in read(path)] == ROWS


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', 3),
        ('[\n{"a": 1}\n{"a": 2}]', 3),
        ('[{"a": 1}]\n\nx', 3),
        ("[\n3,\n{}]", 2),
        ("[{}", 1),
    ],
)
def test_broken_json_lists_are_named_by_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    bad = [number for number, row in read(path) if isinstance(row, BadRow)]
    assert bad == [line]


@pytest.mark.parametrize(
    ("content", "way_out"),
    [
        ({"messages": [{"role": "user", "content": "w1"}]}, "`jq -c .`"),
        ({"version": 1, "data": [{"text": "w1"}]}, "`jq -c '.[\"data\"][]'` writes the objects of 'data' so"),
        ({"text": "w1"}, "`jq -c .`"),
    ],
)
def test_an_object_over_several_lines_is_told_with_the_way_out(
    tmp_path: Path, content: dict[str, Any], way_out: str
) -> None:
    """In one line it is a row."""
    path = tmp_path / "rows.json"
    path.write_text("\n" + json.dumps(content))
    assert read(path) == [(2, content)]
    path.write_text("\n" + json.dumps(content, indent=2) + "\n")
    ((line, bad),) = read(path)
    assert line == 2
    assert isinstance(bad, BadRow)
    assert bad.problem.startswith("found an object over several lines, wanted a list of objects")
    assert way_out in bad.problem
    path.write_text(f"{json.dumps({'text': 'w1'}, indent=1)}\n" * 2)
    assert "`jq -c .`" in read(path)[0][1].problem


def test_nan_is_null_but_no_weight(tmp_path: Path, t0: data.Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w1", "weight": NaN, "n": [NaN, {"x": NaN}]}\n')
    assert read(path) == [(1, {"text": "w1", "weight": None, "n": [None, {"x": None}]})]
    for turn in (
        '{"role": "assistant", "content": "w2", "weight": NaN}',
        '{"from": "gpt", "value": "w2", "weight": NaN}',
    ):
        key = "messages" if "role" in turn else "conversations"
        path.write_text(f'{{"{key}": [{turn}]}}\n')
        with pytest.raises(DataError, match=r"\[0\].weight': found NaN, wanted a number from 0 to 10,000"):
            data.load_rows(path, t0)


def test_a_csv_row_without_an_answer_is_skipped_as_in_any_other_file(tmp_path: Path, t0: data.Tokenizer) -> None:
    for name, header, empty in (
        ("a.csv", "prompt,completion", "w1,"),
        ("b.csv", "instruction,input,output", "w1,,"),
        ("c.csv", "text,n", ",3"),
    ):
        good = {"a.csv": "w1,w2", "b.csv": "w1,,w2", "c.csv": "w1,"}[name]
        path = tmp_path / name
        path.write_text(f"{header}\n{empty}\n{good}\n")
        rows = data.load_rows(path, t0)
        assert [row.where for row in rows] == [f"{path}:3"]
        (reason,) = rows.report.skipped
        assert reason == ("an empty text" if name == "c.csv" else "an empty answer")
        assert rows.report.skipped[reason].where == [f"{path}:2"]


def test_a07_a_missing_file_is_named_by_its_absolute_path_and_never_looked_up(
    tmp_path: Path, t0: data.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    fixtures.write_rows(tmp_path / "data" / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=f"{tmp_path}/data/trian.jsonl: no such data file") as caught:
        data.load_rows("data/trian.jsonl", t0)
    assert caught.value.hint == f"did you mean {tmp_path}/data/train.jsonl?"
    with pytest.raises(DataError, match=f"{tmp_path}/someone/dataset: no such data file"):
        data.load_rows("someone/dataset", t0)
    assert len(data.load_rows("data/train.jsonl", t0)) == 4


def test_devices_and_pipes_are_refused_without_waiting_for_them(tmp_path: Path, t0: data.Tokenizer) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/null", str(tmp_path / "pipe.jsonl")):
        with pytest.raises(DataError, match=f"{path}: is not a regular file"):
            data.load_rows(path, t0)


@pytest.mark.parametrize(
    ("lines", "is_hinted"),
    [
        (['{"text": "w1"}', "{"], False),
        (['{"text": "w1"}', "[1]"], False),
        (['{"text": 5}'], False),
        (['{"other": 5}'], False),
        (['{"messages": 5}'], False),
        (['{"text": "w1"}', '{"messages": []}'], True),
        (['{"messages": 5, "text": "w1"}'], True),
    ],
)
def test_another_format_is_advised_only_where_the_row_may_have_one(
    tmp_path: Path, t0: data.Tokenizer, lines: list[str], is_hinted: bool
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        data.load_rows(tmp_path / "a.jsonl", t0)
    assert ("data.format" in (caught.value.hint or "")) is is_hinted


def test_what_is_no_source_is_refused_by_name(tmp_path: Path, t0: data.Tokenizer) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: the folder holds no file of rows"):
        data.load_rows(tmp_path, t0)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=f"{tmp_path}/rows.parquet: not a whole Parquet file"):
        data.load_rows(tmp_path / "rows.parquet", t0)
    with pytest.raises(DataError, match="has the keys path, format, weight, max_rows, split, name, not wieght"):
        data.load_rows([{"path": "x", "wieght": 2}], t0)
    with pytest.raises(DataError, match="no data file is named"):
        data.load_rows([], t0)


@dataclass
class Entry:
    path: str
    format: str | None = None


def test_several_sources_follow_one_another_each_in_its_format(tmp_path: Path, t0: data.Tokenizer) -> None:
    first = fixtures.write_rows(tmp_path / "a.jsonl", ROWS[:2])
    second = fixtures.write_rows(tmp_path / "b.jsonl", [{"instruction": "w1", "output": "w2", "text": "w3"}])
    mixed = data.load_rows([str(first), {"path": str(second), "format": "text"}], t0)
    assert [row.where for row in mixed] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    assert mixed.report.formats == {str(first): "messages", str(second): "text"}
    as_objects = data.load_rows([Entry(str(first)), Entry(str(second), "text")], t0)
    assert as_objects.fingerprint() == mixed.fingerprint()


def test_files_without_rows_are_an_error(tmp_path: Path, t0: data.Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match=f"{path}: no rows"):
        data.load_rows(path, t0)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_WORDS = "messages conversations role from content value instruction output prompt completion text tokens labels tools"
_KEYS = f"{_WORDS} tool_calls function name weight history system".split(" ")
_ROWS = st.recursive(
    _JSON | st.sampled_from(["user", "assistant", "gpt", "human", "w1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(
    lines=st.lists(st.binary(max_size=30) | _ROWS.map(lambda row: json.dumps(row).encode()), min_size=1, max_size=4),
    suffix=st.sampled_from([".jsonl", ".json"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_a_file_holds_the_answer_is_rows_or_an_error_that_names_it(
    t0: data.Tokenizer, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(b"\n".join(lines))
    try:
        rows = data.load_rows(path, t0)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert all(row.trained.any() for row in rows)
