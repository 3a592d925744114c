"""`build_batches` and `build_validation_batches`: from rows to what the steps of a run are fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from optune.data.batches import Batches
from optune.data.packing import assign_packs
from optune.data.rows import Rows
from optune.data.sources import find_common
from optune.data.streams.batches import StreamedBatches
from optune.data.streams.blocks import StreamedRows
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
    trained: Rows | StreamedRows | None = None,
) -> ValidationBatches:
    """Every row once, in file order, padded; each rank gets its slices and as many microbatches as the others.
    Files that `trained` has rows of too are noted in the report of `rows`: they say little of what was learned."""
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
    for name in find_common(rows.sources, trained.sources if trained is not None else ()):
        rows.report.note("files of data.validation that are trained too", name)
    return ValidationBatches(batches, rank)


@dataclass(frozen=True)
class ValidationBatches(Sequence[Microbatch]):
    """See `build_validation_batches`. A microbatch is made when it is asked for."""

    batches: Batches
    rank: int

    @property
    def rows(self) -> Rows:
        return self.batches.rows

    def describe(self) -> str:
        """What is validated and what is not, in one line."""
        return "; ".join(self.rows.report.lines())

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
