"""`load`: from a config file and overrides to a checked dataclass, or to all that is wrong with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Arguments
from pathlib import Path
from typing import Any, TypeVar

from optune.config.compose import compose
from optune.config.convert import FAILED, convert, list_keys
from optune.config.nodes import TARGET, Mapping, Node, Sequence, join, to_node
from optune.config.options import rules_of
from optune.config.problems import Problems
from optune.config.target_keywords import GROUPS, check_groups, check_targets
from optune.config.targets import check_names

T = TypeVar("T")


def load(
    schema: type[T], config_path: str | Path, overrides: Arguments[str] = (), *, allow_targets: Arguments[str] = ()
) -> T:
    """The config in `config_path` with `overrides`, checked against the dataclass `schema` at every depth.

    `allow_targets` are packages that a `_target_` may name besides the built-in ones. Raises ConfigError with
    everything that is wrong at once: unknown keys, wrong types, values out of bounds, variables that are not set. Only
    when all that is right are the `_target_`s imported and their keywords checked.
    """
    problems = Problems()
    tree = compose(_target_defaults(schema), Path(config_path), overrides, problems, list_keys(schema, only=list))
    cfg = convert(schema, tree, problems)

    def where(path: str) -> str:
        return _place(tree, path)

    if cfg is not FAILED:
        for section, name, path, kind in _find_targets(cfg):
            setattr(section, name, check_names(getattr(section, name), kind, path, where, allow_targets, problems))
    problems.raise_if_any()
    found = [(getattr(section, name), path, kind) for section, name, path, kind in _find_targets(cfg)]
    problems = check_targets(found, where)
    problems.raise_if_any()
    if {GROUPS, "optimizer"} <= vars(cfg).keys():
        check_groups(vars(cfg)[GROUPS], vars(cfg)["optimizer"], where, problems)
        problems.raise_if_any()
    _check_length(cfg, where, problems)
    problems.raise_if_any()
    return cfg


def _check_length(cfg: Any, where: Callable[[str], str], problems: Problems) -> None:
    """A warm-up longer than `max_steps` is refused here, before rows are read: they make no run longer."""
    most, warmup = getattr(cfg, "max_steps", None), getattr(getattr(cfg, "schedule", None), "warmup_steps", None)
    if most is not None and warmup is not None and warmup > most:
        problems.add(
            f"schedule.warmup_steps is {warmup} and max_steps is {most}: the rate would never be reached",
            where=where("schedule.warmup_steps"),
            hint=f"0 to {most}",
        )


def _find_targets(section: Any, prefix: str = "") -> Iterator[tuple[Any, str, str, str]]:
    """(section, key, dotted path, kind of target) of every key that may name a `_target_`, at any depth."""
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), join(prefix, field.name)
        if kind := rules_of(field).target:
            yield section, field.name, path, kind
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if dataclasses.is_dataclass(item):
                yield from _find_targets(item, path if index is None else join(path, index))


def _target_defaults(schema: type[Any]) -> Mapping:
    """The defaults that name a `_target_`: what a config says about such a key merges into them, or replaces them."""
    entries: dict[str, Node] = {}
    for field in dataclasses.fields(schema):
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            if isinstance(value, dict) and TARGET in value:
                entries[field.name] = to_node(value, "the default")
    return Mapping(entries)


def _place(tree: Mapping, path: str) -> str:
    """Where a key stands, or the nearest key above it that is written somewhere."""
    node: Node = tree
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(node, Sequence) and part.isdigit() and int(part) < len(node.items):
            node = node.items[int(part)]
        elif isinstance(node, Mapping) and part in node.entries:
            node = node.entries[part]
    return node.where
