"""Thins a product of axes to rows in which every pair of values of two axes still occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def all_pairs(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> set[tuple[Any, ...]]:
    """Every pair (axis, value, axis, value) that occurs in at least one allowed row of the full product."""
    pairs: set[tuple[Any, ...]] = set()
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if allowed(row):
            pairs |= pairs_of(row)
    return pairs


def pairs_of(row: Row) -> set[tuple[Any, ...]]:
    """The pairs that one row covers."""
    return {(first, row[first], second, row[second]) for first, second in combinations(row, 2)}


def thin(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows of the product that together cover `all_pairs`, chosen greedily and always the same."""
    candidates = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    candidates = [row for row in candidates if allowed(row)]
    covered_by = [pairs_of(row) for row in candidates]
    missing = set().union(*covered_by)
    rows = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(covered_by[index] & missing))
        rows.append(candidates[best])
        missing -= covered_by[best]
    return rows
