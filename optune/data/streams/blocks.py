"""The windows of a stream in blocks: so many rows encoded at once, in the order in which they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optune.data.collating import permute
from optune.data.encoder import NO_STOP, EncodedChunk, RowEncoder, first_format
from optune.data.formats import Format
from optune.data.packing import assign_packs, group_packs
from optune.data.rows import Report, Row
from optune.data.sources import Source, parse_record, read_rows
from optune.data.streams.position import Position
from optune.data.streams.windows import Place, Window, Windows

DEFAULT_WINDOW = 10_000
"""Rows."""

_BLOCK, _PACKED_BLOCK = 256, 1024
"""Rows; with packing more, so that packs are filled well."""

_ROW_STREAM, _PACK_STREAM = 1 << 40, 1 << 41
"""Of random numbers: one for each window; `batches` and `mixing` have the small ones."""

Unit = list[Row]


@dataclass(frozen=True)
class StreamedRows:
    """Rows that are read as they are needed: the files, and what encodes them. `window`: rows shuffled together."""

    sources: Sequence[Source]
    encoder: RowEncoder
    format: Format
    window: int | None = None


@dataclass(frozen=True)
class Block:
    units: list[Unit]
    report: Report


class Blocks:
    """Windows and blocks at a position, the newest of each kept. A block does not depend on the ones before it."""

    def __init__(self, rows: StreamedRows, *, shuffle: bool, packing: bool, max_length: int | None, seed: int) -> None:
        self._rows, self._shuffle, self._is_packed = rows, shuffle, packing
        self._max_length, self._seed = max_length, seed
        self.windows = Windows(rows.sources, rows.window or DEFAULT_WINDOW, seed)
        self._window: tuple[tuple[int, tuple[Place, ...]], Window] | None = None
        self._block: tuple[tuple[int, tuple[Place, ...], int], Block] | None = None
        self._formats: dict[int, str | None] = {}

    @property
    def size(self) -> int:
        """Rows of a block."""
        return _PACKED_BLOCK if self._is_packed else _BLOCK

    def window(self, position: Position) -> Window:
        """The window of `position`, its picks in the order of the epoch."""
        key = (position.epoch, position.places)
        if self._window is None or self._window[0] != key:
            self._window = None  # before the next one is read: one window is in memory
            window = self.windows.read(position.places, position.epoch)
            if self._shuffle:
                order = permute(len(window.picks), self._seed, position.epoch, _ROW_STREAM + position.window)
                window = replace(window, picks=window.picks[order])
            self._window = key, window
        return self._window[1]

    def block(self, position: Position) -> Block:
        """The block of `position`. Raises DataError for a broken row in it."""
        key = (position.epoch, position.places, position.block)
        if self._block is None or self._block[0] != key:
            window, size = self.window(position), self.size
            picks = window.picks[position.block * size : (position.block + 1) * size]
            rows, report = self._encode(window, picks)
            units = self._pack(rows, position) if self._is_packed else [[row] for row in rows]
            self._block = key, Block(units, report)
        return self._block[1]

    def _encode(self, window: Window, picks: np.ndarray) -> tuple[list[Row], Report]:
        """The rows of a block that are kept, in its order. Each is encoded once, however often it comes."""
        by_source: dict[int, list[tuple[str, Any]]] = {}
        for index in dict.fromkeys(picks.tolist()):
            number, record = window.items[index]
            source = self._rows.sources[number]
            by_source.setdefault(number, []).append((source.place(record.number), parse_record(source, record)))
        report, kept = Report(), dict[tuple[int, str], Row]()
        for number, pairs in by_source.items():
            chunk = self._encode_source(number, pairs)
            report.merge(chunk.report)
            kept |= {(number, row.where): row for row in chunk.rows}
        places = [(window.items[index].source, window.items[index].record.number) for index in picks.tolist()]
        found = (kept.get((number, self._rows.sources[number].place(row))) for number, row in places)
        rows = [row for row in found if row is not None]
        # A weight makes a row come more often, and not more rows.
        report.kept, report.tokens = len(kept), sum(len(row.tokens) for row in kept.values())
        report.targets = sum(int(row.trained.sum()) for row in kept.values())
        report.longest = max((len(row.tokens) for row in rows), default=0)
        teaches_stop = self._rows.encoder.tokenizer.teaches_stop
        if rows and not any(teaches_stop(row.tokens, row.trained) for row in rows):
            report.note(NO_STOP, rows[0].where, len(rows))
        return rows, report

    def _encode_source(self, number: int, pairs: list[tuple[str, Any]]) -> EncodedChunk:
        source = self._rows.sources[number]
        format = source.format or self._rows.format
        detected = self._detect(number) if format == "auto" else None
        chunk = self._rows.encoder.encode(pairs, format, source=source.name, detected=detected)
        if chunk.errors:
            raise chunk.errors[0]
        return chunk

    def _detect(self, number: int) -> str | None:
        """The format that the first row of a file tells, wherever in it the stream stands."""
        if number not in self._formats:
            source = self._rows.sources[number]
            rows = ((source.place(line), row) for line, row in read_rows(source))
            self._formats[number] = next((told for pair in rows if (told := first_format([pair]))), None)
        return self._formats[number]

    def _pack(self, rows: list[Row], position: Position) -> list[Unit]:
        assert self._max_length is not None
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        if not len(lengths):
            return []
        packs = assign_packs(-np.sort(-lengths), self._max_length)
        stream = _PACK_STREAM + position.window * 2**20 + position.block
        order = permute(int(packs.max()) + 1, self._seed, position.epoch, stream) if self._shuffle else None
        return [[rows[i] for i in pack] for pack in group_packs(lengths, packs, np.arange(len(rows)), order)]
