"""Which parameters get which settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from optune.errors import ConfigError

REGEX_PREFIX = "re:"


def divide_parameters(names: Sequence[str], parameter_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of names as a torch optimizer takes groups of parameters: `{"params": [name, …], setting: value, …}`.

    - each of `parameter_groups` has `match`, a glob on the whole parameter name (`*.bias`, `model.layers.0.*`), or a
      regular expression that is searched in it when it begins with `re:` (`re:layers\\.[0-3]\\.`), and settings.
    - a parameter belongs to the first group that matches it; the rest make the first group returned, with the
      optimizer's own settings.

    Raises `ConfigError` for a group that gets no parameter, naming it.
    """
    owner: dict[str, int] = {}
    for index, group in enumerate(parameter_groups):
        where = f"parameter_groups.{index}.match"
        matched = [name for name in names if matches(name, group["match"], where=where)]
        won = [name for name in matched if owner.setdefault(name, index) == index]
        if not won:
            taken = f"; the {len(matched)} that it matches belong to groups before it" if matched else ""
            raise ConfigError(
                f"{group['match']!r} matches no trained parameter{taken}",
                where=where,
                hint=f"a glob matches the whole name, such as {names[0]}; 're:…' searches a regular expression in it",
            )
    rest = [name for name in names if name not in owner]
    divided = [{"params": rest}] if rest else []
    for index, group in enumerate(parameter_groups):
        settings = {key: value for key, value in group.items() if key != "match"}
        divided.append({"params": [name for name in names if owner.get(name) == index], **settings})
    return divided


def matches(name: str, pattern: str, *, where: str = "match") -> bool:
    """True when `pattern`, a glob or `re:` and a regular expression, matches the parameter `name`."""
    if not pattern.startswith(REGEX_PREFIX):
        return fnmatchcase(name, pattern)
    try:
        return re.search(pattern.removeprefix(REGEX_PREFIX), name) is not None
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}", where=where) from error
