"""`_target_`: which classes a config may name, and whether they take the keywords beside it.

A config from a stranger must not run code. A name outside the allowed packages is refused before anything is imported;
a name inside them must lead, by modules of those packages only, to something defined in them: `wandb.os.system` is
neither.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from optune.config.nodes import TARGET, join
from optune.config.problems import Problems, find_nearest
from optune.errors import ConfigError

ALLOWED = {
    "optimizer": ("optune.optim", "torch.optim", "torchao.optim", "bitsandbytes.optim"),
    "schedule": ("optune.optim", "torch.optim"),
    "format": ("optune.data",),
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


def bind_targets(value: Any) -> Any:
    """Plain values of a config in which every mapping with a `_target_` is that function with its keywords bound."""
    if isinstance(value, Mapping):
        if TARGET not in value:
            return {key: bind_targets(item) for key, item in value.items()}
        function, settings = read_target(value)
        return functools.partial(function, **settings) if settings else function
    return [bind_targets(item) for item in value] if isinstance(value, list) else value


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


def _find_here(name: str) -> None:
    """Lets a package that only --allow-target can name be one in the current directory, as with `python -m`."""
    ours = {_top(package) for packages in ALLOWED.values() for package in packages}
    here = Path.cwd()
    stands_here = (here / f"{name}.py").is_file() or (here / name / "__init__.py").is_file()
    if stands_here and name not in ours and str(here) not in sys.path and not _is_module(name):
        sys.path.append(str(here))
        importlib.invalidate_caches()


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def _without_chatter(name: str) -> Iterator[None]:
    """torchao warns of kernels for other GPUs that do not load, and torch of a call in it that is to go: nothing that
    a user can act on."""
    names = ("torchao", "torch.utils._pytree") if _top(name) == "torchao" else ()
    levels = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def _import(name: str, dotted: str, where: str) -> ModuleType:
    _find_here(name)
    try:
        with _without_chatter(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise ConfigError(
            f"{dotted!r} cannot be imported: no module named {missing!r}",
            where=where,
            hint=f"pip install {_top(missing)}" if _top(missing) == _top(dotted) else None,
        ) from None
    except (Exception, SystemExit) as error:  # Code of a package that the user trusts: it may do anything.
        raise ConfigError(f"{dotted!r} cannot be imported: {type(error).__name__}: {error}", where=where) from error
