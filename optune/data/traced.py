"""Strings that remember which of their characters came from a row and which the chat template wrote.

A chat template is a program: it trims, splits, reorders and drops what it is given. Searching its output for an answer
can therefore find the wrong place, or none. Here the strings of a row go into the template as `Traced` strings, and
what comes out still says, run by run, where each character came from. That gives the answers their spans, and it keeps
a marker such as `<|im_end|>` inside a message apart from the one that the template writes.

The value of every operation is that of plain `str`; only the trace is ours. An operation that is not known here gives a
plain string, whose characters then count as written by the template; `spans.py` refuses what it cannot prove then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

Run = tuple[int, int]
"""(number of characters, origin)."""

TEMPLATE = 0
"""Origin of what the template wrote."""
DATA = 1
"""Origin of text of the row that is no message's content: tools, names, ids."""
FIRST_MESSAGE = 2
"""Origin of the content of message k is `FIRST_MESSAGE + k`."""
GENERATED = 1 << 30
"""Flag on top of an origin: inside the template's `{% generation %}` tags."""


class Traced(str):
    """A string with an origin for every character. Slices, strips, splits, joins and sums keep the origins."""

    __slots__ = ("_runs",)
    _runs: tuple[Run, ...]

    def __new__(cls, text: str, runs: tuple[Run, ...] | None = None) -> Traced:
        self = str.__new__(cls, text)
        self._runs = ((len(self), TEMPLATE),) if runs is None else runs
        return self

    def __str__(self) -> str:
        # Templates print through `str(...)`; that must not lose the trace.
        return self

    def __add__(self, other: str) -> str:
        return _add(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _add(other, self) if isinstance(other, str) else NotImplemented

    def __rmod__(self, other: str) -> Any:
        return splice(lambda value: str.__mod__(other, value), self) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            index = key.__index__() % len(self)
            return Traced(text, _cut(self._runs, index, index + 1))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return Traced(text, _cut(self._runs, start, max(start, stop)))
        origins = [origin for length, origin in self._runs for _ in range(length)]
        return Traced(text, tuple((1, origin) for origin in origins[key]))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self[start : start + len(str.strip(self, chars))]

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if str.endswith(self, suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._locate(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._locate(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._locate(str.splitlines(self, keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._locate(list(str.partition(self, sep)), ""))  # pyright: ignore[reportReturnType]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._locate(list(str.rpartition(self, sep)), ""))  # pyright: ignore[reportReturnType]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old or not str.__contains__(self, old) or count.__index__() == 0:
            return str.replace(self, old, new, count) if not old else self
        pieces = self.split(old, count)
        return concat(part for piece in pieces for part in (new, piece)).removeprefix(new)

    def upper(self) -> str:
        return self._retrace(str.upper(self))

    def lower(self) -> str:
        return self._retrace(str.lower(self))

    def title(self) -> str:
        return self._retrace(str.title(self))

    def capitalize(self) -> str:
        return self._retrace(str.capitalize(self))

    def _retrace(self, text: str) -> str:
        """`text`, made of this string character by character; a changed length says that it was not."""
        return Traced(text, self._runs) if len(text) == len(self) else text

    def _locate(self, pieces: list[str], separator: str | None) -> list[str]:
        """`pieces` of this string in their order, `separator` (None: white space) between them, with their trace."""
        located, cursor = [], 0
        for piece in pieces:
            start = str.index(self, piece, cursor) if separator is None else cursor
            located.append(self[start : start + len(piece)])
            cursor = start + len(piece) + len(separator or "")
        return located


def _add(left: str, right: str) -> Traced:
    """The sum of two strings. Templates mostly add, so this is `concat` without its loop."""
    text = str.__add__(left, right)
    if not left or not right:
        return Traced(text, runs_of(left or right))
    before, after = runs_of(left), runs_of(right)
    if before[-1][1] == after[0][1]:
        return Traced(text, (*before[:-1], (before[-1][0] + after[0][0], after[0][1]), *after[1:]))
    return Traced(text, before + after)


def concat(parts: Iterable[str]) -> str:
    """The parts joined, with their traces; a plain string where no part has one."""
    parts = list(parts)
    text = "".join(parts)
    if not any(type(part) is Traced for part in parts):
        return text
    runs: list[Run] = []
    for part in parts:
        for length, origin in runs_of(part):
            if runs and runs[-1][1] == origin:
                runs[-1] = (runs[-1][0] + length, origin)
            elif length:
                runs.append((length, origin))
    return Traced(text, tuple(runs))


def runs_of(text: str) -> tuple[Run, ...]:
    """The runs of a string; a plain string is one run written by the template."""
    return text._runs if isinstance(text, Traced) else ((len(text), TEMPLATE),)


def plain(text: str) -> str:
    """The same characters as an ordinary `str`."""
    return str.__str__(text)


def mark(text: str, flag: int) -> Traced:
    """The text with `flag` set on the origin of every character."""
    return Traced(text, tuple((length, origin | flag) for length, origin in runs_of(text)))


def spans_of(text: str) -> list[tuple[int, int, int]]:
    """(start, end, origin) of each run that has characters."""
    spans, start = [], 0
    for length, origin in runs_of(text):
        if length:
            spans.append((start, start + length, origin))
        start += length
    return spans


def trace(value: Any, origin: int) -> Any:
    """A copy of a JSON value in which every string, keys included, is traced to `origin`."""
    if isinstance(value, str):
        return Traced(value, ((len(value), origin),))
    if isinstance(value, dict):
        return {trace(key, origin): trace(item, origin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [trace(item, origin) for item in value]
    return value


def find_origin(value: Any) -> int | None:
    """The highest origin among the traced strings inside a JSON value, None where nothing is traced."""
    found: list[int] = []

    def visit(item: Any) -> None:
        if isinstance(item, Traced):
            found.extend(origin for _, origin in item._runs)
        elif isinstance(item, dict):
            for pair in item.items():
                visit(pair)
        elif isinstance(item, list | tuple):
            for part in item:
                visit(part)

    visit(value)
    return max(found, default=None)


_QUOTE = "\U0010fffd"
_HOLE = re.compile(f"{_QUOTE}(\\d+){_QUOTE}")


def splice(produce: Callable[..., Any], *arguments: Any) -> Any:
    """`produce(*arguments)` with the trace of each traced argument that the result copies unchanged.

    Works for functions written in C or in jinja2 (`join`, `format`, `%`): they are run once more with a mark in place
    of each traced string, and the marks in that result are filled in. Where this does not give the very same text, the
    result stays plain.
    """
    found: list[Traced] = []

    def dig(value: Any) -> Any:
        if isinstance(value, Traced):
            found.append(value)
            return f"{_QUOTE}{len(found) - 1}{_QUOTE}"
        if isinstance(value, list | tuple):
            return [dig(item) for item in value]
        return {key: dig(item) for key, item in value.items()} if isinstance(value, dict) else value

    marked = [tuple(dig(value)) if isinstance(value, tuple) else dig(value) for value in arguments]
    result = produce(*arguments)
    if not found or type(result) is not str:
        return result
    probe = produce(*marked)
    parts = _HOLE.split(probe) if type(probe) is str else []
    filled = concat(found[int(part)] if index % 2 else part for index, part in enumerate(parts))
    return filled if filled == result else result


def _cut(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    """The runs of the characters `start` to `stop`."""
    if len(runs) == 1:
        return ((stop - start, runs[0][1]),)
    kept, position = [], 0
    for length, origin in runs:
        overlap = min(stop, position + length) - max(start, position)
        if overlap > 0:
            kept.append((overlap, origin))
        position += length
    return tuple(kept) or ((0, TEMPLATE),)
