"""Files that are meant twice: in one list of sources, or in two."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from optune.data.sources.source import Source


def find_twice(sources: Iterable[Source]) -> list[str]:
    """The names of files of which a row was meant by an earlier one of `sources`; parts that share no row are none."""
    seen: dict[tuple[Path, str | None], list[Source]] = {}
    return [source.name for source in sources if _is_among(source, seen, keeps=True)]


def find_common(sources: Iterable[Source], others: Iterable[Source]) -> list[str]:
    """The names of the files in `sources` of which `others` mean a row too."""
    seen: dict[tuple[Path, str | None], list[Source]] = {}
    for other in others:
        _is_among(other, seen, keeps=True)
    return [source.name for source in sources if _is_among(source, seen, keeps=False)]


def _is_among(source: Source, seen: dict[tuple[Path, str | None], list[Source]], *, keeps: bool) -> bool:
    key = (source.path.resolve(), source.member)
    found = any(_share_a_row(source, other) for other in seen.get(key, ()))
    if keeps:
        seen.setdefault(key, []).append(source)
    return found


def _share_a_row(one: Source, other: Source) -> bool:
    """Of two parts of one file."""
    return (other.stop is None or one.first < other.stop) and (one.stop is None or other.first < one.stop)
