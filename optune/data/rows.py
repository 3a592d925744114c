"""Rows as tokens, kept in a few flat arrays, and the report of how they came about."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from optune.data.mixing import Mixture
from optune.data.sources import Source, find_twice
from optune.errors import list_few

_PLACES = 3
"""Places that a tally remembers."""


@dataclass(frozen=True)
class Row:
    """One row: `tokens` int32, `trained` bool (this token is to be predicted; never the first), `weights` float32 or
    None (every target counts 1), all of the same length; `where` is its `file:line`."""

    tokens: np.ndarray
    trained: np.ndarray
    where: str
    weights: np.ndarray | None = None


@dataclass
class Tally:
    """How many rows something happened to, and where first."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, where: str, count: int = 1) -> None:
        self.merge(Tally(count, [where]))

    def merge(self, later: Tally) -> None:
        self.count += later.count
        self.where = (self.where + later.where)[:_PLACES]

    def name(self) -> str:
        """`a.jsonl:1, a.jsonl:7, a.jsonl:9 and 4 more`."""
        return list_few(self.where, total=self.count)


@dataclass
class FileReport:
    """Of one file: the rows that were read and kept, how many tokens and targets the kept ones have, and how many rows
    were skipped for each reason."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    targets: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def merge(self, later: FileReport) -> None:
        self.rows += later.rows
        self.kept += later.kept
        self.tokens += later.tokens
        self.targets += later.targets
        for reason, count in later.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count


@dataclass
class TooLong:
    """The rows that are longer than `max_length`, cut or left out: how many, their tokens before that, how many tokens
    and targets are not trained for it, and the longest of them."""

    rows: int = 0
    tokens: int = 0
    lost_tokens: int = 0
    lost_targets: int = 0
    longest: int = 0

    def merge(self, later: TooLong) -> None:
        self.rows += later.rows
        self.tokens += later.tokens
        self.lost_tokens += later.lost_tokens
        self.lost_targets += later.lost_targets
        self.longest = max(self.longest, later.longest)


@dataclass
class Report:
    """What was read and what became of it.

    - `rows` read, `kept` of them; `skipped`: reason → tally.
    - `notes`: what a person should know although the rows were kept → tally.
    - `targets`, `tokens`: sums over the kept rows; `longest`: tokens of the longest one.
    - `formats`: path → format, detected or given. `files`: path → what was read there.
    - `too_long`: what `max_length` takes away.
    """

    rows: int = 0
    kept: int = 0
    skipped: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)
    targets: int = 0
    tokens: int = 0
    longest: int = 0
    formats: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileReport] = field(default_factory=dict)
    too_long: TooLong = field(default_factory=TooLong)

    def read(self, where: str) -> None:
        """One row more."""
        self.rows += 1
        self._add(where, FileReport(rows=1))

    def keep(self, where: str, tokens: int, targets: int) -> None:
        """A row that is kept; the sums over all rows are left to `Rows`."""
        self._add(where, FileReport(kept=1, tokens=tokens, targets=targets))

    def skip(self, reason: str, where: str) -> None:
        self.skipped.setdefault(reason, Tally()).add(where)
        self._add(where, FileReport(skipped={reason: 1}))

    def _add(self, where: str, counts: FileReport) -> None:
        self.files.setdefault(where.rpartition(":")[0], FileReport()).merge(counts)

    def note(self, what: str, where: str, count: int = 1) -> None:
        """`count` rows of which `where` is the first."""
        self.notes.setdefault(what, Tally()).add(where, count)

    def merge(self, later: Report) -> None:
        """Adds the counts of rows that come after these; sums over tokens are not touched."""
        self.rows += later.rows
        for mine, theirs in ((self.skipped, later.skipped), (self.notes, later.notes)):
            for what, tally in theirs.items():
                mine.setdefault(what, Tally()).merge(tally)
        for source, name in later.formats.items():
            self.formats.setdefault(source, name)
        for path, file in later.files.items():
            self.files.setdefault(path, FileReport()).merge(file)
        self.too_long.merge(later.too_long)

    def note_twice(self, sources: Sequence[Source]) -> None:
        """Notes the files that are meant twice: their rows come more often than those of others."""
        for name in find_twice(sources):
            self.note("files that are read twice (a weight does that in one entry)", name)

    def skipped_lines(self) -> list[str]:
        """`3 longer than max_length=64 (a.jsonl:1, a.jsonl:7, a.jsonl:9)`, one for each reason."""
        return [f"{tally.count} {reason} ({tally.name()})" for reason, tally in self.skipped.items()]

    def noted_lines(self) -> list[str]:
        return [f"{what}: {tally.count} ({tally.name()})" for what, tally in self.notes.items()]

    def lines(self) -> list[str]:
        """The report for people."""
        formats = ", ".join(dict.fromkeys(self.formats.values()))
        trained = f"{self.targets:,} targets in {self.tokens:,} tokens ({self.targets / max(1, self.tokens):.1%})"
        return [
            f"{self.kept:,} of {self.rows:,} rows ({formats}), {trained}, longest row {self.longest:,} tokens",
            *(f"skipped: {line}" for line in self.skipped_lines()),
            *(f"note: {line}" for line in self.noted_lines()),
        ]


class Places(Sequence[str]):
    """Where rows are, kept as one array of UTF-8 and the place in it where each ends."""

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, places: Sequence[str]) -> Places:
        if isinstance(places, Places):
            return places
        parts = [place.encode() for place in places]
        text = np.frombuffer(b"".join(parts), np.uint8)
        return cls(text, np.cumsum([len(part) for part in parts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        start = self.ends[index - 1] if index else 0
        return self.text[start : self.ends[index]].tobytes().decode()


class Rows(Sequence[Row]):
    """All rows of a run, `report` beside them.

    The content is one array of tokens and one of flags for all rows, which can be hashed, stored and mapped as they
    are: `tokens` int32, `trained` bool and `weights` float32 or None, row i standing at `starts[i]` to `starts[i + 1]`.
    `mixture`: how often an epoch has them, None for once. `together`: so many rows belong together, 2 in pairs.
    `places`: where each row is. `sources`: the files, where the rows come from files.
    """

    def __init__(self, rows: Sequence[Row], report: Report | None = None) -> None:
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        tokens = np.concatenate([row.tokens for row in rows] or [np.zeros(0)]).astype(np.int32)
        trained = np.concatenate([row.trained for row in rows] or [np.zeros(0)]).astype(bool)
        weights: np.ndarray | None = None
        if any(row.weights is not None for row in rows):
            parts = [np.ones(len(row.tokens)) if row.weights is None else row.weights for row in rows]
            weights = np.concatenate(parts).astype(np.float32)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._set(starts, tokens, trained, weights, [row.where for row in rows], report)

    def _set(
        self,
        starts: np.ndarray,
        tokens: np.ndarray,
        trained: np.ndarray,
        weights: np.ndarray | None,
        places: Sequence[str],
        report: Report | None,
    ) -> None:
        self.starts, self.tokens, self.trained, self.weights = starts, tokens, trained, weights
        self.places = places
        self.mixture: Mixture | None = None
        self.together = 1
        self.sources: Sequence[Source] = ()
        self._fingerprint: str | None = None
        self.report = report or Report(rows=len(self), kept=len(self))
        self.report.targets = int(trained.sum())
        self.report.tokens = len(tokens)
        self.report.longest = int(self.lengths.max(initial=0))

    @classmethod
    def of(
        cls,
        starts: np.ndarray,
        tokens: np.ndarray,
        trained: np.ndarray,
        weights: np.ndarray | None,
        places: Sequence[str],
        report: Report | None = None,
        *,
        fingerprint: str | None = None,
    ) -> Rows:
        """Rows over arrays that exist already; they are not copied. `fingerprint`, where it is known, is that of arrays
        which nobody can write to."""
        rows = cls.__new__(cls)
        rows._set(starts, tokens, trained, weights, places, report)
        rows._fingerprint = fingerprint
        return rows

    @classmethod
    def join(cls, parts: Sequence[Rows], report: Report | None = None) -> Rows:
        """The rows of all parts, one after another."""
        lengths = np.concatenate([part.lengths for part in parts] or [np.zeros(0, np.int64)])
        weights: np.ndarray | None = None
        if any(part.weights is not None for part in parts):
            ones = [np.ones(len(part.tokens), np.float32) if part.weights is None else part.weights for part in parts]
            weights = np.concatenate(ones)
        return cls.of(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            np.concatenate([part.tokens for part in parts] or [np.zeros(0, np.int32)]),
            np.concatenate([part.trained for part in parts] or [np.zeros(0, bool)]),
            weights,
            [place for part in parts for place in part.places],
            report,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Views into the flat arrays, not copies."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        span = slice(self.starts[index], self.starts[index + 1])
        weights = None if self.weights is None else self.weights[span]
        return Row(self.tokens[span], self.trained[span], self.places[index], weights)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64."""
        return np.diff(self.starts)

    def fingerprint(self) -> str:
        """sha256 over tokens, targets and weights of all rows in order; not over where they stand."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256()
        for array in (self.starts, self.tokens, self.trained, self.weights):
            if array is not None:
                # Little-endian everywhere, so that a run may move to another machine.
                digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()
