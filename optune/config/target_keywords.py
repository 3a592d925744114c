"""Whether the classes that a config names exist, are of the right kind, and take the keywords beside them.

This imports the classes, and with them torch, so it comes after everything else that can be wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optune.config.nodes import TARGET, join
from optune.config.problems import Problems, show_text, suggest
from optune.config.target_values import suggest_value, wanted_values
from optune.config.targets import resolve_target
from optune.errors import ConfigError

GROUPS = "parameter_groups"
MATCH = "match"


def check_targets(found: Iterable[tuple[Any, str, str]], where: Callable[[str], str]) -> Problems:
    """Everything that is wrong with the `_target_`s in `found`: (value, dotted key, kind of target).

    Fills in the learning rate that an optimizer would silently take from its own default. `where` gives the place of a
    dotted key.
    """
    problems = Problems()
    for value, name, kind in found:
        if isinstance(value, dict):
            _check(value, kind, name, where, problems)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                _check(item, kind, join(name, index), where, problems)
    return problems


def _check(settings: dict[str, Any], kind: str, path: str, where: Callable[[str], str], problems: Problems) -> None:
    target = join(path, TARGET)
    if TARGET not in settings:
        problems.add(f"{target} is missing", where=where(path), hint=f"it names {_KINDS[kind][0]}")
        return
    try:
        found = resolve_target(settings[TARGET])
    except ConfigError as error:
        problems.add(f"{target}: {str(error).removeprefix(f'{TARGET}: ')}", where=where(target), hint=error.hint)
        return
    words, is_kind, given = _KINDS[kind]
    if not is_kind(found):
        problems.add(f"{target}: {settings[TARGET]!r} is not {words}", where=where(target))
        return
    _check_values(found, given, settings, path, where, problems)
    accepted = accepted_keywords(found, skip=given)
    if accepted is None:
        return
    for key in settings:
        if key != TARGET and key not in accepted:
            _add_unknown(settings[TARGET], join(path, key), accepted, where, problems)
    for key, default in accepted.items():
        if default is inspect.Parameter.empty and key not in settings:
            problems.add(
                f"{settings[TARGET]} needs {join(path, key)}", where=where(target), hint=f"set {join(path, key)}"
            )
    default_rate = accepted.get("lr")
    if kind == "optimizer" and "lr" not in settings and isinstance(default_rate, (int, float)):
        settings["lr"] = float(default_rate)


def _check_values(
    found: Any,
    given: int,
    settings: Mapping[str, Any],
    path: str,
    where: Callable[[str], str],
    problems: Problems,
) -> None:
    """Notes each value that is not of the kind that its keyword takes."""
    wanted = wanted_values(found, skip=given)
    for key, value in settings.items():
        if key not in wanted or key == MATCH or wanted[key].accepts(value):
            continue
        place = join(path, key)
        shown = show_text(key, value) if isinstance(value, str) else "null" if value is None else repr(value)
        hint = suggest_value(wanted[key], value)
        problems.add(f"{place} must be {wanted[key].words}, not {shown}", where=where(place), hint=hint)


def _add_unknown(
    target: str, path: str, accepted: Mapping[str, Any], where: Callable[[str], str], problems: Problems
) -> None:
    section, _, key = path.rpartition(".")
    hint = suggest(path, [f"{section}.{name}" for name in accepted] if suggest(key, accepted) else ())
    hint = hint or f"it takes {', '.join(sorted(accepted))}"
    problems.add(f"{target} does not take {path!r}", where=where(path), hint=hint)


def check_groups(
    groups: list[dict[str, Any]], optimizer: Mapping[str, Any], where: Callable[[str], str], problems: Problems
) -> None:
    """Notes each parameter group that matches nothing by `match`, or has a keyword that the optimizer does not take."""
    found = resolve_target(optimizer[TARGET]) if groups else None
    accepted = accepted_keywords(found, skip=1) if groups else None
    for index, group in enumerate(groups):
        path = join(GROUPS, index)
        if not isinstance(group.get(MATCH), str) or not group[MATCH]:
            problems.add(
                f"{path}.{MATCH} is missing", where=where(path), hint="it says which parameters: a glob on their names"
            )
        _check_values(found, 1, group, path, where, problems)
        for key in group:
            if key != MATCH and accepted is not None and key not in accepted:
                _add_unknown(optimizer[TARGET], join(path, key), {**accepted, MATCH: None}, where, problems)


def accepted_keywords(found: Any, skip: int) -> dict[str, Any] | None:
    """The keywords that a callable takes after its first `skip` parameters, with defaults; None where it takes any."""
    try:
        parameters = list(inspect.signature(found).parameters.values())[skip:]
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind in named}


def _is_optimizer(found: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer


def _is_scheduler(found: Any) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    return isinstance(found, type) and issubclass(found, LRScheduler) and found is not LRScheduler


def _is_logger(found: Any) -> bool:
    return isinstance(found, type) and all(callable(getattr(found, name, None)) for name in ("start", "log", "close"))


def _is_format(found: Any) -> bool:
    return not isinstance(found, type)


_KINDS: dict[str, tuple[str, Callable[[Any], bool], int]] = {
    "optimizer": ("an optimizer", _is_optimizer, 1),
    "schedule": ("a learning-rate scheduler", _is_scheduler, 1),
    "format": ("a function of a row", _is_format, 1),
    "logger": ("a logger: a class with start, log and close", _is_logger, 0),
}
"""What each kind is, how it is told, and how many of its first parameters do not come from the config."""
