"""`optune run RECIPE --config CONFIG [key=value …]`: trains."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optune.errors import ConfigError
from tune_cli import worker
from tune_cli.arguments import Parser
from tune_cli.launch import launch, split_launch_options
from tune_cli.recipes import Recipe, find_config, load_recipe

USAGE = "[torchrun options] RECIPE --config CONFIG [key=value …]"
DESCRIPTION = """\
Trains. RECIPE is a shipped name (`optune ls` lists them) or the path of a .py file, CONFIG a shipped name or the path
of a .yaml file. key=value overrides the config, in Hydra's grammar: optimizer.lr=1e-5, data.train=[a.jsonl,b.jsonl].
Options before RECIPE that optune does not know go to torchrun: --nproc-per-node 2, --nnodes 2, --rdzv-endpoint …"""


@dataclass(frozen=True)
class Request:
    """What a command line asks for: a recipe, a config file, and what changes it."""

    recipe: Recipe
    config: Path
    overrides: list[str]
    allow_targets: list[str]

    def load(self, extra: Sequence[str] = ()) -> Any:
        """The checked config, with `extra` overrides."""
        from optune.config import load

        return load(self.recipe.schema, self.config, [*self.overrides, *extra], allow_targets=self.allow_targets)


def run(words: list[str]) -> int:
    """Checks the config, then trains: here, or in the workers that the torchrun options ask for."""
    parser = make_parser("run", USAGE, DESCRIPTION)
    parser.add_argument("--multirun", action="store_true", help="run every combination of key=a,b,c one after another")
    launch_words, rest = split_launch_options(words, parser)
    options, others = parser.split(rest)
    start_making_kernels(options.config, others)
    request = read_request(parser, options, others, trains=True)
    if options.multirun:
        from tune_cli.multirun import run_grid

        return run_grid(request, launch_words)
    cfg = request.load()
    if launch_words:
        return launch(launch_words, ["run", *rest], cfg)
    if restart := worker.read_restart():
        cfg = request.load(_go_on(cfg.resume, cfg.output_dir, restart))
    return train(request.recipe, cfg)


def start_making_kernels(config: str | Path | None, overrides: Sequence[str]) -> None:
    """Beside the import of torch, which reading a recipe begins with, where a run of `config` may be one on a CPU.
    Where they are made already it takes nothing."""
    try:
        is_useful = config is None or may_use_cpu(find_config(str(config)), overrides)
    except (ConfigError, OSError):
        return  # It will be told.
    if is_useful:
        from optune.native import start_making

        start_making()


def may_use_cpu(config: Path, overrides: Sequence[str]) -> bool:
    """Whether a run may train on a CPU, as far as can be told before anything is imported: true where in doubt."""
    text = config.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^defaults:", text, re.MULTILINE):
        return True  # other files may name the device
    named = re.findall(r"^device:[ \t]*([^\s#]+)", text, re.MULTILINE)
    pairs = [word.partition("=") for word in overrides]
    named += [value for key, _, value in pairs if key.lstrip("+") == "device"]
    device = named[-1].strip("'\"") if named else "auto"
    return not _has_cuda() if device == "auto" else re.fullmatch(r"(cuda|mps|xpu)(:\d+)?", device) is None


def _has_cuda() -> bool:
    """Whether `device: auto` is an NVIDIA GPU here: there is a driver, it is not hidden, and torch is built for it."""
    if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return bool(folders) and re.search(r"^cuda\b.*'", (Path(folders[0]) / "version.py").read_text(), re.M) is not None


def _go_on(resume: str | None, output_dir: str, restart: int) -> list[str]:
    """What lets a run go on whose processes were started again: a restart never begins anew over what was done."""
    from optune.config.emit import write_override

    if resume not in (None, "auto") and not any((Path(output_dir) / "checkpoints").glob("step-*")):
        return []  # It goes on from another run, and has saved nothing yet.
    if worker.read_rank() == 0:
        print(f"restart {restart}: going on from the newest whole checkpoint (resume=auto)", file=sys.stderr)
    return [write_override("resume", "auto")]


def make_parser(command: str, usage: str, description: str) -> Parser:
    """A parser with the options that every command about a config has."""
    parser = Parser(command, usage, description)
    parser.add_argument("--config", metavar="CONFIG", help="a shipped name or the path of a .yaml file")
    add_allow_target(parser)
    return parser


def add_allow_target(parser: argparse.ArgumentParser) -> None:
    """`--allow-target`: only ever on the command line, so that a config from a stranger cannot run code."""
    parser.add_argument(
        "--allow-target",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="let _target_ name things in PACKAGE too; its code will run",
    )


def read_request(parser: Parser, options: argparse.Namespace, others: list[str], *, trains: bool = False) -> Request:
    """RECIPE, --config and overrides of a command line; `trains`: of one that trains."""
    if not others or "=" in others[0]:
        parser.error("RECIPE is missing")
    if options.config is None:
        parser.error("--config is missing")
    config = find_config(options.config)
    recipe = load_recipe(others[0], runs_alone=trains and not options.allow_target)
    return Request(recipe, config, others[1:], options.allow_target)


def train(recipe: Recipe, cfg: Any) -> int:
    """Runs the recipe; a recipe that returns a number means an exit code."""
    from optune import idle_modules

    idle_modules.leave_out_compiler()  # also with `compile: true`: a CPU may have nothing left to compile
    result = recipe.main(cfg)
    return result if isinstance(result, int) else 0
