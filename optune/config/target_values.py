"""Whether a value is of the kind that a class's keyword takes: by its annotation, and where it has none its default.

YAML gives `foreach: no` as a text and `betas: 0.9` as a number; torch would find out after the weights are loaded, or
take the text for true.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

_NUMBER_WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}
_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class Wanted:
    """What one keyword takes. `words` continues `<key> must be …`; `accepts` judges a value that a config can hold."""

    def __init__(self, words: str, accepts: Callable[[Any], bool], *, nullable: bool) -> None:
        self.words = f"{words} or null" if nullable else words
        self._accepts, self._nullable = accepts, nullable

    def accepts(self, value: Any) -> bool:
        return self._nullable if value is None else self._accepts(value)


def wanted_values(found: Any, skip: int) -> dict[str, Wanted]:
    """What each keyword of a callable takes after its first `skip` parameters; those that say nothing are left out."""
    try:
        parameters = list(inspect.signature(found).parameters.values())[skip:]
    except (TypeError, ValueError):
        return {}
    try:
        hints = get_type_hints(found.__init__ if isinstance(found, type) else found)
    except Exception:  # annotations of others may name what is not there at run time
        hints = {}
    wanted = {p.name: _of_hint(hints.get(p.name), p.default) or _of_default(p.default) for p in parameters}
    return {name: each for name, each in wanted.items() if each is not None}


def suggest_value(wanted: Wanted, value: Any) -> str | None:
    """How the value that was meant is written, where it can be told."""
    if not isinstance(value, str):
        if wanted.accepts(str(value)):
            return f"a text of these characters stands in quotes: '{value}'"
        whole = isinstance(value, float) and value.is_integer() and wanted.accepts(int(value))
        return f"write {int(value)}" if whole else None
    meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower())
    return f"write {meant}" if meant and wanted.accepts(meant == "true") else None


def _of_hint(hint: Any, default: Any) -> Wanted | None:
    """By an annotation; None where it names a type of which this module knows nothing."""
    if hint is None:
        return None
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    nullable = type(None) in members or default is None
    # A tensor is no value of a config: what may be a number or a tensor is a number here.
    members = [member for member in members if member is not type(None) and not _is_tensor(member)]
    if float in members and int in members:
        members.remove(int)
    parts = [_of_member(member) for member in members]
    if not parts or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    words = " or ".join(words for words, _ in known)
    return Wanted(words, lambda value: any(accepts(value) for _, accepts in known), nullable=nullable)


def _of_member(member: Any) -> tuple[str, Callable[[Any], bool]] | None:
    if member in _PLAIN:
        return _PLAIN[member], lambda value: _is_plain(member, value)
    origin, inner = get_origin(member) or member, get_args(member)
    if origin is tuple and inner and Ellipsis not in inner:
        return _of_items([_of_hint(item, inspect.Parameter.empty) for item in inner])
    if origin is list and len(inner) == 1:
        item = _of_hint(inner[0], inspect.Parameter.empty)
        return ("a list", lambda value: _is_list(value) and all(item is None or item.accepts(each) for each in value))
    return ("a list", _is_list) if origin in (tuple, list) else None


def _of_default(default: Any) -> Wanted | None:
    """By a default: where it is null, or there is none, everything may be meant."""
    if isinstance(default, bool):
        return Wanted(_PLAIN[bool], lambda value: _is_plain(bool, value), nullable=False)
    if isinstance(default, int | float):
        return Wanted(_PLAIN[float], lambda value: _is_plain(float, value), nullable=False)
    if isinstance(default, str):
        return Wanted(_PLAIN[str], lambda value: _is_plain(str, value), nullable=False)
    if isinstance(default, tuple):
        return Wanted(*_of_items([_of_default(item) for item in default]), nullable=False)
    return None


def _of_items(items: list[Wanted | None]) -> tuple[str, Callable[[Any], bool]]:
    def accepts(value: Any) -> bool:
        if not _is_list(value) or len(value) != len(items):
            return False
        return all(item is None or item.accepts(each) for item, each in zip(items, value, strict=True))

    numbers = all(item is not None and item.words.startswith(_PLAIN[float]) for item in items)
    return f"a list of {_NUMBER_WORDS.get(len(items), len(items))} {'numbers' if numbers else 'values'}", accepts


def _is_plain(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_tensor(member: Any) -> bool:
    return getattr(member, "__module__", None) == "torch" and getattr(member, "__name__", None) == "Tensor"
