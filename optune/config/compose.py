"""A config file, the files of its defaults list, and overrides, as one tree of nodes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from collections.abc import Sequence as Arguments
from pathlib import Path

from optune.config.files import read_yaml
from optune.config.nodes import Mapping, Scalar, Sequence, merge
from optune.config.overrides import Override, apply_overrides, parse_overrides
from optune.config.problems import Problems
from optune.config.resolve import resolve
from optune.errors import ConfigError

DEFAULTS = "defaults"


def compose(
    defaults: Mapping, config_path: Path, arguments: Arguments[str], problems: Problems, lists: Collection[str] = ()
) -> Mapping:
    """`defaults`, then the config (with its own defaults list, composed by Hydra), then the overrides; resolved.
    `lists`: the keys that want a list (see `merge`).

    Raises ConfigError where a file cannot be read; whatever else is wrong goes to `problems`.
    """
    config_path = config_path.expanduser()
    if not config_path.is_file():
        raise ConfigError("there is no such config file", where=str(config_path.absolute()))
    shown = shorten(config_path)
    overrides = parse_overrides(arguments, problems)
    for override in overrides:
        if override.is_sweep:
            problems.add(
                "holds several values",
                where=override.where,
                hint=f"a list is written {override.key}=[…]; a grid of runs needs --multirun",
            )
    primary = read_yaml(config_path, shown)
    if DEFAULTS in primary.entries:
        files, overrides = _compose_defaults(config_path, overrides, lists)
    else:
        files = primary
    tree = merge(defaults, files)
    assert isinstance(tree, Mapping)
    tree = apply_overrides(tree, [override for override in overrides if not override.is_sweep], problems, lists)
    # Once more below everything: a target that was left and chosen again has its defaults again, as it has when the
    # composed config is saved and loaded.
    tree = merge(defaults, tree)
    assert isinstance(tree, Mapping)
    return resolve(tree, problems)


def shorten(path: Path) -> str:
    """A path as messages show it: relative where it lies below the current directory."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 (resolve would follow links)
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _compose_defaults(
    config_path: Path, overrides: list[Override], lists: Collection[str]
) -> tuple[Mapping, list[Override]]:
    """The merged files of a defaults list, and the overrides that are left when config groups are chosen."""
    import yaml
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    folder = config_path.absolute().parent
    if config_path.suffix != ".yaml":
        raise ConfigError("a config with a defaults list must end in .yaml", where=shorten(config_path))
    choices = [override for override in overrides if _chooses_group(override, folder)]
    try:
        # Hydra warns where `_self_` is left out; a file's own keys come last then, which is what anyone expects.
        with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(folder), version_base="1.3"):
            listed = (
                GlobalHydra.instance()
                .config_loader()
                .compute_defaults_list(config_path.stem, [choice.argument for choice in choices], RunMode.RUN)
            )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"cannot be read as YAML: {error.problem}",
            where=f"{mark.name}:{mark.line + 1}" if mark else shorten(config_path),
        ) from None
    except (HydraException, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split("Config search path:")[0].split()) or type(error).__name__
        raise ConfigError(f"the defaults list cannot be followed: {reason}", where=shorten(config_path)) from None
    tree = Mapping()
    for default in listed.defaults:
        if default.config_path and not default.config_path.startswith("hydra/"):
            merged = merge(tree, _read_default(folder, default.config_path, default.package or ""), lists)
            tree = merged if isinstance(merged, Mapping) else tree
    return tree, [override for override in overrides if override not in choices]


def _chooses_group(override: Override, folder: Path) -> bool:
    """Whether an override picks a file of a config group (`+optimizer=adam` beside a folder `optimizer`)."""
    group = override.key.split("@")[0]
    value = override.values[0]
    is_name = override.kind == "remove" or isinstance(value, Scalar) or _is_list_of_names(value)
    return is_name and "." not in group and (folder / group).is_dir()


def _is_list_of_names(node: object) -> bool:
    return isinstance(node, Sequence) and all(isinstance(item, Scalar) for item in node.items)


def _read_default(folder: Path, name: str, package: str) -> Mapping:
    path = folder / (name if name.endswith(".yaml") else f"{name}.yaml")
    content = read_yaml(path, shorten(path))
    tree = Mapping({key: node for key, node in content.entries.items() if key != DEFAULTS}, content.where)
    for part in reversed([part for part in package.split(".") if part and part != "_global_"]):
        tree = Mapping({part: tree}, tree.where)
    return tree
