"""`option` declares a config key: its default and the rules that its value must keep."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rules:
    """What a value must keep besides its type.

    - `minimum`, `maximum`, `above`, `below`: bounds of a number; the last two are not reached.
    - `is_path`: a text that names a place on disk; `~` and environment variables expand.
    - `target`: a mapping may name a class by `_target_`; the text says what kind of class it must be.
    - `numbers`: bounds of entries in a free mapping, such as `lr` in `optimizer`.
    - `not_empty`: a text or list that must hold something.
    - `null`: what null stands for, where the key takes it; goes on after "null is".
    - `words`: texts that a number's type allows in its place; read from the type.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    is_path: bool = False
    target: str | None = None
    numbers: dict[str, Rules] | None = None
    not_empty: bool = False
    null: str | None = None
    words: tuple[str, ...] = ()


NO_RULES = Rules()


def option(default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """A dataclass field with `default` and the given `Rules`; lists and dicts are copied for each instance.

    Without a default the key must be set.
    """
    metadata = {"rules": Rules(**rules)}
    if isinstance(default, (list, dict)):
        copy = type(default)
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def rules_of(field: dataclasses.Field[Any]) -> Rules:
    """The rules that `option` gave to a dataclass field."""
    return field.metadata.get("rules", NO_RULES)
