"""The order of rows from random numbers, and rows put side by side into a microbatch.

Shapes: B units (rows, or packs of rows), T positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from optune.data.rows import Row
from optune.types import IGNORE, Microbatch


def permute(count: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """A permutation of `count` numbers that depends on (seed, epoch, stream) alone.

    Made from Philox's raw numbers, which numpy keeps the same in all versions (NEP 19), unlike its `permutation`.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    generator = np.random.Philox(key=key, counter=np.array([0, 0, 0, stream], np.uint64))
    return np.argsort(generator.random_raw(count), kind="stable")


def collate(
    units: Sequence[Sequence[Row]], *, pad_id: int, is_packed: bool, has_weights: bool = False, pad_to_multiple: int = 1
) -> Microbatch:
    """One microbatch of `units`, each a list of rows that stand behind one another in one sequence.

    Labels are shifted inside each row, so the last position of a row has none and nothing is trained across a seam.
    With `is_packed`, positions restart in each row and `documents_BT` numbers the rows, padding being one more.
    """
    totals = [sum(len(row.tokens) for row in unit) for unit in units]
    width = math.ceil(max(1, *totals) / pad_to_multiple) * pad_to_multiple
    tokens_BT = np.full((len(units), width), pad_id, np.int64)
    labels_BT = np.full((len(units), width), IGNORE, np.int64)
    positions_BT = np.tile(np.arange(width), (len(units), 1))
    documents_BT = np.zeros((len(units), width), np.int64)
    weights_BT = np.zeros((len(units), width), np.float32)
    for index, unit in enumerate(units):
        start = 0
        for number, row in enumerate(unit):
            end = start + len(row.tokens)
            tokens_BT[index, start:end] = row.tokens
            labels_BT[index, start : end - 1] = np.where(row.trained[1:], row.tokens[1:], IGNORE)
            positions_BT[index, start:end] = np.arange(end - start)
            documents_BT[index, start:end] = number
            weights_BT[index, start : end - 1] = 1 if row.weights is None else row.weights[1:]
            start = end
        documents_BT[index, start:] = len(unit)
        # In a pack, padding is a document of its own. Behind a single row it stays at the row's last position, so that
        # RoPE scalings which depend on a row's length see the row's.
        positions_BT[index, start:] = np.arange(width - start) if is_packed else max(start - 1, 0)
    return Microbatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        labels_BT=torch.from_numpy(labels_BT),
        positions_BT=torch.from_numpy(positions_BT),
        documents_BT=torch.from_numpy(documents_BT) if is_packed else None,
        weights_BT=torch.from_numpy(weights_BT) if has_weights else None,
        num_tokens=sum(totals),
        rows=tuple(row.where for unit in units for row in unit),
    )
