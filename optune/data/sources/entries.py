"""`list_sources`: what `data.train` or `data.validation` says, as files and the rows of them that are meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optune.data.sources.finding import find_files
from optune.data.sources.reading import count_rows
from optune.data.sources.source import TABLES, Source
from optune.data.sources.splits import Split, parse_split
from optune.errors import DataError

MOST_WEIGHT = 10_000
"""Of a source: each of its rows so often an epoch."""

KEYS = ("path", "format", "weight", "max_rows", "split", "name")


def list_sources(train: Any, *, may_count: bool = True) -> list[Source]:
    """The files of `train`: a path, a mapping with `KEYS` (or an object with these attributes), or a list of these.

    A path may be a file, a folder, a pattern (`data/*.jsonl`), or `hf://OWNER/NAME`. `split` and `max_rows` hold for
    the files of an entry together. Without `may_count`, what would need the number of rows of a long file is refused.

    Raises DataError, naming the absolute path, where a file is missing or cannot be read.
    """
    entries = [train] if isinstance(train, str | Path | Mapping) or dataclasses.is_dataclass(train) else list(train)
    if not entries:
        raise DataError("no data file is named", where="data")
    return [source for number, entry in enumerate(entries) for source in _find(_read_entry(entry), number, may_count)]


def _read_entry(entry: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        entry = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    if isinstance(entry, str | Path):
        entry = {"path": entry}
    if not isinstance(entry, Mapping) or not entry.get("path"):
        raise DataError(f"a data source is a path or a mapping with path, not {entry!r}", where="data")
    unknown = sorted(set(entry) - set(KEYS))
    if unknown:
        raise DataError(f"a data source has the keys {', '.join(KEYS)}, not {', '.join(unknown)}", where="data")
    weight, max_rows = entry.get("weight"), entry.get("max_rows")
    if not (weight is None or 0 < weight <= MOST_WEIGHT):
        raise DataError(f"weight: {weight} must be above 0 and at most {MOST_WEIGHT:,}", where=str(entry["path"]))
    if not (max_rows is None or max_rows > 0):
        raise DataError(f"max_rows: {max_rows} must be above 0", where=str(entry["path"]))
    return dict(entry)


def _find(entry: Mapping[str, Any], number: int, may_count: bool) -> list[Source]:
    text = str(entry["path"])
    split = Split() if entry.get("split") is None else parse_split(entry["split"], text)
    weight = 1.0 if entry.get("weight") is None else float(entry["weight"])
    found = [
        dataclasses.replace(source, format=entry.get("format"), entry=number, weight=weight)
        for source in find_files(text, split, entry.get("name"))
    ]
    most = entry.get("max_rows")
    return _limit(found, split, most, may_count) if split.is_sliced or most is not None else found


def _limit(found: Sequence[Source], split: Split, most: int | None, may_count: bool) -> list[Source]:
    """The files with the rows that are meant, counted through all files; files without any are left out."""
    counts: dict[int, int] = {}

    def count(index: int) -> int:
        if not may_count and found[index].kind not in TABLES:
            raise DataError(
                "its rows would have to be counted to know which are meant, and a streamed file is not read ahead",
                where=found[index].name,
                hint="[100:200] and max_rows work on a single file; for shares, from the end, or for many files, "
                "turn data.streaming off",
            )
        return counts.setdefault(index, count_rows(found[index]))

    total = sum(map(count, range(len(found)))) if split.needs_count else None
    first, stop = split.resolve(total)
    if most is not None:
        stop = first + most if stop is None else min(stop, first + most)
    limited, before = [], 0
    for index, source in enumerate(found):
        if stop is not None and before >= stop:
            break
        is_last = index == len(found) - 1
        rows = None if is_last else count(index)
        begin, end = max(0, first - before), None if stop is None else stop - before
        if (rows is None or begin < rows) and (end is None or begin < end):
            limited.append(dataclasses.replace(source, first=begin, stop=end))
        before += rows or 0
    if not limited:
        raise DataError("the split takes no row", where=found[0].name)
    return limited
