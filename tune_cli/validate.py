"""`optune validate RECIPE --config CONFIG [key=value …]`: all that `run` checks before the first step."""

from __future__ import annotations

import contextlib

from optune.errors import ConfigError
from tune_cli import worker
from tune_cli.launch import launch, split_launch_options
from tune_cli.run import make_parser, read_request

USAGE = "[torchrun options] RECIPE --config CONFIG [--processes N] [key=value …]"
DESCRIPTION = """\
Checks everything that `optune run` checks before the first step, and prints the resolved config. With torchrun options
(--nproc-per-node 2 …) the processes are started, and check together. With --processes N none is started: this one takes
itself for the first of N, so a layout for machines that are not here is checked, with a part of the model in memory."""


def run(words: list[str]) -> int:
    """Checks and prints the resolved config to stdout; secrets are hidden."""
    parser = make_parser("validate", USAGE, DESCRIPTION)
    parser.add_argument("--processes", type=int, metavar="N", help="check for so many processes, without starting them")
    launch_words, rest = split_launch_options(words, parser)
    options, others = parser.split(rest)
    request = read_request(parser, options, others)
    _check_processes(options.processes, launch_words)
    cfg = request.load()
    if launch_words:
        return launch(launch_words, ["validate", *rest], cfg, logs=False)
    with _pretending(options.processes):
        request.recipe.main(cfg, validate_only=True)
    if worker.read_rank() == 0:
        from optune.config import to_yaml

        print(to_yaml(cfg, hide_secrets=True), end="")
    return 0


def _check_processes(count: int | None, launch_words: list[str]) -> None:
    if count is None:
        return
    if launch_words or worker.is_worker():
        raise ConfigError(
            "--processes starts none, and torchrun's options do",
            hint="use --nproc-per-node alone to start them, --processes alone to check without them",
        )
    if count < 1:
        raise ConfigError(f"--processes must be 1 or more, not {count}")


def _pretending(count: int | None) -> contextlib.AbstractContextManager[None]:
    if count is None or count == 1:
        return contextlib.nullcontext()
    from optune import distributed

    return distributed.pretend(count)
