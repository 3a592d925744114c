"""Packing: several rows in one sequence, as full as best-fit decreasing makes it.

Only the lengths decide how packs are filled, so every epoch has the same number of packs with the same lengths inside,
and the number of steps is known at the start. Which row of a length goes where is the epoch's order's choice.
Best-fit decreasing: D. S. Johnson, "Near-optimal bin packing algorithms" (1973); at most 11/9 of the optimum.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def assign_packs(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of each row, packs numbered in the order in which they are opened.

    `lengths`: tokens of each row, longest first, each at most `capacity`.
    """
    packs = np.empty(len(lengths), np.int64)
    open_packs: dict[int, list[int]] = {}
    spaces: list[int] = []  # The keys of `open_packs`, sorted: at most `capacity` of them.
    count = 0
    for index, length in enumerate(lengths.tolist()):
        place = bisect_left(spaces, length)
        if place == len(spaces):
            pack, space = count, capacity
            count += 1
        else:
            space = spaces[place]
            pack = open_packs[space].pop()
            if not open_packs[space]:
                del open_packs[space], spaces[place]
        packs[index] = pack
        left = space - length
        if left:
            if left not in open_packs:
                open_packs[left] = []
                insort(spaces, left)
            open_packs[left].append(pack)
    return packs


def group_packs(
    lengths: np.ndarray, packs_by_rank: np.ndarray, order: np.ndarray, pack_order: np.ndarray | None
) -> list[np.ndarray]:
    """The rows of each pack for one epoch.

    `order`: the rows in the epoch's order; `packs_by_rank`: what `assign_packs` said for the rows sorted by length;
    `pack_order`: the packs in the epoch's order, None to go by their earliest row.
    """
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    by_rank = np.lexsort((position, -lengths))
    pack_of = np.empty(len(order), np.int64)
    pack_of[by_rank] = packs_by_rank
    # Rows grouped by pack, inside a pack in the epoch's order.
    grouped = np.lexsort((position, pack_of))
    cuts = np.flatnonzero(np.diff(pack_of[grouped])) + 1
    packs = np.split(grouped, cuts)
    if pack_order is None:
        pack_order = np.argsort([position[pack[0]] for pack in packs], kind="stable")
    return [packs[index] for index in pack_order]
