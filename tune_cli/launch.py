"""Several processes: torch's own launcher starts this command line in each worker.

The config has been checked by then, so a wrong one starts no worker. Workers leave their cause in the launcher's error
files and stay silent; it is printed here, last and once, for the rank that failed first.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from optune.config.problems import suggest
from optune.errors import ConfigError, TrainingError
from tune_cli.arguments import Parser
from tune_cli.messages import QUIET_WORKER, Cause, print_causes

OURS = ("--module", "-m", "--no-python", "--no_python", "--run-path", "--run_path")
"""Options of torchrun that say what the workers run; here that is always optune."""

STOPPED = (130, 143)
"""A worker that stopped on SIGINT or SIGTERM after it saved."""


def split_launch_options(words: Sequence[str], own: Parser) -> tuple[list[str], list[str]]:
    """Splits off torchrun's options, which stand before the first word that is no option; also returns the rest.

    Options of the command itself may stand among them. torch is imported only where a foreign option is seen.
    """
    arity = {name: action.nargs != 0 for action in own._actions for name in action.option_strings}
    launch_words: list[str] = []
    rest: list[str] = []
    torch_arity: dict[str, bool] | None = None
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        name, equals, _ = words[index].partition("=")
        if name in arity:
            target, takes_value = rest, arity[name]
        else:
            if torch_arity is None:
                torch_arity = _read_torchrun_options()
            if name not in torch_arity or name in OURS:
                raise _unknown_option(name, own, [*arity, *torch_arity])
            target, takes_value = launch_words, torch_arity[name]
        length = 2 if takes_value and not equals else 1
        target += words[index : index + length]
        index += length
    return launch_words, [*rest, *words[index:]]


def _unknown_option(name: str, own: Parser, known: Iterable[str]) -> ConfigError:
    if name in OURS:
        return ConfigError(f"{name} has no place here: optune says what the workers run")
    hint = suggest(name, known) or f"usage: {own.usage}"
    return ConfigError(f"neither optune {own.command} nor torchrun has an option {name!r}", hint=hint)


def _read_torchrun_options() -> dict[str, bool]:
    """Every option of torchrun, and whether it takes a value."""
    return {name: action.nargs != 0 for action in _torchrun_parser()._actions for name in action.option_strings}


def _torchrun_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"torchrun: {message}", hint="these options stand before RECIPE, as torchrun takes them")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser


def launch(launch_words: Sequence[str], worker_words: Sequence[str]) -> int:
    """Runs `optune <worker_words>` in every worker and returns the worst exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    # The launcher reports a failure in forty lines around the one that matters.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = _torchrun_parser().parse_args([*launch_words, "--module", "tune_cli.main", *worker_words])
    count = _count_workers(options)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ[QUIET_WORKER] = "1"
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return _report(error)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousError as error:
        raise TrainingError(
            f"the processes did not find each other: {type(error).__name__}: {error}",
            hint="every machine needs the same --rdzv-id, --rdzv-endpoint and --nnodes",
        ) from error
    except ValueError as error:
        raise ConfigError(f"torchrun: {error}") from error
    finally:
        os.environ.pop(QUIET_WORKER, None)
    return 0


def _count_workers(options: Any) -> int:
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        raise ConfigError(f"--nnodes must be a number or min:max, not {options.nnodes!r}") from None
    try:
        return max(1, determine_local_world_size(options.nproc_per_node))
    except ValueError:
        raise ConfigError(
            f"--nproc-per-node must be a number, cpu, gpu or auto, not {options.nproc_per_node!r}"
        ) from None


@dataclass
class Failure:
    """One worker's end. `causes` is what it left for its parent; empty where it could not."""

    rank: int
    exit_code: int
    time: float
    causes: list[Cause] = field(default_factory=list)


def _report(error: Any) -> int:
    """Prints the cause of the rank that failed first; returns the worst exit code."""
    failures = sorted((_read_failure(rank, failure) for rank, failure in error.failures.items()), key=_by_time)
    # Ranks that were stopped because another one failed say nothing about the cause.
    real = [failure for failure in failures if failure.exit_code not in STOPPED] or failures
    code = max(failure.exit_code for failure in real)
    if code not in STOPPED:
        first = real[0]
        name = f"rank {first.rank}: " if len(error.failures) > 1 or first.rank else ""
        print_causes([(f"{name}{message}", hint) for message, hint in first.causes or [_guess_cause(first)]])
    return code


def _by_time(failure: Failure) -> tuple[float, int]:
    return failure.time, failure.rank


def _read_failure(rank: int, failure: Any) -> Failure:
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    left = failure.error_file_data.get("optune") if isinstance(failure.error_file_data, dict) else None
    if not left:
        return Failure(rank, code, float(failure.timestamp))
    return Failure(rank, code, left["time"], [(message, hint) for message, hint in left["causes"]])


def _guess_cause(failure: Failure) -> Cause:
    """What can be said of a worker that ended without a word."""
    number = failure.exit_code - 128
    if number > 0 and number in set(signal.Signals):
        name = signal.Signals(number).name
        hint = "the system kills a process that asks for more memory than there is" if name == "SIGKILL" else None
        return f"the worker was killed by {name}", hint
    return f"the worker ended with exit code {failure.exit_code} and said no more", None
