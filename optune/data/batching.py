"""Batches as a pure function of (seed, step): nothing is consumed, so any step can be asked for at any time.

Words: a *unit* is what fills one place in a batch, a row or with packing a pack. A step takes `batch_size x
gradient_accumulation_steps x world_size` units of the epoch's order; the last step of an epoch takes what is left.
Global microbatch m of a step holds units `m x batch_size x world_size` and on, and each rank takes its slice of it, so
the order of rows does not depend on the number of processes.

Shapes: B units, T positions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from optune.data.collating import collate, permute
from optune.data.grouping import group_steps
from optune.data.packing import assign_packs, group_packs
from optune.data.rows import Rows
from optune.data.streams.blocks import StreamedRows
from optune.data.streams.batches import StreamedBatches
from optune.data.summary import summarize
from optune.errors import DataError
from optune.types import Microbatch


def build_batches(
    rows: Rows | StreamedRows,
    *,
    batch_size: int,
    gradient_accumulation_steps: int = 1,
    shuffle: bool = True,
    packing: bool = False,
    max_length: int | None = None,
    pad_id: int = 0,
    seed: int = 0,
    world_size: int = 1,
    pad_to_multiple: int = 1,
    group_by_length: bool = False,
) -> Batches | StreamedBatches:
    """Batches over `rows`, without end: after an epoch comes the next, with an order of its own where `shuffle`.
    Rows that are streamed make a `StreamedBatches`.

    Pairs (see `load_pairs`) stay side by side in a microbatch; `batch_size` counts their rows.

    `max_length` is the length of a pack and only needed with `packing`. Sequences are padded on the right with `pad_id`
    to the longest of their microbatch, and on to a multiple of `pad_to_multiple`. With `group_by_length`, rows of
    similar length share a step (see `grouping.py`); the steps stay in random order. Raises DataError for no rows, for a
    row that is longer than a pack, and for options that exclude each other.
    """
    if group_by_length:
        _check_grouping(shuffle=shuffle, packing=packing, is_streamed=isinstance(rows, StreamedRows))
    if packing and max_length is None:
        raise DataError("packing needs a length for the packs", where="data.max_length")
    if isinstance(rows, StreamedRows):
        return StreamedBatches(
            rows,
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            shuffle=shuffle,
            packing=packing,
            max_length=max_length,
            pad_id=pad_id,
            seed=seed,
            world_size=world_size,
            pad_to_multiple=pad_to_multiple,
        )
    if not len(rows):
        raise DataError("there are no rows to make batches of")
    if rows.together > 1:
        _check_pairs(batch_size, packing=packing, group_by_length=group_by_length)
    packs = None
    if packing:
        assert max_length is not None
        if rows.mixture is not None and not rows.mixture.is_whole:
            raise DataError(
                "a source with a weight that is no whole number has other rows in each epoch, which would make another "
                "number of packs of them, and so of steps",
                where="data.packing",
                hint="with packing give whole weights, max_rows or a split; or turn packing off",
            )
        lengths = rows.lengths
        if lengths.max() > max_length:
            row = rows[int(lengths.argmax())]
            raise DataError(f"{len(row.tokens)} tokens do not fit into a pack of {max_length}", where=row.where)
        if rows.mixture is not None:
            lengths = lengths[rows.mixture.epoch_rows(seed, 0)]
        packs = assign_packs(-np.sort(-lengths), max_length)
    return Batches(
        rows,
        batch_size,
        gradient_accumulation_steps,
        shuffle,
        packs,
        max_length,
        pad_id,
        seed,
        world_size,
        pad_to_multiple,
        group_by_length,
    )


def _check_grouping(*, shuffle: bool, packing: bool, is_streamed: bool) -> None:
    for is_wrong, why, hint in (
        (packing, "packs are all about as long as data.max_length", "leave one of the two out"),
        (not shuffle, "data.shuffle=false keeps the order of the files", "leave one of the two out"),
        (is_streamed, "with data.streaming not all rows are known", "data.packing needs no such knowledge"),
    ):
        if is_wrong:
            raise DataError(f"rows cannot be grouped: {why}", where="data.group_by_length", hint=hint)


def _check_pairs(batch_size: int, *, packing: bool, group_by_length: bool) -> None:
    for is_wrong, where, why in (
        (batch_size % 2 == 1, "batch_size", f"counts rows, and {batch_size} of them would part a pair"),
        (packing, "data.packing", "would part the pairs"),
        (group_by_length, "data.group_by_length", "would part the pairs"),
    ):
        if is_wrong:
            raise DataError(f"{why}: a chosen and a rejected answer are trained together", where=where)


def build_validation_batches(
    rows: Rows | StreamedRows,
    batch_size: int,
    *,
    pad_id: int = 0,
    world_size: int = 1,
    rank: int = 0,
    pad_to_multiple: int = 1,
) -> ValidationBatches:
    """Every row once, in file order, padded; each rank gets its slices and as many microbatches as the others."""
    if isinstance(rows, StreamedRows):
        raise DataError("a validation takes every row, so its rows are not streamed", where="data.validation")
    if rows.mixture is not None and not rows.mixture.is_plain:
        raise DataError("a validation takes every row once: a source has no weight there", where="data.validation")
    batches = build_batches(
        rows,
        batch_size=batch_size,
        shuffle=False,
        pad_id=pad_id,
        world_size=world_size,
        pad_to_multiple=pad_to_multiple,
    )
    assert isinstance(batches, Batches)
    return ValidationBatches(batches, rank)


@dataclass(frozen=True)
class ValidationBatches(Sequence[Microbatch]):
    """See `build_validation_batches`. A microbatch is made when it is asked for."""

    batches: Batches
    rank: int

    @property
    def rows(self) -> Rows:
        return self.batches.rows

    def __len__(self) -> int:
        return self.batches.steps_per_epoch

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Microbatch]: ...

    def __getitem__(self, index: int | slice) -> Microbatch | list[Microbatch]:
        steps = range(len(self))[index]
        if isinstance(steps, range):
            return [self.batches.microbatches(step, self.rank)[0] for step in steps]
        return self.batches.microbatches(steps, self.rank)[0]


@dataclass(frozen=True)
class Batches:
    """See `build_batches`. Steps are counted from 0 over all epochs."""

    rows: Rows
    batch_size: int
    gradient_accumulation_steps: int
    shuffle: bool
    packs: np.ndarray | None
    max_length: int | None
    pad_id: int
    seed: int
    world_size: int
    pad_to_multiple: int
    group_by_length: bool = False
    _orders: dict[int, Sequence[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def unit(self) -> str:
        """What a place in a batch holds."""
        return "row" if self.packs is None else "pack"

    @property
    def units(self) -> int:
        """Rows, or packs, of an epoch."""
        if self.packs is not None:
            return int(self.packs.max()) + 1
        return len(self.rows) if self.rows.mixture is None else self.rows.mixture.size

    @property
    def units_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """The last one may be smaller."""
        return math.ceil(self.units / self.units_per_step)

    @property
    def fill(self) -> float:
        """The share of the packs' positions that hold a token; 1 without packing."""
        if self.packs is None:
            return 1.0
        return self.tokens() / (self.units * (self.max_length or 1))

    @property
    def positions_per_step(self) -> int:
        """Positions that the first step feeds, padding included: what a step of this run costs in memory."""
        return sum(microbatch.tokens_BT.numel() for microbatch in self.microbatches(0)) * self.world_size

    def tokens(self, epoch: int = 0) -> int:
        """Tokens of the rows of an epoch."""
        return int(self.rows.lengths[self._rows_of_epoch(epoch)].sum())

    def positions(self, epoch: int = 0) -> int:
        """Positions that an epoch feeds over all ranks, padding included."""
        lengths, order = self.rows.lengths, self._order(epoch)
        totals = lengths[order].sum(1) if isinstance(order, np.ndarray) else [lengths[unit].sum() for unit in order]
        # A step holds whole microbatches, so those of all ranks are the epoch's order cut every `batch_size` units.
        starts = np.arange(0, len(order), self.batch_size)
        widths = self._widen(np.maximum.reduceat(np.asarray(totals), starts))
        units = np.minimum(self.batch_size, len(order) - starts)
        # Ranks without a row feed padding alone.
        return int((widths * units).sum()) + -len(starts) % self.world_size * self.pad_to_multiple

    def _widen(self, widths: np.ndarray) -> np.ndarray:
        return -(-np.maximum(1, widths) // self.pad_to_multiple) * self.pad_to_multiple

    def describe(self) -> dict[str, str]:
        """What is trained and what is not, as `label: text`."""
        return summarize(self)

    def epoch(self, step: int) -> float:
        """Epochs that are finished once `step` steps are done."""
        whole, steps = divmod(step, self.steps_per_epoch)
        return whole + steps * self.units_per_step / self.units

    def describe_end(self, step: int) -> dict[str, str]:
        """What is known of the rows after `step` steps and was not at the beginning: nothing, all are in memory."""
        return {}

    def cursor(self, step: int) -> None:
        """What a checkpoint has to keep to find the rows behind `step`: nothing, any step can be asked for."""

    def seek(self, step: int, cursor: None) -> None:
        """See `cursor`; for rows that are streamed it is the way to a step."""

    def microbatches(self, step: int, rank: int = 0) -> list[Microbatch]:
        """The microbatches of a step for one rank; every rank has as many of them.

        A rank whose slice is empty in the last step of an epoch gets a microbatch of padding and no row.
        """
        return [self._collate(units) if len(units) else self._empty() for units in self.rows_of(step, rank)]

    def rows_of(self, step: int, rank: int = 0) -> list[Sequence[np.ndarray]]:
        """Which rows `microbatches` holds: for each microbatch its units, each the indices of its rows."""
        epoch, window = divmod(step, self.steps_per_epoch)
        units = self._order(epoch)[window * self.units_per_step : (window + 1) * self.units_per_step]
        per_microbatch = self.batch_size * self.world_size
        return [
            units[start + rank * self.batch_size : start + (rank + 1) * self.batch_size]
            for start in range(0, len(units), per_microbatch)
        ]

    def fingerprint(self) -> str:
        """sha256 over the rows and all that decides which rows a step trains. The split of a step into microbatches and
        ranks is not part of it, so a run may go on with another one as long as the step holds as many rows."""
        options = {
            "rows": self.rows.fingerprint(),
            "units_per_step": self.units_per_step,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "pack_length": None if self.packs is None else self.max_length,
        }
        if self.group_by_length:
            options |= {"group_by_length": True}
        if self.rows.together > 1:
            options |= {"together": self.rows.together}
        if self.rows.mixture is not None and not self.rows.mixture.is_plain:
            options |= {"counts": self.rows.mixture.counts, "weights": self.rows.mixture.weights, "seed": self.seed}
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def _order(self, epoch: int) -> Sequence[np.ndarray]:
        """The rows of each unit in the order of an epoch."""
        if epoch not in self._orders:
            # Two epochs are enough for a loop that looks one step ahead.
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            rows = self._rows_of_epoch(epoch)
            order = self._shuffle(len(rows), epoch) if self.shuffle else np.arange(len(rows))
            if self.group_by_length:
                steps = permute(len(rows) // self.units_per_step, self.seed, epoch, stream=3)
                order = group_steps(self.rows.lengths[rows], order, self.units_per_step, steps)
            if self.packs is None:
                self._orders[epoch] = rows[order][:, None]  # pyright: ignore[reportArgumentType]
            else:
                pack_order = permute(self.units, self.seed, epoch, stream=1) if self.shuffle else None
                packs = group_packs(self.rows.lengths[rows], self.packs, order, pack_order)
                self._orders[epoch] = [rows[pack] for pack in packs]
        return self._orders[epoch]

    def _shuffle(self, count: int, epoch: int) -> np.ndarray:
        """A random order in which rows that belong together stay neighbours."""
        together = self.rows.together
        firsts = permute(count // together, self.seed, epoch)
        return (firsts[:, None] * together + np.arange(together)).ravel()

    def _rows_of_epoch(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order of the files."""
        mixture = self.rows.mixture
        return np.arange(len(self.rows)) if mixture is None else mixture.epoch_rows(self.seed, epoch)

    def _collate(self, units: Sequence[np.ndarray]) -> Microbatch:
        return collate(
            [[self.rows[int(index)] for index in unit] for unit in units],
            pad_id=self.pad_id,
            is_packed=self.packs is not None,
            has_weights=self.rows.weights is not None,
            pad_to_multiple=self.pad_to_multiple,
        )

    def _empty(self) -> Microbatch:
        return self._collate([np.zeros(0, np.int64)])
