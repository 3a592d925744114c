"""A look into a stream before it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optune.data.batches import Batches
from optune.data.rows import Rows
from optune.data.streams.batches import StreamedBatches


def hold_window(stream: StreamedBatches) -> Batches:
    """The steps of the first window of a stream as batches in memory: the same rows in the same steps."""
    units, report = stream.first_window()
    rows = [row for unit in units for row in unit]
    ends = np.cumsum([len(unit) for unit in units])
    indices = np.split(np.arange(len(rows)), ends[:-1])
    order: Sequence[np.ndarray] = indices if stream.packing else np.arange(len(rows))[:, None]  # pyright: ignore
    return Batches(
        rows=Rows(rows, report),
        batch_size=stream.batch_size,
        gradient_accumulation_steps=stream.gradient_accumulation_steps,
        shuffle=False,
        packs=np.repeat(np.arange(len(units)), np.diff(ends, prepend=0)) if stream.packing else None,
        max_length=stream.max_length,
        pad_id=stream.pad_id,
        seed=stream.seed,
        world_size=stream.world_size,
        pad_to_multiple=stream.pad_to_multiple,
        _orders={0: order},
    )
