"""All rows of all sources as tokens: in this process where they are few, on all cores where they are many.

The rows are cut into chunks in the same way in both, and a chunk is encoded by itself, so the result is the same
whatever the number of processes.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from optune.data.encoder import RowEncoder, first_format
from optune.data.formats import Format
from optune.data.sources import Source, read_rows
from optune.data.workers import Result, Task, Workers, count_cores, encode_here

CHUNK = 1000
"""Rows encoded at once: enough to keep a process busy, few enough to stay small."""
PATIENCE_S = 1.0
"""After this time other processes are started: a start costs about half as much."""
_LINES_EVERY_S = 30

T = TypeVar("T")


def encode_sources(
    encoder: RowEncoder, sources: Sequence[Source], format: Format, *, processes: int | None = None
) -> Iterator[tuple[Source, Result]]:
    """What becomes of each chunk of each source, in order, with the progress on stderr where it takes long.

    `processes`: at most so many beside this one, None for as many as there are cores; 0 keeps all work here.
    """
    owners: list[Source] = []  # of the chunks that were begun, in order
    tasks = _list_tasks(sources, format, owners)
    processes = count_cores() if processes is None else processes
    with _Progress(sources) as progress:
        for index, result in enumerate(_encode(encoder, tasks, processes, progress)):
            progress.add(result[0].report.rows)
            yield owners[index], result


def _list_tasks(sources: Sequence[Source], format: Format, owners: list[Source]) -> Iterator[Task]:
    for source in sources:
        wanted, detected = source.format or format, None
        for rows in _chunks(((source.place(number), row) for number, row in read_rows(source)), CHUNK):
            owners.append(source)
            yield {"rows": rows, "format": wanted, "source": source.name, "detected": detected}
            detected = detected or first_format(rows)


def _encode(encoder: RowEncoder, tasks: Iterator[Task], processes: int, progress: _Progress) -> Iterator[Result]:
    started = time.monotonic()
    for task in tasks:
        yield encode_here(encoder, task)
        if processes > 1 and time.monotonic() - started > PATIENCE_S:
            break
    following = next(tasks, None)
    if following is None:
        return
    tasks = chain([following], tasks)
    if _can_be_sent(following):
        progress.show(processes)
        with Workers(encoder, processes) as workers:
            yield from workers.encode_all(tasks)
    else:
        progress.show(1)
        yield from (encode_here(encoder, task) for task in tasks)


def _can_be_sent(task: Task) -> bool:
    """A user's own format may be a function that no other process can find."""
    if callable(task["format"]):
        try:
            pickle.dumps(task["format"])
        except Exception:  # Pickling runs code of the object.
            return False
    return getattr(task["format"], "__module__", None) != "__main__"


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


class _Progress:
    """Rows done, once `show` was called: a bar on a terminal, else a line now and then."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._done = 0
        self._bar: tqdm | None = None
        self._said_s: float | None = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, processes: int) -> None:
        if sys.stderr.isatty():
            total = _count_lines(self._sources)
            self._bar = tqdm(total=total, initial=self._done, unit=" rows", desc="rows to tokens", leave=False)
        else:
            sys.stderr.write(f"rows to tokens: more than {self._done:,} rows, {processes} processes\n")
            self._said_s = time.monotonic()

    def add(self, rows: int) -> None:
        self._done += rows
        if self._bar is not None:
            self._bar.update(rows)
        if self._said_s is not None and time.monotonic() - self._said_s > _LINES_EVERY_S:
            sys.stderr.write(f"rows to tokens: {self._done:,} rows done\n")
            self._said_s = time.monotonic()


def _count_lines(sources: Sequence[Source]) -> int | None:
    """The rows to come, None where that cannot be told from the lines of the files."""
    if any(source.kind != "jsonl" or source.packing or source.member or source.stop for source in sources):
        return None
    try:
        return sum(_count_in(source.path) - source.first for source in sources)
    except OSError:
        return None


def _count_in(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
