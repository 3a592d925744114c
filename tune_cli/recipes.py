"""Recipes and configs by name or path."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from optune.config.problems import suggest
from optune.config.shipped import Shipped, list_configs, list_recipes
from optune.errors import ConfigError, OptuneError


@dataclass(frozen=True)
class Recipe:
    """A loaded recipe: its config schema, its `main(cfg, validate_only=False)`, and its `make_batches` where it has
    one."""

    reference: str
    schema: type[Any]
    main: Callable[..., Any]
    make_batches: Callable[..., Any] | None = None


def load_recipe(reference: str, *, runs_alone: bool = False) -> Recipe:
    """The recipe behind a shipped name or the path of a `.py` file. `runs_alone`: it will train, and no other code than
    ours with it; a shipped one then imports torch without what training does not need.

    Raises ConfigError where there is none, where its code cannot be read (file and line), or where it lacks `Config`
    or `main`.
    """
    from optune import idle_modules
    from optune.garbage import uncollected

    path = find_recipe(reference)
    # To look through what torch's import makes, again and again, takes a tenth of it, and later a third of a second.
    with uncollected(stays="torch" not in sys.modules):
        if runs_alone and not reference.endswith(".py"):
            idle_modules.leave_out_rules()
        module = _import_file(path)
    schema, main = getattr(module, "Config", None), getattr(module, "main", None)
    missing = [
        what
        for what, is_there in (
            ("a dataclass `Config`", isinstance(schema, type) and is_dataclass(schema)),
            ("a function `main(cfg)`", callable(main)),
        )
        if not is_there
    ]
    if missing or schema is None or main is None:
        raise ConfigError(
            f"is not a recipe: it has not {' and not '.join(missing)}",
            where=str(path),
            hint="`optune cat full_finetune` shows what a recipe looks like",
        )
    return Recipe(reference, schema, main, getattr(module, "make_batches", None))


def find_recipe(reference: str) -> Path:
    """The file of a recipe."""
    if reference.endswith(".py"):
        path = Path(reference).expanduser().absolute()
        if path.is_file():
            return path
        siblings = path.parent.glob("*.py") if path.parent.is_dir() else []
        raise ConfigError("there is no such recipe file", where=str(path), hint=_suggest_file(path, siblings))
    shipped = list_recipes()
    for recipe in shipped:
        if recipe.name == reference:
            return recipe.path
    raise _unknown("recipe", reference, shipped, list_configs(), ".py")


def find_config(reference: str) -> Path:
    """The file of a config: a path that ends in `.yaml`, or a shipped name."""
    if reference.endswith((".yaml", ".yml")) or Path(reference).is_file():
        path = Path(reference).expanduser()
        if path.is_file():
            return path
        folder = path.absolute().parent
        siblings = folder.glob("*.yaml") if folder.is_dir() else []
        raise ConfigError(
            "there is no such config file", where=str(path.absolute()), hint=_suggest_file(path, siblings)
        )
    shipped = list_configs()
    for config in shipped:
        if config.name == reference:
            return config.path
    raise _unknown("config", reference, shipped, list_recipes(), ".yaml")


def _unknown(
    kind: str, reference: str, shipped: Iterable[Shipped], others: Iterable[Shipped], suffix: str
) -> ConfigError:
    path = Path(reference).expanduser()
    other = "config" if kind == "recipe" else "recipe"
    if any(item.name == reference for item in others) or path.suffix in (".yaml", ".yml", ".py"):
        hint = f"{reference!r} is a {other}; the command is: optune run RECIPE --config CONFIG"
    elif path.with_name(f"{path.name}{suffix}").is_file():
        hint = f"for the file write {reference}{suffix}"
    else:
        hint = suggest(reference, [item.name for item in shipped]) or "`optune ls` lists the shipped ones"
    return ConfigError(
        f"unknown {kind} {reference!r}: none that comes with optune is called so, and a path must end in {suffix}",
        hint=hint,
    )


def _suggest_file(path: Path, siblings: Iterable[Path]) -> str | None:
    return suggest(path.name, [sibling.name for sibling in siblings])


def _import_file(path: Path) -> Any:
    """The module in a file. It can import its neighbours; neither it nor they can hide an installed package."""
    name = f"optune_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their types up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except OptuneError:
        raise
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f"{error.msg}: {line!r}" if line else str(error.msg)
        raise ConfigError(f"cannot be read: {shown}", where=f"{error.filename}:{error.lineno}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the recipe cannot be imported: {type(error).__name__}: {error}", where=_find_line(error, path)
        ) from error
    return module


def _find_line(error: BaseException, path: Path) -> str:
    """The last line of the recipe that an import error passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
