"""Cases A09 to A13: files and rows as people have them. What is broken is named by line, what is left out counted."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
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


def write_kinds(folder: Path, rows: Sequence[Any], **columns: Any) -> list[str]:
    """The rows as CSV, Parquet, Arrow and in compressed files; the names. `columns` are added to each row of tables."""
    table = pyarrow.Table.from_pylist([row | columns for row in rows])
    pyarrow.parquet.write_table(table, folder / "t.parquet", row_group_size=3)
    with pyarrow.OSFile(str(folder / "t.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow(["" if c is None else c if isinstance(c, str) else json.dumps(c) for c in cells])
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "t.jsonl.xz").write_bytes(lzma.compress(text))
    (folder / "t.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(text, asbytes=True))
    (folder / "t.csv.bz2").write_bytes(bz2.compress((folder / "t.csv").read_bytes()))
    with zipfile.ZipFile(folder / "t.zip", "w") as archive:
        archive.writestr("in/t.jsonl", text)
    return ["t.parquet", "t.arrow", "t.csv", "t.jsonl.gz", "t.jsonl.xz", "t.jsonl.zst", "t.csv.bz2", "t.zip"]


@pytest.mark.slow
def test_the_same_rows_train_alike_from_every_kind_of_file(place: Place, plain: list[float], no_network: None) -> None:
    """A09, A07: byte order mark, Windows line ends and blank lines in CSV too; and nothing asks a network."""
    for name in write_kinds(place.folder, ROWS):
        assert place.train(*FINGERPRINT, f"data.train={name}").losses == plain, name
        assert "4 of 4 rows" in place.said
    content = (place.folder / "t.csv").read_bytes()
    (place.folder / "odd.csv").write_bytes(BOM.encode() + content.replace(b"\r\n", b"\n").replace(b"\n", b"\n\n"))
    assert place.train(*FINGERPRINT, "data.train=odd.csv").losses == plain
    parts = place.folder / "parts"
    for index, row in enumerate(ROWS):
        place.write([row], f"parts/train-{index}.jsonl")
    assert place.train(*FINGERPRINT, f"data.train={parts}").losses == plain
    assert place.train(*FINGERPRINT, "data.train='parts/*.jsonl'").losses == plain
    words = ("data.train=[{path: parts, split: 'train[:50%]', weight: 2}, {path: t.csv, max_rows: 3}]",)
    assert place.train(*FINGERPRINT, *words).losses == [*plain[:2], *plain[:2], *plain[:3]]


def test_a_broken_row_of_a_table_or_archive_is_named_by_its_place(place: Place, no_weights: None) -> None:
    """A10, A12."""
    rows: list[Any] = [alpaca("w1", "w2"), alpaca("w3", "w4"), {"instruction": "w5", "output": None}]
    broken: dict[str, tuple[str, str]] = {}
    table = pyarrow.table({"instruction": ["w1", "w3"], "output": [[1], [2]]})
    pyarrow.parquet.write_table(table, place.folder / "a.parquet")
    broken["a.parquet"] = ("a.parquet: row 1: ", "field 'output': found a list, wanted text")
    (place.folder / "a.csv").write_text('instruction,output\nw1,"w2\n"\nw3\n')
    broken["a.csv"] = ("a.csv:4: ", "found 1 cells, wanted 2")
    text = "".join(f"{json.dumps(row)}\n" for row in rows) + "[]\n"
    (place.folder / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    broken["a.jsonl.gz"] = ("a.jsonl.gz:4: ", "found a list, wanted an object")
    noise = json.dumps({"text": " ".join(f"w{i * i}" for i in range(5000))}).encode()
    (place.folder / "cut.jsonl.gz").write_bytes(gzip.compress(f"{LINES[0]}\n".encode() + noise)[:-200])
    broken["cut.jsonl.gz"] = ("cut.jsonl.gz:2: ", "cannot be unpacked from here on")
    with zipfile.ZipFile(place.folder / "a.zip", "w") as archive:
        archive.writestr("in/b.jsonl", f"{LINES[0]}\n{{")
    broken["a.zip"] = ("a.zip/in/b.jsonl:2: ", "not JSON")
    (place.folder / "no.parquet").write_bytes(b"PAR1 and nothing more PAR1")
    broken["no.parquet"] = ("no.parquet: ", "not a whole Parquet file")
    for name, (where, problem) in broken.items():
        message = place.refuse(f"data.train={name}").err
        assert f"{place.folder}/{where}" in message
        assert problem in message


def test_an_empty_cell_of_a_table_never_becomes_a_word(place: Place) -> None:
    """A11."""
    losses = place.fingerprint([alpaca("w1 w2", "w3"), alpaca("w4", "w5", input="w6")])
    rows = [alpaca("w1 w2", "w3", input=None, system=""), alpaca("w4", "w5", input="w6", system=None)]
    for name in write_kinds(place.folder, rows, score=float("nan")):
        assert place.train(*FINGERPRINT, f"data.train={name}").losses == losses, name
    nan = pyarrow.table({"instruction": ["w1 w2"], "input": [float("nan")], "output": ["w3"]})
    pyarrow.parquet.write_table(nan, place.folder / "nan.parquet")
    assert place.train(*FINGERPRINT, "data.train=nan.parquet").losses == losses[:1]


def test_tools_of_one_row_do_not_enter_the_prompt_of_another(place: Place) -> None:
    """A16."""
    shown = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    # Each character of the schema is a token of its own, so that a word more would be seen in the loss.
    backend = json.loads((place.folder / "m0/tokenizer.json").read_text())
    apart = {"type": "Split", "pattern": {"Regex": "[^a-z0-9<>]"}, "behavior": "Isolated", "invert": False}
    backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [backend["pre_tokenizer"], apart]}
    (place.folder / "m0/tokenizer.json").write_text(json.dumps(backend))
    template = fixtures.CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}" + shown)
    (place.folder / "m0/chat_template.jinja").write_text(template)

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rows = [
        turns("ua", "w1", "w2") | {"tools": [tool("f", a={"type": "string"})]},
        turns("ua", "w3", "w4") | {"tools": [tool("g", b={"type": "integer"}), tool("h")]},
    ]
    place.write(rows, "both.jsonl")
    both = place.train(*FINGERPRINT, "data.train=both.jsonl")
    alone = place.fingerprint(rows[:1])
    assert both.losses[:1] == alone
    tokens = [line["tokens"] for line in both.metrics]
    for name in write_kinds(place.folder, rows):
        run = place.train(*FINGERPRINT, f"data.train={name}")
        assert run.losses == both.losses, name
        assert [line["tokens"] for line in run.metrics] == tokens


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
