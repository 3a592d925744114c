"""One row of JSON, read strictly: what JSON leaves open is refused, so that a row means the same to everybody."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MOST_NESTED = 100
"""Objects and lists inside one another. Deeper rows are damaged, and no chat template can print them."""

LISTS = ("messages", "conversations", "tools", "history", "tokens", "input_ids", "labels")
"""Columns that formats want as lists."""

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


def _constant(name: str) -> float:
    if name != "NaN":
        raise BadValueError(f"holds {name}, which is no number")
    return math.nan


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
    return BadRow(problem) if (problem := find_problem(row, text)) else _clear_nans(row, text)


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
    return _clear_nans(value, text)


def _clear_nans(value: Any, text: str) -> Any:
    """`value`, parsed from `text`, with null for NaN, which is how some tools write an empty cell. The weight of a
    message stays NaN: it was computed, and what came out is no weight."""

    def clear(item: Any) -> Any:
        if isinstance(item, list):
            return [clear(inner) for inner in item]
        if not isinstance(item, dict):
            return None if item != item else item
        kept = ("weight",) if "role" in item or "from" in item else ()
        return {key: inner if key in kept else clear(inner) for key, inner in item.items()}

    return clear(value) if "NaN" in text else value


def explain(error: ValueError | RecursionError, *, show_column: bool = False) -> str:
    """What is wrong with a text that `DECODER` refused."""
    if isinstance(error, json.JSONDecodeError):
        return _explain_syntax(error, show_column)
    if isinstance(error, BadValueError):
        return str(error)
    return f"not JSON: {'nested too deeply' if isinstance(error, RecursionError) else 'a number has too many digits'}"


def _explain_syntax(error: json.JSONDecodeError, show_column: bool) -> str:
    what = error.msg.removesuffix(" at")  # `Unterminated string starting at`
    if not show_column:
        return f"not JSON: {what.removesuffix(' starting')}"
    said = f"not JSON: {what} at column {error.colno}"
    if error.pos < len(error.doc.rstrip()) and not what.startswith("Unterminated string"):
        return said
    program = "'.[]'" if error.doc.lstrip().startswith("[") else "."
    return f"{said}: the line ends inside the row, and a row is one line (`jq -c {program}` writes rows so)"


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
