"""Streamed files as windows of rows: so many rows in a row of the files, found without reading what stands before.

A window begins at a `Place` in each entry of `data.train`. Entries are read side by side, always the one of which the
smallest share is read, so that all of them end together. A window is full at `rows` rows, or at `MOST_BYTES`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optune.data.sources import Mark, Record, Source, read_records
from optune.data.sources.source import TABLES
from optune.data.sources.tables import count_table_rows

MOST_BYTES = 64 * 1024 * 1024
"""Of the rows of a window as they stand in the file, each as often as it comes; long rows make a window of fewer
rows."""

_UNPACKED = 4
"""How much larger a compressed file is guessed to be; only shares depend on it."""


class Place(NamedTuple):
    """Where an entry is read on: which of its files, and the mark there."""

    file: int = 0
    mark: Mark = Mark()


class Item(NamedTuple):
    """A row of a window, not parsed yet: `source` counts through all files of all entries."""

    source: int
    record: Record


@dataclass(frozen=True)
class Window:
    """- `items`: its rows, in the order in which they were read.
    - `picks`: which of them an epoch has, in that order; one with a weight may come several times, or not.
    - `after`: the places behind it. `share`: of the epoch that is read then; exactly 1 where nothing follows.
    """

    items: list[Item]
    picks: np.ndarray
    after: tuple[Place, ...]
    share: float

    @property
    def is_last(self) -> bool:
        return self.share == 1


class Windows:
    """The windows of `sources`, as a function of the places where they begin."""

    def __init__(self, sources: Sequence[Source], rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._entries: list[_Entry] = []
        for number in range(sources[-1].entry + 1):
            files = [(index, source) for index, source in enumerate(sources) if source.entry == number]
            self._entries.append(_Entry(files))
        self._readers: tuple[tuple[Place, ...], list[_Reader]] | None = None

    @property
    def start(self) -> tuple[Place, ...]:
        """Where an epoch begins."""
        return tuple(Place() for _ in self._entries)

    def read(self, places: tuple[Place, ...], epoch: int) -> Window:
        """The window at `places`. Reading one after another goes on in the open files; any other place is sought."""
        if self._readers is not None and self._readers[0] == places:
            readers = self._readers[1]
        else:
            readers = [_Reader(entry, place) for entry, place in zip(self._entries, places, strict=True)]
        items: list[Item] = []
        times: list[int] = []
        size = 0.0
        while len(items) < self._rows and size < MOST_BYTES:
            open_readers = [reader for reader in readers if not reader.is_over]
            if not open_readers:
                break
            reader = min(open_readers, key=_Reader.share)
            item, bytes_read = reader.take()
            items.append(item)
            times.append(self._times(reader.entry.weight, epoch, item))
            size += bytes_read * max(1, times[-1])
        after = tuple(reader.place for reader in readers)
        self._readers = (after, readers)
        share = 1.0 if all(reader.is_over for reader in readers) else self.share(after)
        return Window(items, np.repeat(np.arange(len(items)), times), after, share)

    def share(self, places: tuple[Place, ...]) -> float:
        """The share of an epoch that is read at `places`; less than 1, since something may still follow."""
        total = sum(entry.size for entry in self._entries) or 1
        read = sum(entry.share(place) * entry.size for entry, place in zip(self._entries, places, strict=True))
        return min(read / total, 1 - 1e-9)

    def _times(self, weight: float, epoch: int, item: Item) -> int:
        """How often an epoch has a row: a weight's whole part, and its fraction by a draw of the row's own."""
        whole = math.floor(weight)
        if whole == weight:
            return whole
        row = f"{self._seed}/{epoch}/{item.source}/{item.record.after.rows}"
        digest = hashlib.blake2b(row.encode(), digest_size=8).digest()
        return whole + (int.from_bytes(digest, "little") / 2**64 < weight - whole)


class _Entry:
    """The files of an entry: (number, source) of each, and how long they are in the unit of their marks."""

    def __init__(self, files: list[tuple[int, Source]]) -> None:
        self.files = files
        self.weight = files[0][1].weight
        self.bytes = [source.path.stat().st_size * (_UNPACKED if _is_packed(source) else 1) for _, source in files]
        self.size = sum(self.bytes)
        self.lengths = [
            max(1, (count_table_rows(source) or 1) if source.kind in TABLES else size)
            for (_, source), size in zip(files, self.bytes, strict=True)
        ]

    def share(self, place: Place) -> float:
        """The share of the entry that stands before `place`."""
        if place.file == len(self.files):
            return 1.0
        source, mark, length = self.files[place.file][1], place.mark, self.lengths[place.file]
        inside = min(1.0, mark.offset / length)
        if source.stop is not None:
            inside = min(1.0, max(0, mark.rows - source.first) / (source.stop - source.first))
        return (sum(self.bytes[: place.file]) + inside * self.bytes[place.file]) / (self.size or 1)


class _Reader:
    """Reads an entry on from a place; always one row ahead, so that the end is known when it is reached."""

    def __init__(self, entry: _Entry, place: Place) -> None:
        self.entry, self.place = entry, place
        self._file = place.file
        self._records = self._read(place.mark)
        self._next: Record | None = None
        self._step()

    @property
    def is_over(self) -> bool:
        return self._next is None

    def share(self) -> float:
        return self.entry.share(self.place)

    def take(self) -> tuple[Item, float]:
        """The next row, and its bytes."""
        record = self._next
        assert record is not None
        file, before = self._file, self.place.mark.offset if self.place.file == self._file else 0
        per_offset = self.entry.bytes[file] / self.entry.lengths[file]
        self.place = Place(file, record.after)
        self._step()
        return Item(self.entry.files[file][0], record), (record.after.offset - before) * per_offset

    def _read(self, mark: Mark) -> Iterator[Record]:
        if self._file == len(self.entry.files):
            return iter(())
        return read_records(self.entry.files[self._file][1], mark)

    def _step(self) -> None:
        self._next = next(self._records, None)
        while self._next is None and self._file < len(self.entry.files):
            self._file += 1
            self._records = self._read(Mark())
            self._next = next(self._records, None)


def _is_packed(source: Source) -> bool:
    return source.packing is not None or source.member is not None
