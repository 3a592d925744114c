"""Batches from files that are larger than memory: read as the steps need them, shuffled within a window.

A `Position` says where a step begins: which window, and how much of it is done. It is small and a function of (seed,
step) and the files, so a checkpoint carries the position of its step and a resumed run reads on from there. A window is
encoded in blocks of its (shuffled) rows, so that the first step does not wait for the whole window; with packing, packs
are filled within a block.

An epoch ends where the files end. How many steps that makes is not known before, so the length of a run is `max_steps`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

from optune.data.collating import collate
from optune.data.formats import name_format
from optune.data.rows import Report
from optune.data.streams.blocks import DEFAULT_WINDOW, Blocks, StreamedRows, Unit
from optune.data.streams.position import Position, add_block, read_position, sample_file
from optune.data.streams.windows import Window
from optune.errors import DataError, list_few
from optune.files import format_bytes
from optune.types import Microbatch

_KEPT_STEPS, _KEPT_POSITIONS = 3, 64


class StreamedBatches:
    """Batches with the interface of `Batches`, as far as it does not need to know all rows.

    `steps_per_epoch` is None. Steps are counted from 0 over all epochs; any may be asked for, and those near a known
    position (the last ones asked for, one that `seek` gave, the beginning) at once. While a step is trained, the rows
    of the next are read in a thread.
    """

    steps_per_epoch = None

    def __init__(
        self,
        rows: StreamedRows,
        *,
        batch_size: int,
        gradient_accumulation_steps: int,
        shuffle: bool,
        packing: bool,
        max_length: int | None,
        pad_id: int,
        seed: int,
        world_size: int,
        pad_to_multiple: int,
    ) -> None:
        if rows.window is not None and not shuffle:
            raise DataError("is for shuffling, which data.shuffle=false turns off", where="data.shuffle_window")
        self.rows, self.batch_size = rows, batch_size
        self.gradient_accumulation_steps, self.world_size = gradient_accumulation_steps, world_size
        self.shuffle, self.packing, self.max_length = shuffle, packing, max_length
        self.pad_id, self.seed, self.pad_to_multiple = pad_id, seed, pad_to_multiple
        self._window_rows = rows.window or DEFAULT_WINDOW
        self._blocks = Blocks(rows, shuffle=shuffle, packing=packing, max_length=max_length, seed=seed)
        self._positions = {0: Position(self._blocks.windows.start)}
        self._steps: dict[int, list[Unit]] = {}
        self._ahead: Future[list[Unit]] | None = None
        self._fingerprint: str | None = None
        self._thread = ThreadPoolExecutor(1, "rows")

    @property
    def unit(self) -> str:
        """What a place in a batch holds."""
        return "pack" if self.packing else "row"

    @property
    def units_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def positions_per_step(self) -> int:
        """Positions that the first step feeds, padding included."""
        return sum(microbatch.tokens_BT.numel() for microbatch in self.microbatches(0)) * self.world_size

    def microbatches(self, step: int, rank: int = 0) -> list[Microbatch]:
        """See `Batches.microbatches`. Raises DataError for a broken row in the blocks that the step needs."""
        units = self._units_of(step)
        self._read_ahead(step + 1)
        has_weights = any(row.weights is not None for unit in units for row in unit)
        starts = range(rank * self.batch_size, len(units) + rank * self.batch_size, self.batch_size * self.world_size)
        return [
            collate(
                units[start : start + self.batch_size] or [[]],
                pad_id=self.pad_id,
                is_packed=self.packing,
                has_weights=has_weights,
                pad_to_multiple=self.pad_to_multiple if start < len(units) else 1,
            )
            for start in starts
        ]

    def epoch(self, step: int) -> float:
        """Epochs that are finished once `step` steps are done, by the bytes that are read; whole where a file ends."""
        return self._position(step).done

    def report(self, step: int) -> Report:
        """What became of the rows of the files, once `step` steps are done; the block that is being used counts."""
        self._settle()
        position = self._position(step)
        report = copy.deepcopy(position.report)
        if position.unit:
            add_block(report, self._blocks.block(position).report)
        report.note_twice(self.rows.sources)
        return report

    def describe(self) -> dict[str, str]:
        """Where the rows come from and what the first step found in them, as `label: text`."""
        sources = self.rows.sources
        names = list(dict.fromkeys(source.name for source in sources))
        size = format_bytes(sum({source.path: source.path.stat().st_size for source in sources}.values()))
        order = f"shuffled among {self._window_rows:,} rows" if self.shuffle else "in the order of the files"
        fields = {"data": f"{list_few(names)}, {size} streamed, {order}"}
        return fields | self._describe_report(1, "first rows")

    def describe_end(self, step: int) -> dict[str, str]:
        """What has been read of the files once `step` steps are done."""
        return self._describe_report(step, "rows read")

    def first_window(self) -> tuple[list[Unit], Report]:
        """What the steps of the first window hold, in order, and what became of its rows."""
        self._settle()
        position, units, report = self._positions[0], list[Unit](), Report()
        is_last = self._blocks.window(position).is_last
        while position.block * self._blocks.size < len(self._blocks.window(position).picks):
            block = self._blocks.block(position)
            units += block.units
            add_block(report, block.report)
            position = replace(position, block=position.block + 1)
        if not units:
            self._fail(report)
        report.note_twice(self.rows.sources)
        if not is_last:
            report.note("the first window of a stream; what follows is not read", units[0][0].where, report.kept)
        return units, report

    def _describe_report(self, step: int, title: str) -> dict[str, str]:
        total, *others = self.report(step).lines()
        fields = {title: total}
        for line in others:
            label, _, text = line.partition(": ")  # `skipped: …`, `note: …`
            fields[label] = f"{fields[label]}; {text}" if label in fields else text
        return fields

    def cursor(self, step: int) -> dict[str, Any]:
        """Where the step after `step` begins, as plain values for a checkpoint: see `seek`."""
        return self._position(step).to_values() | {"data": self.fingerprint()}

    def seek(self, step: int, cursor: Mapping[str, Any] | None) -> None:
        """Makes `step` known from the `cursor` that an earlier run left. A cursor of other data or another order is
        not used: the rows before `step` are then read again."""
        if cursor and cursor["data"] == self.fingerprint():
            self._positions[step] = read_position(cursor)

    def fingerprint(self) -> str:
        """sha256 over samples of the files (see `sample_file`) and all that decides which rows a step trains."""
        if self._fingerprint is None:
            self._fingerprint = self._make_fingerprint()
        return self._fingerprint

    def _make_fingerprint(self) -> str:
        sources = [
            [
                sample_file(source.path),
                source.kind,
                source.packing,
                source.member,
                source.first,
                source.stop,
                source.entry,
                source.weight,
                source.format and name_format(source.format),
            ]
            for source in self.rows.sources
        ]
        first = [hashlib.sha256(row.tokens.astype("<i4").tobytes()).hexdigest() for row in self._units_of(0)[0]]
        options = {
            "sources": sources,
            "first": first,  # of the tokenizer and the template
            "units_per_step": self.units_per_step,
            "window": self._window_rows if self.shuffle else None,
            "seed": self.seed,
            "pack_length": self.max_length if self.packing else None,
        }
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def _units_of(self, step: int) -> list[Unit]:
        self._settle()
        return self._take(step)  # what went wrong ahead goes wrong again, where it matters

    def _read_ahead(self, step: int) -> None:
        if self._ahead is None and step not in self._steps:
            self._ahead = self._thread.submit(self._take, step)

    def _settle(self) -> None:
        """Only one thread reads at a time."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.exception()

    def _position(self, step: int) -> Position:
        if step not in self._positions:
            self._units_of(step - 1)
        return self._positions[step]

    def _take(self, step: int) -> list[Unit]:
        """The units of `step`, walking to it from the nearest position before."""
        if step not in self._steps:
            nearest = max(known for known in self._positions if known <= step)
            for number in range(nearest, step + 1):
                units, behind = self._walk(self._positions[number])
                self._remember(number, units, behind)
        return self._steps[step]

    def _remember(self, step: int, units: list[Unit], behind: Position) -> None:
        self._positions.pop(step + 1, None)  # the newest come last
        self._steps[step], self._positions[step + 1] = units, behind
        while len(self._steps) > _KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        while len(self._positions) > _KEPT_POSITIONS:
            del self._positions[next(old for old in self._positions if old)]

    def _walk(self, position: Position) -> tuple[list[Unit], Position]:
        """The units of the step that begins at `position`, and where the next one begins."""
        units: list[Unit] = []
        wanted, first = self.units_per_step, position.epoch
        while len(units) < wanted:
            window, size = self._blocks.window(position), self._blocks.size
            if position.block * size >= len(window.picks):
                if window.is_last and units:
                    break
                position = self._turn(position, window)
                if position.epoch - first > self._most_empty:
                    self._fail_empty(position.report)
                continue
            block = self._blocks.block(position)
            taken = block.units[position.unit : position.unit + wanted - len(units)]
            units += taken
            position = replace(position, unit=position.unit + len(taken))
            if position.unit == len(block.units):
                report = copy.deepcopy(position.report)
                add_block(report, block.report)
                report.files.clear()  # there may be thousands
                position = replace(position, block=position.block + 1, unit=0, report=report)
        return units, replace(position, done=self._done(position))

    def _turn(self, position: Position, window: Window) -> Position:
        """The beginning of the window after this one, which may be that of the next epoch."""
        if not window.is_last:
            return replace(position, places=window.after, window=position.window + 1, block=0, unit=0)
        if not position.report.kept and (position.report.rows or self._most_empty == 1):
            self._fail(position.report)
        epoch = position.epoch + 1
        return replace(position, places=self._blocks.windows.start, epoch=epoch, window=0, block=0, unit=0)

    def _fail(self, report: Report) -> NoReturn:
        names = [source.name for source in self.rows.sources]
        reasons = "; ".join([*report.skipped_lines(), *report.noted_lines()])
        raise DataError(
            f"none of the {report.rows} rows can be trained: {reasons}" if reasons else "no rows",
            where=list_few(names),
        )

    @property
    def _most_empty(self) -> int:
        """How many epochs in a row may have no row: the draws of a fraction may leave out all of a few."""
        return 1 if all(source.weight >= 1 for source in self.rows.sources) else 1000

    def _fail_empty(self, report: Report) -> NoReturn:
        if not report.kept:
            self._fail(report)
        raise DataError(
            "a whole epoch had no row that can be trained, and one before it had: the files have changed meanwhile",
            where=list_few([source.name for source in self.rows.sources]),
        )

    def _done(self, position: Position) -> float:
        """Epochs finished at `position`: the share of the bytes before its window, and of the window its rows."""
        window = self._blocks.window(position)
        before = self._blocks.windows.share(position.places)
        picked = max(1, len(window.picks))
        part = position.block * self._blocks.size
        if position.unit:
            units = len(self._blocks.block(position).units)
            part += self._blocks.size * position.unit / units
        return position.epoch + before + (window.share - before) * min(1.0, part / picked)
