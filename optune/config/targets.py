"""`_target_`: which classes a config may name, and whether they take the keywords beside it.

A config from a stranger must not run code. A name outside the allowed packages is refused before anything is imported;
a name inside them must lead, by modules of those packages only, to something defined in them: `wandb.os.system` is
neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from optune.config.nodes import TARGET, join
from optune.config.problems import Problems, find_nearest, suggest
from optune.errors import ConfigError

ALLOWED = {
    "optimizer": ("optune.optim", "torch.optim", "torchao.optim", "bitsandbytes.optim"),
    "schedule": ("optune.optim", "torch.optim.lr_scheduler"),
    "logger": ("optune.metrics", "torch.utils.tensorboard", "tensorboard", "wandb", "mlflow"),
}
"""The packages that a key may name, by kind of target."""

_DOTTED = re.compile(r"(?!.*__)[^\W\d]\w*(?:\.[^\W\d]\w*)+\Z")


class AllowedTarget(str):
    """A `_target_` that `load` has checked; `packages` are those it may lie in, --allow-target's among them."""

    packages: tuple[str, ...]

    def __new__(cls, dotted: str, packages: Sequence[str] = ()) -> AllowedTarget:
        target = super().__new__(cls, dotted)
        target.packages = tuple(packages)
        return target


def resolve_target(dotted: str) -> Any:
    """Imports what an allowed `_target_` names.

    Takes the names that `load` returned, and of other names only those of the built-in allow-list. Raises ConfigError
    where a name is not allowed, or leads nowhere.
    """
    if isinstance(dotted, AllowedTarget):
        return _follow(dotted, dotted.packages, TARGET)
    packages = [package for packages in ALLOWED.values() for package in packages]
    if not is_allowed(dotted, packages):
        raise ConfigError(f"{dotted!r} is outside the allowed packages", where=TARGET, hint=_allow_hint(dotted))
    return _follow(dotted, packages, TARGET)


def read_target(section: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a section's `_target_` names, and the keywords beside it."""
    settings = {key: value for key, value in section.items() if key != TARGET}
    return resolve_target(section[TARGET]), settings


def schedule_keywords(schedule: Any) -> dict[str, Any]:
    """The key `schedule` as keywords of `optim.build_schedule`: those of a named one, or a `_target_` and its own."""
    if isinstance(schedule, Mapping):
        factory, settings = read_target(schedule)
        return {"factory": factory, "settings": settings}
    return dict(vars(schedule))


def is_allowed(dotted: str, packages: Sequence[str]) -> bool:
    """Whether a dotted name lies in one of `packages`."""
    return any(dotted == package or dotted.startswith(f"{package}.") for package in packages)


def check_names(
    value: Any, kind: str, path: str, where: Callable[[str], str], allow: Sequence[str], problems: Problems
) -> Any:
    """`value` with every `_target_` in it marked as allowed; the others are noted. Nothing is imported here."""
    if isinstance(value, list):
        return [check_names(item, kind, join(path, index), where, allow, problems) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    checked = {key: check_names(item, kind, join(path, key), where, allow, problems) for key, item in value.items()}
    if TARGET in value:
        dotted = value[TARGET]
        if not _DOTTED.match(dotted):
            problems.add(
                f"{join(path, TARGET)} must be a dotted name like torch.optim.AdamW, not {dotted!r}",
                where=where(join(path, TARGET)),
            )
        elif is_allowed(dotted, packages := (*ALLOWED[kind], *allow)):
            checked[TARGET] = AllowedTarget(dotted, packages)
        else:
            listed = ", ".join(f"{package}.*" for package in ALLOWED[kind])
            problems.add(
                f"{join(path, TARGET)} names {dotted!r}, which is outside the allowed packages ({listed})",
                where=where(join(path, TARGET)),
                hint=_allow_hint(dotted),
            )
    return checked


def _allow_hint(dotted: str) -> str:
    return f"if you trust that package, add --allow-target {_top(dotted)} on the command line"


def _top(dotted: str) -> str:
    return dotted.split(".", 1)[0]


def _follow(dotted: str, packages: Sequence[str], where: str) -> Any:
    """The object behind a name, through modules of `packages` only."""
    parts = dotted.split(".")
    found: Any = _import(parts[0], dotted, where)
    for index, part in enumerate(parts[1:], start=1):
        name = ".".join(parts[: index + 1])
        if isinstance(found, ModuleType) and not hasattr(found, part) and _is_module(name):
            found = _import(name, dotted, where)
            continue
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            holder = ".".join(parts[:index])
            nearest = find_nearest(part, names)
            hint = f"did you mean {holder}.{nearest}?" if nearest else None
            raise ConfigError(f"{dotted!r} does not exist: {holder} has no {part!r}", where=where, hint=hint)
        found = getattr(found, part)
        # `torch.optim.adamw.torch` is the whole of torch again: a module counts under its own name only.
        if isinstance(found, ModuleType) and found.__name__ != name and not is_allowed(found.__name__, packages):
            raise _leads_out(dotted, found.__name__, where)
    if isinstance(found, ModuleType) or not callable(found):
        raise ConfigError(f"{dotted!r} is not a class or a function", where=where)
    defined_in = getattr(found, "__module__", None) or "another package"
    if not is_allowed(defined_in, packages):
        raise _leads_out(dotted, defined_in, where)
    return found


def _leads_out(dotted: str, module: str, where: str) -> ConfigError:
    return ConfigError(
        f"{dotted!r} leads out of the allowed packages, to {module}", where=where, hint=_allow_hint(module)
    )


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import(name: str, dotted: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise ConfigError(
            f"{dotted!r} cannot be imported: no module named {missing!r}",
            where=where,
            hint=f"pip install {_top(missing)}" if _top(missing) == _top(dotted) else None,
        ) from None
    except Exception as error:
        raise ConfigError(f"{dotted!r} cannot be imported: {type(error).__name__}: {error}", where=where) from error


def check_keywords(value: Any, kind: str, path: str, where: Callable[[str], str], problems: Problems) -> None:
    """Imports the `_target_`s in `value` and notes each that does not exist, is of the wrong kind, or does not take a
    keyword. Fills in the learning rate that an optimizer would silently take from its own default."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            check_keywords(item, kind, join(path, index), where, problems)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        check_keywords(item, kind, join(path, key), where, problems)
    if TARGET not in value:
        return
    try:
        found = resolve_target(value[TARGET])
    except ConfigError as error:
        message = str(error).removeprefix(f"{TARGET}: ")
        problems.add(f"{join(path, TARGET)}: {message}", where=where(join(path, TARGET)), hint=error.hint)
        return
    if kind == "optimizer" and not _is_optimizer(found):
        problems.add(f"{join(path, TARGET)}: {value[TARGET]!r} is not an optimizer", where=where(join(path, TARGET)))
        return
    accepted = accepted_keywords(found, skip=1 if kind in ("optimizer", "schedule") else 0)
    if accepted is None:
        return
    for key in value:
        if key != TARGET and key not in accepted:
            hint = suggest(key, accepted) or f"it takes {', '.join(sorted(accepted))}"
            problems.add(f"{value[TARGET]} does not take {join(path, key)!r}", where=where(join(path, key)), hint=hint)
    default_rate = accepted.get("lr")
    if kind == "optimizer" and "lr" not in value and isinstance(default_rate, (int, float)):
        value["lr"] = float(default_rate)


def _is_optimizer(found: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer


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
