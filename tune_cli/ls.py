"""`optune ls`: the recipes and configs that come with optune."""

from __future__ import annotations

from optune.config.shipped import Shipped, list_configs, list_recipes
from tune_cli.arguments import Parser


def run(words: list[str]) -> int:
    """Prints name and first sentence of each, recipes first."""
    parser = Parser("ls", "", "Lists the recipes and configs that come with optune.")
    parser.take(parser.split(words)[1])
    _print("recipes", list_recipes())
    print()
    _print("configs", list_configs())
    return 0


def _print(title: str, shipped: list[Shipped]) -> None:
    print(title)
    width = max((len(item.name) for item in shipped), default=0)
    for item in shipped:
        print(f"  {item.name:<{width}}  {item.describe()}".rstrip())
