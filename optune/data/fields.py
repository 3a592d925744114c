"""Reading the fields of a row. What is wrong is a `RowError` that names field, found and wanted.

An empty cell is a key that is absent, null, NaN or (where it is optional) white space alone; all four mean the same.
A list or an object may also be given as JSON text, as it stands in a CSV cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optune.data.examples import RowError
from optune.data.sources import describe

Row = Mapping[str, Any]


def take_text(row: Row, key: str, *, is_optional: bool = False) -> str:
    """The text under `key`; an empty cell is "" where it is optional."""
    value = row.get(key)
    if isinstance(value, str):
        return value if value.strip() or not is_optional else ""
    if is_optional and is_null(value):
        return ""
    raise RowError(f"field '{key}': found {_found(row, key)}, wanted text")


def take_answer(row: Row, key: str) -> str:
    """The answer; null counts as empty, a missing key is an error."""
    return "" if key in row and is_null(row[key]) else take_text(row, key)


def take_list(row: Row, key: str) -> list[Any]:
    """The list under `key`, which must be there."""
    value = row.get(key)
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, list):
        raise RowError(f"field '{key}': found {_found(row, key)}, wanted a list")
    return value


def _found(row: Row, key: str) -> str:
    return "nothing" if key not in row else describe(row[key])


def want(value: Any, kind: type, field: str, wanted: str) -> None:
    """Raises RowError where `value`, which stands in `field`, is not of a kind."""
    if not isinstance(value, kind):
        raise RowError(f"field '{field}': found {describe(value)}, wanted {wanted}")


def is_null(value: Any) -> bool:
    """Whether a cell holds nothing: null or NaN."""
    return value is None or (isinstance(value, float) and value != value)


def parse_json(value: Any) -> Any:
    """JSON text as the value that it stands for; anything else, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_arguments(value: Any, field: str) -> Any:
    """The arguments of a call, which OpenAI's API gives as JSON text: the object. Text that is no JSON would teach the
    model to write such calls."""
    arguments = parse_json(value)
    if isinstance(arguments, str) and arguments.strip():
        raise RowError(f"field '{field}.arguments': found text that is not JSON, wanted an object")
    return arguments
