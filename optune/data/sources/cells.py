"""CSV and TSV: the first record names the columns, an empty cell is null, every other cell is text.

Cells of the columns that formats want as lists (`values.LISTS`) hold JSON. A record may span lines inside quotes
(RFC 4180); it is named by the line on which it begins.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from optune.data.sources.lines import MARK
from optune.data.sources.source import Mark, Record, Source, read_lines
from optune.data.sources.values import LISTS, BadRow, decode_text, describe, explain

MAYBE_LISTS = ("chosen", "rejected", "prompt", "completion")
"""Columns whose cells are a chat in JSON where they are a list of objects, and text otherwise."""


class _Cells(NamedTuple):
    names: list[str]
    cells: list[str]


class _Lines:
    """Decoded lines for the csv module, which asks for them one by one; `after` is the mark behind the last one."""

    def __init__(self, source: Source, start: Mark) -> None:
        self._lines, self.after, self.broken = read_lines(source, start), start, None

    def __iter__(self) -> Iterator[str]:
        for number, line, after in self._lines:
            if isinstance(line, BadRow):
                self.broken = Record(number, line, after)
                return
            self.after = after
            # Bytes that are no UTF-8 become lone surrogates here, so that the record which holds them can be named.
            yield (line.removeprefix(MARK) if number == 1 else line).decode("utf-8", "surrogateescape")


def find_cells(source: Source, start: Mark) -> Iterator[Record]:
    """The records behind the header; raw is the names of the columns and the cells."""
    csv.field_size_limit(2**31 - 1)  # The module's own limit of 131,072 characters is less than a long chat.
    names: list[str] = []
    if start.rows:
        header = next(_find_records(source, Mark()), None)
        names = header.raw if header is not None and isinstance(header.raw, list) else []
    rows = start.rows
    for number, cells, after in _find_records(source, start):
        if isinstance(cells, list) and not names:
            if problem := _check_names(cells):
                yield Record(number, BadRow(problem), after._replace(rows=rows + 1))
                return
            names = cells
            continue
        rows += 1
        yield Record(number, _Cells(names, cells) if isinstance(cells, list) else cells, after._replace(rows=rows))
        if not names:  # Without a header nothing behind it has a meaning.
            return


def _find_records(source: Source, start: Mark) -> Iterator[Record]:
    lines = _Lines(source, start)
    reader = csv.reader(iter(lines), delimiter="\t" if source.kind == "tsv" else ",", strict=True)
    while True:
        begins = lines.after.lines + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield Record(begins, BadRow(f"not {source.kind.upper()}: {error}"), lines.after)
            continue
        if any(cell.strip() for cell in cells):
            yield Record(begins, cells, lines.after)
    if lines.broken is not None:
        yield lines.broken


def _check_names(names: list[str]) -> str | None:
    if problem := _check_text("".join(names)):
        return problem
    twice = next((name for name in names if name and names.count(name) > 1), None)
    return f"the column {twice[:40]!r} stands twice in the header" if twice else None


def parse_cells(record: Any) -> Any:
    """A record as its row, or a BadRow. A column without a name (an index that pandas wrote) is left out."""
    if isinstance(record, BadRow):
        return record
    names, cells = record
    if len(cells) != len(names):
        return BadRow(f"found {len(cells)} cells, wanted {len(names)}, as the header has")
    row = {}
    for name, cell in zip(names, cells, strict=True):
        if problem := _check_text(cell):
            return BadRow(f"column {name!r}: {problem}")
        if name:
            row[name] = cell if cell.strip() else None
    return parse_lists(row)


def _check_text(text: str) -> str | None:
    if "\0" in text:
        return "holds NUL bytes, as a file in another encoding does"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not UTF-8: byte 0x{ord(text[error.start]) - 0xDC00:02x}"
    return None


def parse_lists(row: dict[str, Any]) -> Any:
    """`row` with the JSON text of list columns parsed, or a BadRow; shared with tables."""
    for name in LISTS:
        if isinstance(row.get(name), str):
            value = row[name] = _parse_list(row[name])
            if isinstance(value, BadRow):
                return BadRow(f"column {name!r}: {value.problem}")
    for name in MAYBE_LISTS:
        if isinstance(text := row.get(name), str) and text.lstrip().startswith("["):
            value = _parse_list(text)
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                row[name] = value
    return row


def _parse_list(text: str) -> Any:
    if not text.strip():
        return None
    try:
        value = decode_text(text)
    except json.JSONDecodeError as error:
        return BadRow(f"{explain(error)} (a list is written in JSON here, not as Python prints it)")
    except (ValueError, RecursionError) as error:
        return BadRow(explain(error))
    return value if value is None or isinstance(value, list) else BadRow(f"found {describe(value)}, wanted a list")
