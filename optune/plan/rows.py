"""The microbatch that takes most of an epoch whose rows are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from optune.types import MicrobatchShape


def widest(batches: Any, world_size: int = 1) -> MicrobatchShape:
    """The shape of the microbatch with the most positions in the first epoch of `batches` (`data.Batches`).

    Padding is counted, as it is computed; targets are those of that microbatch.
    """
    most, place = 0, (0, 0, 0)
    lengths = batches.rows.lengths
    for step in range(batches.steps_per_epoch):
        for rank in range(world_size):
            for index, units in enumerate(batches.rows_of(step, rank)):
                positions = len(units) * max((int(np.sum(lengths[unit])) for unit in units), default=0)
                if positions > most:
                    most, place = positions, (step, rank, index)
    step, rank, index = place
    return batches.microbatches(step, rank)[index].shape
