"""`optune cat NAME`: prints a shipped recipe or config."""

from __future__ import annotations

import sys

from optune.config.problems import suggest
from optune.config.shipped import Shipped, list_configs, list_recipes
from optune.errors import ConfigError
from tune_cli.arguments import Parser


def run(words: list[str]) -> int:
    """Prints the file as it is."""
    parser = Parser("cat", "NAME", "Prints a recipe or config that comes with optune.")
    (name,) = parser.take(parser.split(words)[1], "NAME")
    sys.stdout.write(find_shipped(name).path.read_text(encoding="utf-8"))
    return 0


def find_shipped(name: str) -> Shipped:
    """The shipped recipe or config of a name, which may end in `.py` or `.yaml`.

    Raises ConfigError where there is none, or where the name alone is a recipe's and a config's.
    """
    everything = [*list_recipes(), *list_configs()]
    found = [item for item in everything if name in (item.name, f"{item.name}{item.path.suffix}")]
    if not found:
        hint = suggest(name, [item.name for item in everything]) or "`optune ls` lists them"
        raise ConfigError(f"no recipe or config that comes with optune is called {name!r}", hint=hint)
    if len(found) > 1:
        raise ConfigError(
            f"{name!r} is a recipe and a config", hint=f"write {name}.py for the recipe, {name}.yaml for the config"
        )
    return found[0]
