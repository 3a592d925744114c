"""One file of rows, how it is opened, and the places in it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from optune.data.sources.values import BadRow
from optune.errors import DataError

KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".txt": "txt",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""How a file ends, and what it is then."""

TABLES = ("parquet", "arrow")
"""Kinds without lines: their rows are counted."""

LONGEST_LINE = 256 * 1024 * 1024
"""Bytes. A longer line is no row but a file of another kind."""

READ_ERRORS = (
    OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError,
)  # fmt: skip
"""What the libraries raise for damaged files; zipfile's RuntimeError is a password."""


@dataclass(frozen=True)
class Source:
    """One file of rows.

    - `format` None: that of the data section. `kind`: a value of `KINDS`. `packing`: a key of `PACKINGS`, or None.
    - `member`: the file meant inside a zip archive.
    - `first`, `stop`: of the file's rows, counted from 0, which are read; `stop` None: to the end.
    - `entry`: which entry of `data.train` the file belongs to, and that entry's `weight`.
    """

    path: Path
    format: str | None = None
    kind: str = "jsonl"
    packing: str | None = None
    member: str | None = None
    first: int = 0
    stop: int | None = None
    entry: int = 0
    weight: float = 1.0

    @property
    def name(self) -> str:
        """As messages name the file."""
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    def place(self, number: int) -> str:
        """Where a row is: `file:line`, `file: row 4` where a file has no lines, the file alone for number 0."""
        if not number:
            return self.name
        return f"{self.name}: row {number}" if self.kind in TABLES else f"{self.name}:{number}"


class Mark(NamedTuple):
    """A place between two rows of a file: bytes (of the unpacked file; in tables rows), lines and rows before it."""

    offset: int = 0
    lines: int = 0
    rows: int = 0


class Record(NamedTuple):
    """A row as the file has it: the line or row it begins at (from 1), what stands there, and the mark behind it."""

    number: int
    raw: Any
    after: Mark


def tell_kind(name: str) -> tuple[str | None, str | None]:
    """(kind, packing) of a file by its name; kind None where the name says nothing."""
    path = Path(name)
    packing = path.suffix.lower() if path.suffix.lower() in PACKINGS else None
    suffix = Path(path.stem).suffix if packing else path.suffix
    return KINDS.get(suffix.lower()), packing


def open_source(source: Source) -> BinaryIO:
    """The file's bytes, unpacked. Raises one of READ_ERRORS."""
    if source.member is not None:
        return zipfile.ZipFile(source.path).open(source.member)  # pyright: ignore[reportReturnType]
    return PACKINGS[source.packing](source.path) if source.packing else source.path.open("rb")


def _open_zst(path: Path) -> BinaryIO:
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream)  # pyright: ignore[reportArgumentType]


PACKINGS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}


def read_lines(source: Source, start: Mark) -> Iterator[Record]:
    """Every line from `start`, with its line end, LF alone ending one; a BadRow where the file cannot be read on."""
    offset, number, _ = start
    try:
        with open_source(source) as stream:
            _skip(stream, offset)
            while line := stream.readline(LONGEST_LINE):
                offset, number = offset + len(line), number + 1
                if len(line) == LONGEST_LINE:
                    yield Record(number, BadRow(f"a line of more than {LONGEST_LINE:,} bytes"), Mark(offset, number))
                    return
                yield Record(number, line, Mark(offset, number))
    except READ_ERRORS as error:
        yield Record(number + 1, BadRow(explain_read(source, error)), Mark(offset, number))


def explain_read(source: Source, error: BaseException) -> str:
    """What stopped the reading of a file."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    if source.packing is None and source.member is None:
        return f"cannot be read: {reason}"
    return f"cannot be unpacked from here on, the file is damaged or was cut short: {reason}"


def check_readable(path: Path) -> None:
    """Raises DataError for a file that may not be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _skip(stream: BinaryIO, offset: int) -> None:
    if offset and stream.seekable():
        stream.seek(offset)
        return
    while offset and (piece := stream.read(min(offset, 1 << 20))):
        offset -= len(piece)
