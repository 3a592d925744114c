"""Files of rows: `read_rows` yields (place, row) for every row of a JSONL or JSON file.

JSONL is read as bytes and split at LF alone, so U+2028 inside a string is text; CR before LF, a byte order mark at the
start and blank lines are nothing. Every message names the physical line. Only the disk is looked at.

Another kind of source is another function that yields the same pairs, and a line in `_READERS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optune.errors import DataError

_LATER = {".parquet", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".bz2", ".xz", ".zip"}
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """One file of rows. `format` None: that of the data section."""

    path: Path
    format: str | None = None


@dataclass(frozen=True)
class BadRow:
    """What stands in place of a row that cannot be read."""

    problem: str


def list_sources(train: Any) -> list[Source]:
    """`train` as a list: a path, a mapping `{path, format}` (or an object with these attributes), or a list of these.

    Raises DataError, naming the absolute path, where a file is missing or of a kind that is not read.
    """
    entries = [train] if isinstance(train, str | Path | Mapping) or dataclasses.is_dataclass(train) else list(train)
    if not entries:
        raise DataError("no data file is named", where="data")
    return [_make_source(entry) for entry in entries]


def _make_source(entry: Any) -> Source:
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        entry = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    if isinstance(entry, str | Path):
        entry = {"path": entry}
    if not isinstance(entry, Mapping) or not entry.get("path"):
        raise DataError(f"a data source is a path or {{path, format}}, not {entry!r}", where="data")
    unknown = sorted(set(entry) - {"path", "format"})
    if unknown:
        raise DataError(f"a data source has the keys path and format, not {', '.join(unknown)}", where="data")
    path = Path(entry["path"]).expanduser().absolute()
    if path.is_dir():
        raise DataError("is a folder, wanted a .jsonl or .json file", where=str(path))
    if path.exists() and not path.is_file():
        raise DataError(
            "is not a regular file",
            where=str(path),
            hint="a device or pipe cannot be read twice: write the rows to a .jsonl file",
        )
    if not path.is_file():
        near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "data files are only looked up on this machine"
        raise DataError("no such data file", where=str(path), hint=hint)
    if path.suffix.lower() in _LATER:
        raise DataError(f"{path.suffix} files cannot be read", where=str(path), hint="give .jsonl or .json")
    return Source(path, entry.get("format"))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def read_rows(source: Source) -> Iterator[tuple[int, Any]]:
    """(line, row) of every row; a row is a JSON object, or a BadRow. Lines count from 1."""
    return _READERS.get(source.path.suffix.lower(), _read_jsonl)(source.path)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield number, _parse(content)


def _parse(content: bytes) -> Any:
    try:
        text = content.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: byte 0x{content[error.start]:02x} at position {error.start + 1} of the line")
    try:
        return _check(json.loads(text), text)
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}")


def _check(row: Any, text: str) -> Any:
    if not isinstance(row, dict):
        return BadRow(f"found {describe(row)}, wanted an object")
    if ("\\ud" in text or "\\uD" in text) and _LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        return BadRow("holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return row


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of objects, each with the line that it starts on; a file that is no list is read as JSONL."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        yield from _read_jsonl(path)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        yield line, BadRow(f"not UTF-8: byte 0x{content[error.start]:02x}")
        return
    yield from _split_list(text)


def _split_list(text: str) -> Iterator[tuple[int, Any]]:
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def skip(place: int) -> int:
        return blank.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]

    place, line, counted = skip(text.index("[") + 1), 1, 0
    while not text.startswith("]", place):
        line, counted = line + text.count("\n", counted, place), place
        try:
            row, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            is_syntax = isinstance(error, json.JSONDecodeError)
            bad_line = text.count("\n", 0, error.pos) + 1 if is_syntax else line
            yield bad_line, BadRow(f"not JSON: {error.msg if is_syntax else 'nested too deeply'}")
            return
        yield line, _check(row, text[place:end])
        place = skip(end)
        if text.startswith(",", place):
            place = skip(place + 1)
        elif not text.startswith("]", place):
            yield text.count("\n", 0, place) + 1, BadRow("not JSON: wanted ',' or ']' after a row")
            return
    after = skip(place + 1)
    if after < len(text):
        yield text.count("\n", 0, after) + 1, BadRow("not JSON: something follows the list")


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {".json": _read_json}


def describe(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if value is None or value != value:
        return "null" if value is None else "NaN"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def name_rows(places: Sequence[str], total: int) -> str:
    """The first few places of `total`, as messages name them."""
    more = f" and {total - len(places)} more" if total > len(places) else ""
    return ", ".join(places) + more
