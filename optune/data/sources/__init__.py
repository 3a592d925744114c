"""Sources of rows: `list_sources` finds the files that a config means, `read_rows` yields (number, row) of one.

A number is the physical line, in tables the row; `Source.place` makes a place for messages of it. Only the disk is
looked at, unless a path begins with `hf://`. Another kind of file is a pair of functions in `READERS` and its suffix in
`source.KINDS`.
"""

from optune.data.sources.entries import list_sources
from optune.data.sources.overlap import find_common, find_twice
from optune.data.sources.reading import READERS, count_rows, parse_record, read_records, read_rows
from optune.data.sources.source import Mark, Record, Source
from optune.data.sources.values import BadRow, describe

__all__ = [
    "READERS",
    "BadRow",
    "Mark",
    "Record",
    "Source",
    "count_rows",
    "describe",
    "find_common",
    "find_twice",
    "list_sources",
    "parse_record",
    "read_records",
    "read_rows",
]
