"""Rows of similar length side by side, so that fewer positions hold padding."""

from __future__ import annotations

import numpy as np

WINDOW = 50
"""Steps that exchange rows. The more, the less padding, and the more alike the steps of one epoch and the next."""


def group_steps(lengths: np.ndarray, order: np.ndarray, per_step: int, step_order: np.ndarray) -> np.ndarray:
    """`order`, the rows in an epoch's random order, so rearranged that rows of similar length share a step.

    The rows of `WINDOW` steps at a time are sorted by length (`lengths[i]` of row i) and cut into steps of `per_step`
    rows, which come in the order `step_order`, the numbers of all whole steps. The rows that fill no step stay the last
    ones; they are random ones, not the shortest.
    """
    whole = len(order) // per_step * per_step
    window = WINDOW * per_step
    parts = [order[start : min(start + window, whole)] for start in range(0, whole, window)]
    parts = [part[np.argsort(lengths[part], kind="stable")] for part in parts]
    last = order[whole:]
    steps = np.concatenate([*parts, order[:0]]).reshape(-1, per_step)
    return np.concatenate([steps[step_order].reshape(-1), last[np.argsort(lengths[last], kind="stable")]])
