"""What the batches of a run hold, in numbers and in lines for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optune.errors import list_few

if TYPE_CHECKING:
    from optune.data.batches import Batches

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Lengths:
    """How long rows are, in tokens: `counts[i]` rows have more than `edges[i]` and at most `edges[i + 1]` tokens."""

    shortest: int
    median: int
    longest: int
    edges: list[int]
    counts: list[int]


def count_lengths(lengths: np.ndarray) -> Lengths:
    """The histogram of row lengths, in steps of equal width, or of doubled width where the longest row has eight times
    the tokens of the shortest."""
    values = np.sort(lengths)
    shortest, longest = int(values[0]), int(values[-1])
    if longest >= 8 * shortest:
        first, last = (shortest - 1).bit_length(), (longest - 1).bit_length()
        edges = [2**power if power >= 0 else 0 for power in range(first - 1, last + 1)]
    else:
        bars = min(8, math.ceil(2 * math.sqrt(len(values))))  # a few rows fill a few bars
        width = _round_up((longest - shortest + 1) / bars)
        start = (shortest - 1) // width * width
        edges = list(range(start, longest + width, width))
    counts = np.histogram(values, np.array(edges) + 0.5)[0]
    return Lengths(shortest, int(values[(len(values) - 1) // 2]), longest, edges, counts.tolist())


def _round_up(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= width:
                return factor * power
        power *= 10


def padding_share(batches: Batches) -> float:
    """The share of the positions of the first epoch that hold padding."""
    return 1 - batches.tokens() / batches.positions()


def summarize(batches: Batches) -> dict[str, str]:
    """What is trained and what is not, as `label: text`."""
    report = batches.rows.report
    files = list(report.files.items())
    names = [f"{path}: {file.kept:,} of {file.rows:,} rows" for path, file in files]
    fields = {"data": list_few(names, separator="; ") if len(files) > 1 else "".join(path for path, _ in files)}
    fields["data"] += " files" if len(files) > 3 else ""
    fields["rows"], *rest = report.lines()
    for line in rest:
        label, _, text = line.partition(": ")  # `skipped: …`, `note: …`
        fields[label] = f"{fields[label]}; {text}" if label in fields else text
    fields["too long"] = describe_too_long(batches)
    fields["lengths"] = describe_lengths(count_lengths(batches.rows.lengths))
    if batches.packs is not None:
        fields["packs"] = f"{batches.units:,} of {batches.max_length} tokens, {batches.fill:.1%} full"
    fields["padding"] = f"{padding_share(batches):.1%} of the positions that an epoch feeds"
    return fields


def describe_lengths(lengths: Lengths) -> str:
    """`8 to 301 tokens, median 23  ▂▅█▃▁`, the bars standing for equal or doubled steps of length."""
    most = max(lengths.counts)
    bars = "".join(_BARS[-(-count * len(_BARS) // most) - 1] if count else "·" for count in lengths.counts)
    return f"{lengths.shortest:,} to {lengths.longest:,} tokens, median {lengths.median:,}  {bars}"


def describe_too_long(batches: Batches) -> str:
    """What `max_length` takes away; empty where it takes nothing."""
    lost = batches.rows.report.too_long
    if not lost.rows:
        return ""
    rows = f"{lost.rows:,} {'row' if lost.rows == 1 else 'rows'} of more than {batches.max_length:,} tokens"
    tokens = f"{lost.lost_tokens:,} of {lost.tokens:,} tokens and {lost.lost_targets:,} targets are not trained"
    return f"{rows} (up to {lost.longest:,}): {tokens}"
