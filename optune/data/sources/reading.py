"""The rows of one file, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from optune.data.sources import cells, lines, tables
from optune.data.sources.source import TABLES, Mark, Record, Source
from optune.data.sources.values import BadRow


class Reader(NamedTuple):
    """`find(source, start)` yields the records from a mark on without looking into them; `parse(raw)` makes a row of
    one, or a BadRow."""

    find: Callable[[Source, Mark], Iterator[Record]]
    parse: Callable[[Any], Any]


READERS: dict[str, Reader] = {
    "jsonl": Reader(lines.find_lines, lines.parse_json_line),
    "json": Reader(lines.find_in_json, lines.keep),
    "txt": Reader(lines.find_lines, lines.parse_text_line),
    "csv": Reader(cells.find_cells, cells.parse_cells),
    "tsv": Reader(cells.find_cells, cells.parse_cells),
    "parquet": Reader(tables.find_table_rows, tables.parse_table_row),
    "arrow": Reader(tables.find_table_rows, tables.parse_table_row),
}


def read_records(source: Source, start: Mark | None = None) -> Iterator[Record]:
    """The records of `source` between its `first` and `stop`, from the mark on that an earlier record left."""
    start = start or Mark()
    if source.kind in TABLES and start.rows < source.first:
        start = Mark(source.first, source.first, source.first)
    if source.stop is not None and start.rows >= source.stop:
        return
    passed = None
    for record in READERS[source.kind].find(source, start):
        passed = record if record.after.rows <= source.first else None
        if passed is None:
            yield record
        if source.stop is not None and record.after.rows >= source.stop:
            return
    if passed is not None and isinstance(passed.raw, BadRow):  # The file could not be read up to the rows wanted.
        yield passed


def parse_record(source: Source, record: Record) -> Any:
    """The row of a record, or a BadRow."""
    return READERS[source.kind].parse(record.raw)


def read_rows(source: Source) -> Iterator[tuple[int, Any]]:
    """(number, row) of every row of `source`; a row is a JSON object, or a BadRow. Numbers are lines or rows, from 1;
    0 stands for the file as a whole."""
    for record in read_records(source):
        yield record.number, parse_record(source, record)


def count_rows(source: Source) -> int:
    """The rows of the whole file, broken ones too; of a file that cannot be read on, those before that."""
    count = tables.count_table_rows(source) if source.kind in TABLES else None
    return sum(1 for _ in READERS[source.kind].find(source, Mark())) if count is None else count
