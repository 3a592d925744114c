"""Sources with weights: how often an epoch has each row. A pure function of (seed, epoch).

A weight of 1 is every row once an epoch, 2 every row twice, 0.5 half of the rows, drawn anew for each epoch; 2.5 is
every row twice and half of them a third time. How many rows that makes does not depend on the epoch, so neither does
the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optune.errors import DataError

MOST_ROWS = 2**27
"""Of an epoch in which rows come several times: their order alone takes 3 GiB."""

_STREAM = 2
"""Of random numbers; `batches` and its packs have 0 and 1, `grouping` has 3."""


@dataclass(frozen=True)
class Mixture:
    """How many rows each source has (rows of a source stand together, sources in order), and its weight."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every row comes once."""
        return all(weight == 1 for weight in self.weights)

    @property
    def is_whole(self) -> bool:
        """Whether every epoch has the same rows."""
        return all(float(weight).is_integer() for weight in self.weights)

    @property
    def size(self) -> int:
        """Rows of an epoch."""
        return sum(count_weighted(count, weight) for count, weight in zip(self.counts, self.weights, strict=True))

    def epoch_rows(self, seed: int, epoch: int) -> np.ndarray:
        """See `epoch_rows`."""
        return epoch_rows(self.counts, self.weights, seed, epoch)


def check_mixture(counts: Sequence[int], weights: Sequence[float], names: Sequence[str]) -> Mixture:
    """The mixture of sources called `names`. Raises DataError for a weight that takes none of a source's rows, and for
    weights that make an epoch of more than `MOST_ROWS`."""
    for count, weight, name in zip(counts, weights, names, strict=True):
        if count and not count_weighted(count, weight):
            raise DataError(
                f"weight {weight:g} of {count} rows takes no row",
                where=name,
                hint=f"a weight of {1 / count:.2g} takes one row; to leave the source out, take it off the list",
            )
    mixture = Mixture(tuple(counts), tuple(weights))
    if mixture.size > max(MOST_ROWS, sum(counts)):
        sizes = list(map(count_weighted, counts, weights))
        most = sizes.index(max(sizes))
        raise DataError(
            f"weight {weights[most]:g} of {counts[most]:,} rows makes {sizes[most]:,} rows an epoch, and {MOST_ROWS:,} "
            "are the most",
            where=names[most],
            hint="several epochs, or lower weights for the other sources, train as much",
        )
    return mixture


def count_weighted(count: int, weight: float) -> int:
    """Rows that a source of `count` rows puts into each epoch."""
    return round(count * weight)


def epoch_rows(counts: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Indices (int64) of the rows of an epoch, source after source, each source's passes in the order of its rows.

    Row indices count through all sources. The last, partial pass is drawn without replacement.
    """
    parts: list[np.ndarray] = []
    start = 0
    for source, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        passes, rest = divmod(count_weighted(count, weight), count or 1)
        parts += [np.arange(start, start + count)] * passes
        if rest:
            key = np.array([seed % 2**64, epoch], np.uint64)
            generator = np.random.Philox(key=key, counter=np.array([0, 0, source, _STREAM], np.uint64))
            drawn = np.argsort(generator.random_raw(count), kind="stable")[:rest]
            parts.append(start + np.sort(drawn))
        start += count
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
