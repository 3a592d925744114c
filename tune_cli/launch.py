"""Several processes: torch's own launcher starts this command line in each worker.

The config has been checked by then, so a wrong one starts no worker. Workers leave their cause in reports and stay
silent; it is printed here, last and once, for the rank that failed first. `overseer.py` watches them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from optune.config.problems import suggest
from optune.errors import ConfigError, TrainingError
from tune_cli import scratch
from tune_cli.agent import SilentError, make_agent
from tune_cli.arguments import Parser
from tune_cli.before_start import check_config, check_counts, share_cores
from tune_cli.machines import set_addresses
from tune_cli.overseer import Overseer

OURS = ("--module", "-m", "--no-python", "--no_python", "--run-path", "--run_path")
"""Options of torchrun that say what the workers run; here that is always optune."""

SAVE_S = 3600
"""How long a stop waits for the save, unless --shutdown-timeout says otherwise. A second signal does not wait."""


def split_launch_options(words: Sequence[str], own: Parser) -> tuple[list[str], list[str]]:
    """Splits off torchrun's options, which stand before the first word that is no option; also returns the rest.

    Options of the command itself may stand among them. Torchrun's may be shortened, as torchrun allows. torch is
    imported only where a foreign option is seen.
    """
    arity = {name: action.nargs != 0 for action in own._actions for name in action.option_strings}
    launch_words: list[str] = []
    rest: list[str] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        name, equals, _ = words[index].partition("=")
        if name in arity:
            target, takes_value = rest, arity[name]
        else:
            option = _find_torchrun_option(name, own)
            # -r3 is -r 3
            equals = equals or (not name.startswith("--") and len(name) > 2)
            target, takes_value = launch_words, option.nargs != 0
        length = 2 if takes_value and not equals else 1
        target += words[index : index + length]
        index += length
    return launch_words, [*rest, *words[index:]]


def _find_torchrun_option(name: str, own: Parser) -> argparse.Action:
    """The option of torchrun that `name`, or its beginning, stands for."""
    options = {word: action for action in _torchrun_parser()._actions for word in action.option_strings}
    key = name if name.startswith("--") else name[:2]
    found = [options[key]] if key in options else []
    if not found and name.startswith("--"):
        found = [action for word, action in options.items() if word.startswith(name)]
    if found and set(found[0].option_strings) & set(OURS):
        raise ConfigError(f"{name} has no place here: optune says what the workers run")
    if len(set(map(id, found))) > 1:
        names = sorted({action.option_strings[0] for action in found})
        raise ConfigError(f"{name!r} may be {' or '.join(names)} of torchrun")
    if not found:
        known = [word for action in own._actions for word in action.option_strings]
        hint = suggest(name, [*known, *options]) or f"usage: {own.usage}"
        raise ConfigError(f"neither optune {own.command} nor torchrun has an option {name!r}", hint=hint)
    return found[0]


def _torchrun_parser() -> argparse.ArgumentParser:
    # Its C++ parts complain about names that a machine need not have.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"torchrun: {message}", hint="these options stand before RECIPE, as torchrun takes them")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    """What is filled in for workers ends with them: the next launch of this process may have other machines."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@_kept_environment()
def launch(launch_words: Sequence[str], worker_words: Sequence[str], cfg: Any, *, logs: bool = True) -> int:
    """Runs `optune <worker_words>` in every worker; prints a failure's cause last, and returns the worst exit code.

    `cfg` is the checked config of what they run; with `logs` a failure's cause is added to the log of its run folder.
    """
    options = _torchrun_parser().parse_args([*launch_words, "--module", "tune_cli.main", *worker_words])
    _refuse_nested()
    count, machines = check_counts(options)
    signals = _list_signals(options)
    check_config(cfg, count, machines)
    if options.shutdown_timeout is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        options.shutdown_timeout = SAVE_S
    share_cores(count)
    set_addresses(options, machines)
    # The launcher reports a failure in forty lines around the one that matters.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    log = Path(cfg.output_dir) / "log.txt" if logs else None
    with scratch.make_folder() as base:
        keeps_words = options.redirects == options.tee == "0"
        if keeps_words and options.log_dir is None:
            options.log_dir = str(base / "torch")  # torch leaves a folder of its own after a failure
        return _run_agent(options, Overseer(base, keeps_words=keeps_words, log=log), signals)


def count_machines(launch_words: Sequence[str]) -> int:
    """How many machines torchrun's options ask for. Raises ConfigError for counts that are none."""
    return check_counts(_torchrun_parser().parse_args([*launch_words, "x"]))[1]


def _run_agent(options: argparse.Namespace, overseer: Overseer, signals: list[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    launcher: Any = api
    before = launcher.LocalElasticAgent
    # `launch_agent` takes no agent, and the one it makes waits for the dead.
    launcher.LocalElasticAgent = make_agent(overseer, signals)
    try:
        torchrun.run(options)
    except ChildFailedError:
        return _conclude(overseer)
    except SignalException as stopped:
        return _conclude(overseer, otherwise=128 + int(stopped.sigval))
    except SilentError:
        return _conclude(overseer)
    except RendezvousError as error:
        if overseer.silence:
            return _conclude(overseer)
        raise TrainingError(
            f"the processes did not find each other: {type(error).__name__}: {error}",
            hint="every machine needs the same --rdzv-id, --rdzv-endpoint and --nnodes, and must reach the endpoint",
        ) from error
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"torchrun: {error}") from error
    finally:
        launcher.LocalElasticAgent = before
    overseer.keep_words()
    return 0


def _conclude(overseer: Overseer, otherwise: int = 1) -> int:
    """Tells how the workers ended. `otherwise` is the exit code where none has said."""
    found = overseer.conclude()
    overseer.keep_words()
    if found.causes:
        overseer.tell(found)
    return found.exit_code if overseer.has_ends else otherwise


def _list_signals(options: argparse.Namespace) -> list[str]:
    """The signals that end the launcher. `nohup` makes a process ignore SIGHUP, which torch would listen to again."""
    names = [name.strip() for name in options.signals_to_handle.split(",")]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        names = [name for name in names if name != "SIGHUP"]
        options.signals_to_handle = ",".join(names)
    if wrong := [name for name in names if name not in signal.Signals.__members__]:
        raise ConfigError(f"--signals-to-handle names {wrong[0]!r}, which is no signal")
    return names


def _refuse_nested() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "these processes have a launcher already: torchrun started this one",
            hint="leave torchrun's options to torchrun: `torchrun --nproc-per-node N -m tune_cli.main run RECIPE …`",
        )
