"""Whatever a file holds, reading it gives rows, or one DataError that names the file and, where it has them, the line.

Bounded: a few hundred files in all, drawn by hypothesis the same way every time. `FUZZ_EXAMPLES=1000` draws so many of
each kind instead, others every time.
"""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.data.sources import BadRow, list_sources, parse_record, read_records, read_rows
from optune.errors import DataError
from tests import fixtures

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
WORDS = "messages conversations role from content value instruction output prompt completion text tokens labels tools"
KEYS = f"{WORDS} tool_calls function name weight history system chosen rejected".split()
TEXT = st.text(max_size=8) | st.sampled_from(["user", "assistant", "gpt", "w1", "[]", "[{}]", '[{"role": "user"}]', ""])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
GOOD: list[dict[str, Any]] = [
    fixtures.chat("w1 w2", "w3"),
    {"messages": fixtures.chat("w4", "w5")["messages"], "tools": [{"function": {"name": "f", "parameters": None}}]},
    {"instruction": "w6", "input": None, "output": "w7\nw8"},
    {"text": "é w9"},
]
"""Rows that a mutation may break."""


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path_factory.mktemp("t0")))


def as_jsonl(rows: list[Any]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode("utf-8", "surrogatepass")


def as_json(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def as_cells(rows: list[Any], delimiter: str) -> bytes:
    rows = [row if isinstance(row, dict) else {"text": row} for row in rows]
    names = sorted({name for row in rows for name in row})
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(names)
    for row in rows:
        cells = [row.get(name) for name in names]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    return out.getvalue().encode("utf-8", "surrogatepass")


def as_table(rows: list[Any]) -> pyarrow.Table:
    try:
        return pyarrow.Table.from_pylist([row if isinstance(row, dict) else {"text": row} for row in rows])
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # no one type for the column
        return pyarrow.table({"text": [json.dumps(row) for row in rows]})


def as_parquet(rows: list[Any]) -> bytes:
    out = io.BytesIO()
    table = as_table(rows)
    try:
        pyarrow.parquet.write_table(table, out, row_group_size=2)
    except (pyarrow.ArrowException, OSError):  # a struct without members
        pyarrow.parquet.write_table(pyarrow.table({"text": ["w1"]}), out)
    return out.getvalue()


def as_arrow(rows: list[Any], make: Callable[..., Any]) -> bytes:
    out, table = io.BytesIO(), as_table(rows)
    with make(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


def as_zip(rows: list[Any]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/rows.jsonl", as_jsonl(rows))
        archive.writestr("rows.csv", as_cells(rows, ","))
    return out.getvalue()


def as_zst(rows: list[Any]) -> bytes:
    return pyarrow.Codec("zstd").compress(as_jsonl(rows), asbytes=True)


WRITERS: dict[str, Callable[[list[Any]], bytes]] = {
    "jsonl": as_jsonl,
    "json": as_json,
    "csv": lambda rows: as_cells(rows, ","),
    "tsv": lambda rows: as_cells(rows, "\t"),
    "txt": as_jsonl,
    "parquet": as_parquet,
    "arrow": lambda rows: as_arrow(rows, pyarrow.ipc.new_file),
    "stream.arrow": lambda rows: as_arrow(rows, pyarrow.ipc.new_stream),
    "jsonl.gz": lambda rows: gzip.compress(as_jsonl(rows)),
    "csv.bz2": lambda rows: bz2.compress(as_cells(rows, ",")),
    "json.xz": lambda rows: lzma.compress(as_json(rows)),
    "jsonl.zst": as_zst,
    "zip": as_zip,
}


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with a few bytes changed, taken out, put in, doubled, or cut off."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["change", "delete", "insert", "cut", "double"]))
        if kind == "change":
            content = content[:place] + draw(st.binary(min_size=1, max_size=2)) + content[place + 1 :]
        elif kind == "delete":
            content = content[:place] + content[place + draw(st.integers(1, 20)) :]
        elif kind == "insert":
            odd = [b"\0", b"\xff", b"\n", b"\r", b'"', b"\xef\xbb\xbf", b"[" * 300, b"NaN", b"\\ud800", b"1e999"]
            content = content[:place] + draw(st.sampled_from(odd)) + content[place:]
        elif kind == "cut":
            content = content[:place]
        else:
            content = content[:place] + content
    return content


def check(path: Path, tokenizer: data.Tokenizer) -> None:
    """Reads the file in every way; whatever is wrong with it has to be one DataError with a place."""
    place = re.compile(re.escape(str(path)) + r"(/[\w/.-]+)?(:\d+|: row \d+)?")
    for streaming in (False, True):
        try:
            rows: Any = data.load_rows(path, tokenizer, streaming=streaming)
            if streaming:
                data.build_batches(rows, batch_size=3).microbatches(0)
            else:
                assert all(row.trained.any() for row in rows)
        except DataError as error:
            assert all(place.fullmatch(part) for part in str(error.where).split(", ")), error
            assert "\n" not in str(error)
            assert error.exit_code == 2
    try:
        sources = list_sources(path)
    except DataError:
        return
    for source in sources:
        first = list(read_rows(source))
        for number, row in first:
            assert isinstance(row, dict | BadRow)
            assert place.fullmatch(source.place(number))
        if source.kind == "json":
            continue
        # From every mark, what follows is what followed in one go.
        records = list(read_records(source))
        for index, record in enumerate(records):
            if isinstance(record.raw, BadRow):
                continue
            rest = [(again.number, parse_record(source, again)) for again in read_records(source, record.after)]
            assert repr(rest) == repr(first[index + 1 :])


def folder(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp()


@pytest.mark.parametrize("kind", WRITERS)
def test_mutated_files_and_random_bytes(
    kind: str, t0: data.Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = folder(tmp_path_factory) / f"fuzz.{kind}"
    good = [WRITERS[kind]([row]) for row in GOOD] + [WRITERS[kind](GOOD[:2] * 2), WRITERS[kind](GOOD[2:3] * 4)]

    @given(st.data())
    @settings(max_examples=EXAMPLES or 12, deadline=None, derandomize=not EXAMPLES)
    def fuzz(draw: st.DataObject) -> None:
        path.write_bytes(
            draw.draw(st.one_of(st.sampled_from(good).flatmap(functools.partial(mutated)), st.binary(max_size=40)))
        )
        check(path, t0)

    fuzz()


@pytest.mark.parametrize("kind", WRITERS)
def test_random_values(kind: str, t0: data.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = folder(tmp_path_factory) / f"values.{kind}"

    @given(st.lists(JSON, max_size=4))
    @settings(max_examples=EXAMPLES or 6, deadline=None, derandomize=not EXAMPLES)
    def fuzz(rows: list[Any]) -> None:
        path.write_bytes(WRITERS[kind](rows))
        check(path, t0)

    fuzz()
