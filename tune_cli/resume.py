"""`optune resume RUN_DIR [key=value …]`: goes on with the recipe and config that a run folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optune.config.emit import RECIPE_LINE, read_resumed, write_override
from optune.errors import ConfigError
from tune_cli.arguments import Parser
from tune_cli.launch import launch, split_launch_options
from tune_cli.recipes import load_recipe
from tune_cli.run import Request, add_allow_target, start_making_kernels, train

USAGE = "[torchrun options] RUN_DIR [key=value …]"
DESCRIPTION = """Goes on from the newest whole checkpoint in RUN_DIR, with the recipe and config that the folder holds.
`key=value` changes the config, as in `optune run`; torchrun options stand before RUN_DIR."""


def run(words: list[str]) -> int:
    """Reads the run folder, checks the config, trains."""
    parser = Parser("resume", USAGE, DESCRIPTION)
    parser.add_argument("--recipe", metavar="RECIPE", help="the recipe, where its file has moved since the run began")
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="let KEY, which alters training, have another value than in the checkpoint",
    )
    add_allow_target(parser)
    launch_words, rest = split_launch_options(words, parser)
    options, others = parser.split(rest)
    if not others or "=" in others[0]:
        parser.error("RUN_DIR is missing")
    folder = Path(others[0]).expanduser()
    config = find_saved_config(folder)
    start_making_kernels(config, others[1:])
    recipe = load_recipe(options.recipe or read_recipe_name(config), runs_alone=not options.allow_target)
    resumed = [write_override("output_dir", str(folder), is_path=True)]
    origin, allowed_before = read_resumed(config)
    if origin is None or any((folder / "checkpoints").glob("step-*")):
        resumed.append(write_override("resume", "auto"))
    else:  # It was stopped before it had a checkpoint of its own.
        resumed.append(write_override("resume", origin, is_path=True))
    allowed = f"allow_change=[{','.join(_list_allowed(allowed_before, options.allow_change, others[1:]))}]"
    request = Request(recipe, config, [*resumed, allowed, *others[1:]], options.allow_target)
    cfg = request.load()
    if launch_words:
        return launch(launch_words, ["resume", *rest], cfg)
    return train(recipe, cfg)


def _list_allowed(saved: Sequence[str], given: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The changes that are allowed now, and those that were allowed before and are not made anew.

    Where the run was stopped before its first save, the newest checkpoint is still that of before the change.
    """
    touched = [word.lstrip("+~").partition("=")[0] for word in overrides]
    kept = [name for name in saved if not any(_overlap(name, key) for key in touched)]
    return list(dict.fromkeys([*kept, *given]))


def _overlap(first: str, second: str) -> bool:
    """Whether one of two keys is the other or stands above it."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def find_saved_config(folder: Path) -> Path:
    """The config in a run folder."""
    config = folder / "config.yaml"
    if config.is_file():
        return config
    problem = "there is no such folder"
    if folder.is_dir():
        problem = "is not a run folder: it holds no config.yaml"
    elif folder.exists():
        problem = "is a file, not a run folder"
    raise ConfigError(problem, where=str(folder.absolute()), hint="RUN_DIR is the output_dir of a run")


def read_recipe_name(config: Path) -> str:
    """The recipe that a saved config names in its first line."""
    first = config.read_text(encoding="utf-8-sig").partition("\n")[0].strip()
    if not first.startswith(RECIPE_LINE.strip()):
        raise ConfigError(
            f"its first line does not name a recipe (`{RECIPE_LINE}full_finetune`)",
            where=str(config.absolute()),
            hint="name it with --recipe",
        )
    return first.removeprefix(RECIPE_LINE.strip()).strip()
