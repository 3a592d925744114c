"""One row of JSON, read strictly: what JSON leaves open is refused, so that a row means the same to everybody."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_NESTED = 100
"""Objects and lists inside one another. Deeper rows are damaged, and no chat template can print them."""

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class BadRow:
    """What stands in place of a row that cannot be read."""

    problem: str


class BadValueError(ValueError):
    """JSON that is well-formed and still refused; the text is the reason."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:40]!r} stands twice")
    return row


def _constant(name: str) -> None:
    """NaN is how some tools write an empty cell; it becomes null."""
    if name != "NaN":
        raise BadValueError(f"holds {name}, which is no number")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadValueError(f"the number {text[:20]} is too large")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def parse_object(content: bytes) -> Any:
    """A line of JSONL as its row, or a BadRow."""
    try:
        text = content.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: byte 0x{content[error.start]:02x} at position {error.start + 1} of the line")
    if "\0" in text:
        return BadRow("not JSON: holds NUL bytes, as a file in another encoding or one cut short by a crash does")
    try:
        return check_row(DECODER.decode(text), text)
    except (ValueError, RecursionError) as error:
        return BadRow(explain(error, show_column=True))


def check_row(row: Any, text: str) -> Any:
    """`row`, parsed from `text`, or a BadRow where it is no object of clean text."""
    if not isinstance(row, dict):
        return BadRow(f"found {describe(row)}, wanted an object")
    return BadRow(problem) if (problem := find_problem(row, text)) else row


def find_problem(value: Any, text: str) -> str | None:
    """What makes `value`, parsed from `text`, unfit for training although it is JSON."""
    if text.count("[") + text.count("{") > MOST_NESTED and _depth(value) > MOST_NESTED:
        return "not JSON: nested too deeply"
    if ("\\ud" in text or "\\uD" in text) and _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        return "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return None


def decode_text(text: str) -> Any:
    """The value of a JSON text inside a row. Raises ValueError or RecursionError, which `explain` puts into words."""
    value = DECODER.decode(text)
    if problem := find_problem(value, text):
        raise BadValueError(problem)
    return value


def explain(error: ValueError | RecursionError, *, show_column: bool = False) -> str:
    """What is wrong with a text that `DECODER` refused."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}" + (f" at column {error.colno}" if show_column else "")
    if isinstance(error, BadValueError):
        return str(error)
    return f"not JSON: {'nested too deeply' if isinstance(error, RecursionError) else 'a number has too many digits'}"


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def describe(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if value is None or value != value:
        return "null" if value is None else "NaN"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def name_rows(places: Sequence[str], total: int) -> str:
    """The first few places of `total`, as messages name them."""
    more = f" and {total - len(places)} more" if total > len(places) else ""
    return ", ".join(places) + more
