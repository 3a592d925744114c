"""Parquet and Arrow files (also those that the datasets library saves): rows by number, read a few at a time.

A struct column has one set of members for all rows, so storage gives each tool the members of all other tools, as
nulls. A null member of a struct inside a column is therefore no member: the row is again what it was before it was
stored. Nulls that mean something have to be stored as JSON text, which is taken as it is.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from typing import Any

from optune.data.sources.cells import parse_lists
from optune.data.sources.source import Mark, Record, Source, explain_read, open_source
from optune.data.sources.values import BadRow, decode_text, explain

_BATCH = 256
"""Rows turned into Python values at once."""

Decode = Callable[[Any], Any]


def find_table_rows(source: Source, start: Mark) -> Iterator[Record]:
    """The rows from `start.rows` on; raw is the row's columns and what decodes them."""
    import pyarrow

    rows = start.rows
    try:
        with open_source(source) as stream:
            schema, batches = _OPEN[source.kind](stream, rows)
            decoders = _find_json(schema)
            twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
            if twice is not None:
                yield Record(0, BadRow(f"the column {twice[:40]!r} stands twice"), Mark(rows, rows, rows))
                return
            for batch in batches:
                for first in range(0, batch.num_rows, _BATCH):
                    for row in _to_python(batch.slice(first, _BATCH)):
                        rows += 1
                        raw = row if isinstance(row, BadRow) else (row, decoders)
                        yield Record(rows, raw, Mark(rows, rows, rows))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # Before the first row, it is the file that cannot be opened.
        number = rows + 1 if rows else 0
        yield Record(number, BadRow(f"{_TITLES[source.kind]}: {explain_read(source, error)}"), Mark(rows, rows, rows))


def count_table_rows(source: Source) -> int | None:
    """The rows of a table, from its metadata where it has them; None where it cannot be read."""
    import pyarrow

    try:
        with open_source(source) as stream:
            if source.kind == "parquet":
                import pyarrow.parquet

                return pyarrow.parquet.ParquetFile(stream).metadata.num_rows
            return sum(batch.num_rows for batch in _open_arrow(stream, 0)[1])
    except (pyarrow.ArrowException, OSError, ValueError):
        return None


def parse_table_row(record: Any) -> Any:
    """A row as JSON knows it, or a BadRow."""
    if isinstance(record, BadRow):
        return record
    columns, decoders = record
    row = {}
    for name, value in columns.items():
        try:
            row[name] = decoders[name](_clean(value)) if name in decoders else _clean(value)
        except (ValueError, RecursionError) as error:
            return BadRow(f"column {name!r}: {explain(error)}")
    return parse_lists(row)


def _open_parquet(stream: Any, first: int) -> tuple[Any, Iterator[Any]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    groups, skipped = list(range(file.metadata.num_row_groups)), 0
    while groups and skipped + (rows := file.metadata.row_group(groups[0]).num_rows) <= first:
        skipped += rows
        del groups[0]
    return file.schema_arrow, _from(first - skipped, file.iter_batches(_BATCH, row_groups=groups))


def _open_arrow(stream: Any, first: int) -> tuple[Any, Iterator[Any]]:
    """Both forms of Arrow's IPC: the file with an index at its end, and the stream, which the datasets library uses."""
    import pyarrow

    magic = stream.read(6)
    stream.seek(0)
    if magic == b"ARROW1":
        file = pyarrow.ipc.open_file(stream)
        return file.schema, _from(first, (file.get_batch(i) for i in range(file.num_record_batches)))
    reader = pyarrow.ipc.open_stream(stream)
    return reader.schema, _from(first, iter(reader))


def _from(first: int, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        if first < batch.num_rows:
            yield batch.slice(first)
        first = max(0, first - batch.num_rows)


_OPEN = {"parquet": _open_parquet, "arrow": _open_arrow}
_TITLES = {"parquet": "not a whole Parquet file", "arrow": "not a whole Arrow file"}


def _find_json(schema: Any) -> dict[str, Decode]:
    """Decoders of the columns in which the datasets library keeps JSON as text (its feature `Json`)."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        decoders = {name: _decoder(feature) for name, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: decode for name, decode in decoders.items() if decode is not None}


def _decoder(feature: Any) -> Decode | None:
    if isinstance(feature, list):
        feature = {"_type": "List", "feature": feature[0]}
    if feature.get("_type") == "Json":
        return lambda value: decode_text(value) if isinstance(value, str) else value
    if feature.get("_type") in ("List", "LargeList"):
        inner = _decoder(feature["feature"])
        return None if inner is None else lambda value: None if value is None else [inner(item) for item in value]
    if isinstance(feature.get("_type"), str):
        return None
    members = {name: decode for name, inner in feature.items() if (decode := _decoder(inner)) is not None}
    if not members:
        return None

    def decode_members(value: Any) -> Any:
        return value and value | {name: decode(value[name]) for name, decode in members.items() if name in value}

    return decode_members


def _clean(value: Any) -> Any:
    """Without the nulls that structs have for other rows' members; what JSON does not know as text."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        return _read_bytes(value)
    return value


def _read_bytes(value: bytes) -> Any:
    """Some writers give text columns no type, so bytes that are UTF-8 are text. Others stay, in columns nobody uses."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _to_python(batch: Any) -> Iterator[Any]:
    """The rows as dictionaries; a BadRow for one that holds no value, such as text that is not UTF-8.

    Arrow does not look at what it reads: an offset that leads out of a damaged file's buffers would end the process.
    """
    try:
        batch.validate(full=True)
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            try:
                row.validate(full=True)
                yield from row.to_pylist()
            except (ValueError, OverflowError) as error:
                reason = str(error).partition("\n")[0]
                is_text = isinstance(error, UnicodeDecodeError) or "UTF8" in reason
                yield BadRow("a text that is not UTF-8" if is_text else f"a value that cannot be read: {reason}")
