"""Command-line overrides: Hydra's grammar, with the characters typed kept, applied to a tree of nodes."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from optune.config.nodes import TARGET, Mapping, Node, Scalar, Sequence, join, merge, to_node
from optune.config.problems import Problems, mask_argument, mask_entries, suggest
from optune.errors import ConfigError

SHORTHAND = "path"
"""Where a key goes into a text (`data.train.0.format=text` on a plain path), the text was this entry of a mapping."""

_KEY = re.compile(r"(?!-)[\w./@:$-]+(?:\[\d+\][\w./@:$-]*)*\Z")
# What Hydra's lexer has tokens for. Anything else a user types (`~/runs`, `é`, `#`) is lent a spelling while it parses.
_KNOWN = frozenset(" \t/-\\+.$%*@?|:,=()[]{}'\"_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LENT = re.compile(r"ZQ([0-9a-f]+)QZ")


@dataclass(frozen=True)
class Override:
    """One argument. `kind` is `set` (`key=`), `add` (`+key=`), `force` (`++key=`) or `remove` (`~key`); `values` holds
    one node, or those of a sweep."""

    kind: str
    key: str
    values: tuple[Node, ...]
    argument: str
    is_sweep: bool = False

    @property
    def where(self) -> str:
        """The argument as messages name it."""
        return mask_argument(self.argument)


def parse_overrides(arguments: Iterable[str], problems: Problems) -> list[Override]:
    """Reads every argument; what cannot be read goes to `problems`."""
    parsed: list[Override] = []
    for argument in arguments:
        try:
            parsed.append(parse_override(argument))
        except ConfigError as error:
            problems.errors.append(error)
    return parsed


def parse_override(argument: str) -> Override:
    """Reads `key=value`, `+key=value`, `++key=value`, `~key` by Hydra's grammar.

    Raises ConfigError, naming the argument, for what the grammar does not hold.
    """
    shown = mask_argument(argument)
    head, equals, value = argument.partition("=")
    prefix = re.match(r"\+\+|\+|~|", head)
    key = head[len(prefix[0]) :] if prefix else head
    if not (equals or head.startswith("~")) or not _KEY.match(key):
        raise ConfigError("is not an override", where=shown, hint="write key=value, without spaces around the `=`")
    kind = {"": "set", "+": "add", "++": "force", "~": "remove"}[prefix[0] if prefix else ""]
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    text = value.strip()
    if kind == "remove" or not text or text == "~":
        # An empty value is an empty text, as in Hydra; Hydra's lexer does not know `~`.
        return Override(kind, key, (Scalar(text, shown, resolved=not text),), argument)
    values, is_sweep = _parse_value(text, shown)
    return Override(kind, key, tuple(_to_node(item, shown) for item in values), argument, is_sweep)


def _parse_value(text: str, shown: str) -> tuple[list[Any], bool]:
    from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep, Sweep
    from hydra.errors import HydraException

    try:
        parsed = _parser()(_lend_spellings(text))
    except HydraException as error:
        hint = "put the value in quotes: key='\"…\"'" if "=" in text else None
        raise ConfigError(f"cannot be read: {mask_entries(_take_back(str(error)))}", where=shown, hint=hint) from None
    if isinstance(parsed, (Glob, IntervalSweep)):
        raise ConfigError("a grid needs values that can be counted", where=shown, hint="use choice(…) or range(…)")
    if isinstance(parsed, ChoiceSweep):
        return list(parsed.list), True
    if isinstance(parsed, RangeSweep):
        return list(itertools.islice(parsed.range(), 10_000)), True
    if isinstance(parsed, Sweep):
        raise ConfigError("this kind of sweep is not known", where=shown)
    return [parsed], False


def _lend_spellings(text: str) -> str:
    return "".join(c if c in _KNOWN else f"ZQ{ord(c):x}QZ" for c in text)


def _take_back(text: str) -> str:
    return _LENT.sub(lambda found: chr(int(found[1], 16)), text)


@dataclass(frozen=True)
class _Text:
    """A primitive as typed."""

    text: str
    quoted: bool


@functools.cache
def _parser() -> Callable[[str], Any]:
    """A parser of Hydra's `value` rule whose primitives are `_Text`."""
    from antlr4 import CommonTokenStream, InputStream, Token
    from hydra.core.override_parser.overrides_parser import create_functions
    from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString
    from hydra.errors import HydraException
    from hydra.grammar.gen.OverrideLexer import OverrideLexer
    from hydra.grammar.gen.OverrideParser import OverrideParser

    class TextVisitor(HydraOverrideVisitor):
        typed = False

        def _createPrimitive(self, ctx: Any) -> Any:  # noqa: N802 (Hydra's name)
            value = super()._createPrimitive(ctx)
            if isinstance(value, QuotedString):
                return _Text(_take_back(value.text), quoted=True)
            if self.typed:
                return value
            return _Text(_take_back(value if isinstance(value, str) else ctx.getText().strip()), quoted=False)

        def visitDictKey(self, ctx: Any) -> str:  # noqa: N802 (Hydra's name)
            return self._createPrimitive(ctx).text

        def visitFunction(self, ctx: Any) -> Any:  # noqa: N802 (Hydra's name)
            if ctx.getChild(0).getText() == "choice":
                return ChoiceSweep(list=[self.visitElement(element) for element in ctx.element()])
            self.typed = True  # range, int, sort … compute with their arguments
            try:
                return super().visitFunction(ctx)
            finally:
                self.typed = False

    def parse(text: str) -> Any:
        lexer = OverrideLexer(InputStream(text))
        lexer.mode(OverrideLexer.VALUE_MODE)
        parser = OverrideParser(CommonTokenStream(lexer))
        for recognizer in (lexer, parser):
            recognizer.removeErrorListeners()
            recognizer.addErrorListener(HydraErrorListener())
        tree = parser.value()
        rest: Any = parser.getCurrentToken()
        if rest.type != Token.EOF:
            raise HydraException(f"nothing was expected at {rest.text!r}")
        return TextVisitor(create_functions()).visit(tree)

    return parse


def _to_node(value: Any, where: str) -> Node:
    if isinstance(value, _Text):
        return Scalar(value.text, where, value.quoted)
    if isinstance(value, dict):
        return Mapping({str(key): _to_node(item, where) for key, item in value.items()}, where)
    if isinstance(value, list):
        return Sequence(tuple(_to_node(item, where) for item in value), where)
    return to_node(value, where)


def apply_overrides(
    tree: Mapping, overrides: Iterable[Override], problems: Problems, lists: Collection[str] = ()
) -> Mapping:
    """`tree` with the overrides applied in order, but a `_target_` before the keywords that are given beside it, which
    it must not drop as it drops the old target's. `lists`: see `merge`."""
    for override in _put_targets_first(overrides):
        try:
            changed = _change(tree, override.key.split("."), override, "", lists)
        except ConfigError as error:
            problems.errors.append(error)
            continue
        tree = changed if isinstance(changed, Mapping) else tree
    return tree


def _put_targets_first(overrides: Iterable[Override]) -> list[Override]:
    """Each override that sets a `_target_` in front of those that set something below the same key, back to the last
    one that set the key itself."""
    ordered: list[Override] = []
    for override in overrides:
        key, place = _targeted_key(override), len(ordered)
        for index in range(len(ordered) - 1, -1, -1) if key is not None else ():
            earlier = ordered[index]
            if key == _targeted_key(earlier) or f"{key}.".startswith(f"{earlier.key}."):
                break
            if earlier.key.startswith(f"{key}."):
                place = index
        ordered.insert(place, override)
    return ordered


def _targeted_key(override: Override) -> str | None:
    """The key whose `_target_` an override sets."""
    if override.key.endswith(f".{TARGET}"):
        return override.key.removesuffix(f".{TARGET}")
    node = override.values[0]
    return override.key if isinstance(node, Mapping) and TARGET in node.entries else None


def _change(
    node: Node | None,
    keys: list[str],
    override: Override,
    path: str,
    lists: Collection[str],
    siblings: Iterable[str] = (),
) -> Node | None:
    """`node` after the override; None where it is gone. `siblings` are the keys that stand beside it."""
    if not keys:
        return _place(node, override, path, lists, siblings)
    key = keys[0]
    if isinstance(node, Scalar) and not node.is_null:
        # One text stands for a list of one, or for the mapping that it abbreviates.
        node = Sequence((node,), node.where) if key.isdigit() else Mapping({SHORTHAND: node}, node.where)
    if isinstance(node, Sequence):
        return _change_item(node, keys, override, path, lists)
    mapping = node if isinstance(node, Mapping) else Mapping(where=override.where)
    if len(keys) == 1 and key == TARGET and override.kind != "remove":
        return merge(mapping, Mapping({TARGET: override.values[0]}, override.where))
    beside = [join(path, other) for other in mapping.entries]
    changed = _change(mapping.entries.get(key), keys[1:], override, join(path, key), lists, beside)
    entries = {**mapping.entries, key: changed} if changed is not None else _without(mapping.entries, key)
    return replace(mapping, entries=entries)


def _without(entries: dict[str, Node], key: str) -> dict[str, Node]:
    return {other: node for other, node in entries.items() if other != key}


def _change_item(node: Sequence, keys: list[str], override: Override, path: str, lists: Collection[str]) -> Node:
    items = list(node.items)
    if not keys[0].isdigit() or int(keys[0]) >= len(items):
        raise ConfigError(
            f"{path} is a list of {len(items)}, so {keys[0]!r} names no item of it",
            where=override.where,
            hint=f"items count from 0; {path}=[…] sets the whole list",
        )
    index = int(keys[0])
    changed = _change(items[index], keys[1:], override, join(path, index), lists)
    items[index : index + 1] = [] if changed is None else [changed]
    return replace(node, items=tuple(items))


def _place(
    node: Node | None, override: Override, path: str, lists: Collection[str], siblings: Iterable[str]
) -> Node | None:
    if override.kind == "remove":
        if node is None:
            raise ConfigError(
                f"{path} is not set in the config, so it cannot be removed",
                where=override.where,
                hint=suggest(path, siblings),
            )
        return None
    value = override.values[0]
    if override.kind == "add" and isinstance(node, Scalar) and isinstance(value, Scalar):
        raise ConfigError(
            f"{path} is set already; `+` adds a key that is not there",
            where=override.where,
            hint=f"write {override.where.lstrip('+')}",
        )
    return value if node is None else merge(node, value, lists, path)


def spell(node: Node) -> str:
    """A value as it is written in an override."""
    if isinstance(node, Sequence):
        return "[" + ",".join(spell(item) for item in node.items) + "]"
    if isinstance(node, Mapping):
        return "{" + ",".join(f"{key}:{spell(item)}" for key, item in node.entries.items()) + "}"
    if not node.quoted:
        return node.text
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), node.text)
    return f"'{escaped}'"
