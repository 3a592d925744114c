"""The recipes and configs that come with optune: in a checkout beside the package, in a wheel inside it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent


class Shipped(NamedTuple):
    """A shipped recipe or config. `name` is what the command line takes (`smollm2/135m_full`)."""

    name: str
    path: Path

    def describe(self) -> str:
        """Its first sentence, as far as it stands on one line."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            text = line.strip().lstrip("#").strip().strip('"').strip()
            if text and not text.startswith(("!", "optune run ")):
                return re.split(r"(?<=\.)\s|[:,]$", text)[0]
        return ""


@functools.cache
def shipped_root() -> Path:
    """The folder that holds `recipes/` and `configs/`."""
    inside = PACKAGE / "_shipped"
    return inside if inside.is_dir() else PACKAGE.parent


def list_recipes() -> list[Shipped]:
    """All shipped recipes, by name."""
    return _list("recipes", ".py")


def list_configs() -> list[Shipped]:
    """All shipped configs, by name."""
    return _list("configs", ".yaml")


def _list(folder: str, suffix: str) -> list[Shipped]:
    root = shipped_root() / folder
    found = (
        Shipped(path.relative_to(root).with_suffix("").as_posix(), path)
        for path in root.rglob(f"*{suffix}")
        if not path.name.startswith(("_", "."))
    )
    return sorted(found, key=lambda shipped: shipped.name)


def shipped_name(path: Path) -> str | None:
    """The name of a shipped recipe by its file, None for any other file."""
    root = shipped_root() / "recipes"
    path = path.resolve()
    return path.relative_to(root).with_suffix("").as_posix() if path.is_relative_to(root) else None
