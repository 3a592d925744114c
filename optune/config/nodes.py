"""Config values as they were written: text with the place where it stands, before any type is known.

YAML and the override grammar both guess types from spelling (`144e16` becomes a float, `007` a number, `yes` a truth
value). Here nothing is guessed: the key's declared type decides later (`convert.py`), from the characters typed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Scalar:
    """A text. `quoted` texts are never null; `resolved` ones came out of an interpolation; a broken one could not be
    read, which has been said already."""

    text: str
    where: str
    quoted: bool = False
    resolved: bool = False
    is_broken: bool = False

    @property
    def is_null(self) -> bool:
        """Whether this is a spelling of null."""
        return not self.quoted and self.text in (("null", "~", "Null", "NULL") if self.resolved else NULLS)

    @property
    def is_python_null(self) -> bool:
        """Whether this is a spelling of null that only Python knows."""
        return not self.quoted and self.text in PYTHON_NULLS


@dataclass(frozen=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    where: str


@dataclass(frozen=True)
class Mapping:
    """A mapping; each value's `where` is the place of its key."""

    entries: dict[str, Node] = field(default_factory=dict)
    where: str = ""


Node = Scalar | Sequence | Mapping
NULLS = ("null", "~", "Null", "NULL", "")
PYTHON_NULLS = ("none", "None", "NONE")
TARGET = "_target_"


def to_node(value: Any, where: str) -> Node:
    """The node of a plain Python value."""
    if isinstance(value, dict):
        return Mapping({str(key): to_node(item, where) for key, item in value.items()}, where)
    if isinstance(value, (list, tuple)):
        return Sequence(tuple(to_node(item, where) for item in value), where)
    if value is None:
        return Scalar("null", where)
    if isinstance(value, bool):
        return Scalar("true" if value else "false", where)
    return Scalar(str(value), where, quoted=isinstance(value, str))


def merge(base: Node, over: Node, lists: Collection[str] = (), path: str = "") -> Node:
    """`over` on top of `base`, which stands at `path`: mappings merge key by key, everything else is replaced.

    A mapping that names another `_target_` replaces the old one whole: its keywords belonged to the old target. So does
    one where a key of `lists` wants a list: it stands for a list of one, or is an item, and the limits of the old data
    source are not those of the new one.
    """
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)) or _changes_target(base, over):
        return over
    if (path.rpartition("[")[0] if path.endswith("]") else path) in lists:
        return over
    entries = dict(base.entries)
    for key, node in over.entries.items():
        entries[key] = merge(entries[key], node, lists, join(path, key)) if key in entries else node
    return replace(base, entries=entries)


def _changes_target(base: Mapping, over: Mapping) -> bool:
    new, old = over.entries.get(TARGET), base.entries.get(TARGET)
    return isinstance(new, Scalar) and not (isinstance(old, Scalar) and old.text == new.text)


def join(path: str, key: str | int) -> str:
    """`data.train` and 0 give `data.train[0]`; `data` and `train` give `data.train`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def type_name(node: Node) -> str:
    """What a node is, in words."""
    return {Scalar: "a single value", Sequence: "a list", Mapping: "a mapping"}[type(node)]
