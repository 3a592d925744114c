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

import numpy as np

from optune.data.collating import collate, permute
from optune.data.grouping import group_steps
from optune.data.packing import group_packs
from optune.data.rows import Rows
from optune.data.summary import summarize
from optune.types import Microbatch


@dataclass(frozen=True)
class Batches:
    """See `batching.build_batches`. Steps are counted from 0 over all epochs."""

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
