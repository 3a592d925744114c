"""Nodes into a typed dataclass: the declared type of a key decides what its characters mean."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from optune.config.files import parse_flow_list
from optune.config.nodes import Mapping, Node, Scalar, Sequence, join, type_name
from optune.config.options import NO_RULES, Rules, rules_of
from optune.config.problems import Problems, find_nearest, show_text
from optune.config.scalars import UnfitError, guess, read_bool, read_choice, read_float, read_int, read_text
from optune.config.sections import OTHER_NAMES
from optune.errors import ConfigError

FAILED: Any = object()
"""What a converter returns after it has noted a problem."""


def convert(schema: type[Any], tree: Mapping, problems: Problems) -> Any:
    """An instance of the dataclass `schema` from `tree`, or FAILED with everything that is wrong in `problems`."""
    return _Converter(schema, problems).dataclass(schema, tree, "")


@functools.cache
def type_hints(schema: type[Any]) -> dict[str, Any]:
    """The resolved types of a dataclass's fields."""
    return get_type_hints(schema)


def list_keys(schema: type[Any], prefix: str = "", *, only: type[Any] = object) -> list[str]:
    """Every key that a schema declares, as dotted paths; `only` those that may be of a type (`list`, `type(None)`)."""
    keys: list[str] = []
    for field in dataclasses.fields(schema):
        path = join(prefix, field.name)
        members = _members(type_hints(schema)[field.name])
        if only is object or any(only in (member, get_origin(member)) for member in members):
            keys.append(path)
        for member in members:
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                keys += list_keys(member, path, only=only)
    return keys


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a Union; a single type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


class _Converter:
    def __init__(self, schema: type[Any], problems: Problems) -> None:
        self.schema = schema
        self.problems = problems

    def fail(self, message: str, node: Node, hint: str | None = None) -> Any:
        self.problems.add(message, where=node.where, hint=hint)
        return FAILED

    def dataclass(self, schema: type[Any], node: Mapping, path: str) -> Any:
        hints = type_hints(schema)
        fields = {field.name: field for field in dataclasses.fields(schema)}
        for key, child in node.entries.items():
            if key not in fields:
                self.unknown_key(key, child, path, fields)
        values: dict[str, Any] = {}
        complete = True
        for name, field in fields.items():
            if name in node.entries:
                rules = rules_of(field)
                values[name] = self.value(hints[name], node.entries[name], join(path, name), rules)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                values[name] = self.missing(hints[name], node, join(path, name))
            complete = complete and values.get(name) is not FAILED
        return schema(**values) if complete else FAILED

    def missing(self, hint: Any, node: Mapping, path: str) -> Any:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.dataclass(hint, Mapping(where=node.where), path)  # names the keys that are missing inside
        return self.fail(f"{path} is missing", node, f"set {path}")

    def unknown_key(self, key: str, child: Node, path: str, fields: dict[str, Any]) -> None:
        meant = self.find_meant(key, {name: join(path, name) for name in fields})
        hint = f"did you mean {meant!r}?" if meant else f"the keys here are {', '.join(sorted(fields))}"
        self.problems.add(f"unknown key {join(path, key)!r}", where=child.where, hint=hint)

    def find_meant(self, key: str, here: dict[str, str]) -> str | None:
        """The key that was meant: a neighbour, one of another depth (`lr`), or one that other tools call so."""
        elsewhere = {name.rsplit(".", 1)[-1]: name for name in reversed(list_keys(self.schema))}
        elsewhere = {**OTHER_NAMES, **elsewhere}
        if key in elsewhere:
            return elsewhere[key]
        for names, closeness in ((here, 0.6), (elsewhere, 0.75), (here, 0.5)):
            nearest = find_nearest(key, names, closeness)
            if nearest:
                return names[nearest]
        return None

    def value(self, hint: Any, node: Node, path: str, rules: Rules = NO_RULES) -> Any:
        """`node` as the type `hint`, or FAILED."""
        if isinstance(node, Scalar) and node.is_broken:
            return FAILED
        if hint is Any:
            return self.free(node, path, rules)
        members = _members(hint)
        if len(members) > 1:
            return self.union(members, node, path, rules)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if isinstance(node, Mapping):
                return self.dataclass(hint, node, path)
            return self.fail(f"{path} must be a mapping, not {describe(node, path)}", node)
        origin = get_origin(hint)
        if origin is list:
            return self.list(get_args(hint)[0], node, path, rules)
        if origin is dict:
            return self.dict(get_args(hint)[1], node, path, rules)
        return self.scalar(hint, node, path, rules)

    def union(self, members: tuple[Any, ...], node: Node, path: str, rules: Rules) -> Any:
        """The member that fits the node's shape: null, mapping, list, or a single value."""
        if isinstance(node, Scalar) and type(None) in members and node.is_null:
            return None
        others = [member for member in members if member is not type(None)]
        sections = [member for member in others if dataclasses.is_dataclass(member)]
        free = [member for member in others if get_origin(member) is dict]
        if isinstance(node, Mapping) and (sections or free):
            takes_target = "_target_" in node.entries and free
            return self.value((free if takes_target or not sections else sections)[0], node, path, rules)
        lists = [member for member in others if get_origin(member) is list]
        plain = [member for member in others if member not in sections + free + lists]
        if lists and (isinstance(node, Sequence) or not plain):
            if type(None) in members and isinstance(node, Scalar) and node.is_python_null:
                return self.fail(f"{path} must be a list or null, not {describe(node, path)}", node, "write null")
            return self.value(lists[0], node, path, rules)
        if not plain:
            return self.fail(f"{path} must be a mapping, not {describe(node, path)}", node)
        numbers = [member for member in plain if get_origin(member) is not Literal]
        if numbers and len(numbers) < len(plain):  # `int | Literal["auto"]`
            words = tuple(word for member in plain if member not in numbers for word in get_args(member))
            if isinstance(node, Scalar) and node.text in words:
                return node.text
            plain, rules = numbers, dataclasses.replace(rules, words=words)
        return self.scalar(plain[0], node, path, rules, nullable=type(None) in members)

    def list(self, item: Any, node: Node, path: str, rules: Rules) -> Any:
        if isinstance(node, Scalar):
            written = parse_flow_list(node.text, node.where) if node.text.lstrip().startswith("[") else None
            if node.is_null or not node.text:
                return self.fail(f"{path} must be a list, not null", node, "an empty list is written []")
            node = written or Sequence((node,), node.where)
        elif isinstance(node, Mapping):
            node = Sequence((node,), node.where)
        if rules.not_empty and not node.items:
            return self.fail(f"{path} must name at least one", node)
        values = [self.value(item, child, join(path, index), rules) for index, child in enumerate(node.items)]
        return FAILED if FAILED in values else values

    def dict(self, item: Any, node: Node, path: str, rules: Rules) -> Any:
        if not isinstance(node, Mapping):
            return self.fail(f"{path} must be a mapping, not {describe(node, path)}", node)
        values = {key: self.entry(item, key, child, path, rules) for key, child in node.entries.items()}
        return FAILED if any(value is FAILED for value in values.values()) else values

    def entry(self, item: Any, key: str, child: Node, path: str, rules: Rules) -> Any:
        if rules.numbers and key in rules.numbers and not isinstance(child, Sequence):  # Adafactor's eps are two
            return self.value(float, child, join(path, key), rules.numbers[key])
        if key == "_target_":
            return self.value(str, child, join(path, key))
        return self.value(item, child, join(path, key), dataclasses.replace(rules, not_empty=False))

    def free(self, node: Node, path: str, rules: Rules) -> Any:
        """A value without a declared type: numbers, truth values and null by their plain spellings, else text."""
        if isinstance(node, Mapping):
            return self.dict(Any, node, path, rules)
        if isinstance(node, Sequence):
            return self.list(Any, node, path, rules)
        return self.read(guess, node, path)

    def scalar(self, hint: Any, node: Node, path: str, rules: Rules, nullable: bool = False) -> Any:
        if not isinstance(node, Scalar):
            return self.fail(f"{path} must be a single value, not {describe(node, path)}", node)
        if get_origin(hint) is Literal:
            return self.read(functools.partial(read_choice, choices=get_args(hint), nullable=nullable), node, path)
        if hint is bool:
            return self.read(functools.partial(read_bool, nullable=nullable), node, path)
        reader = {int: read_int, float: read_float, str: read_text}.get(hint)
        if reader is None:
            raise ConfigError(
                f"{path} is declared as {hint} by the recipe, which no config can hold",
                hint="str, int, float, bool, Literal, list, dict, dataclasses, and unions of these can be read",
            )
        return self.read(functools.partial(reader, rules=rules, nullable=nullable), node, path)

    def read(self, reader: Callable[[Scalar], Any], node: Scalar, path: str) -> Any:
        try:
            return reader(node)
        except UnfitError as unfit:
            shown = show_text(path.rsplit(".", 1)[-1], unfit.text)
            return self.fail(f"{path} {unfit.describe(shown)}", node, unfit.hint)


def describe(node: Node, path: str) -> str:
    """What stands there, for a message."""
    if not isinstance(node, Scalar):
        return type_name(node)
    if node.is_null:
        return "null"
    return show_text(path.rsplit(".", 1)[-1], node.text)
