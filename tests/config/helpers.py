"""A config file in a folder of its own, and what `load` makes of it or says against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optune.config import ConfigProblemsError, RunConfig, load
from optune.errors import ConfigError

BASE = "model: {path: m0}\ndata: {train: a.jsonl}\n"


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str = "", *overrides: str, schema: type = RunConfig, **settings: Any) -> Any:
    """The config of `BASE` and `text`."""
    return load(schema, write(folder, BASE + text), overrides, **settings)


def refuse(
    folder: Path, text: str = "", *overrides: str, schema: type = RunConfig, base: str = BASE
) -> list[ConfigError]:
    """All that `load` says against `base` and `text`."""
    try:
        load(schema, write(folder, base + text), overrides)
    except ConfigProblemsError as several:
        return several.errors
    except ConfigError as error:
        return [error]
    raise AssertionError("the config was accepted")


def say(error: ConfigError) -> str:
    """As the command line prints it."""
    return f"{error} | {error.hint}"
