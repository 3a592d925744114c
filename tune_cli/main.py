"""`optune COMMAND …`: finds the command, prints errors, and turns what happened into an exit code.

Each command is a file beside this one, imported when it is called. Nothing here, and nothing that `--help`, `ls`, `cat`
and `cp` need, imports torch or hydra. To add a command: one file with `run(arguments) -> int`, one line in COMMANDS.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from optune.errors import ConfigError, OptuneError
from tune_cli import messages, worker
from tune_cli.stopping import TERMINATED, Terminated, signals_unwind

COMMANDS = {
    "run": ("RECIPE --config CONFIG [key=value …]", "train"),
    "resume": ("RUN_DIR [key=value …]", "go on from the newest whole checkpoint of a run"),
    "verify-resume": ("RECIPE --config CONFIG [key=value …]", "prove that a resumed run is the uninterrupted one"),
    "validate": ("RECIPE --config CONFIG [key=value …]", "check all that run checks before the first step"),
    "data": ("RECIPE --config CONFIG [key=value …]", "show what is trained, token by token, and what is left out"),
    "plan": ("RECIPE --config CONFIG [key=value …]", "predict peak memory, and name what fits into --memory"),
    "ls": ("", "list the recipes and configs that come with optune"),
    "cat": ("NAME", "print a recipe or config"),
    "cp": ("NAME DEST", "copy a recipe or config, to change it"),
    "generate": ("MODEL --prompt TEXT", "let a model, checkpoint or adapter go on with a text"),
    "export": ("CHECKPOINT DEST", "write a folder that other tools load; --merge folds an adapter in"),
    "download": ("REPO_ID [DEST]", "fetch a model from the Hugging Face hub"),
}

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Whatever goes wrong is printed as one cause on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, debug = _take_debug(words)
    if debug:
        os.environ[messages.DEBUG] = "1"  # for workers and the jobs of a grid
    try:
        _replace_what_cannot_be_printed()
        if worker.is_worker():
            return _work(words)
        with signals_unwind():
            code = _dispatch(words)
        _flush()
        return code
    except BrokenPipeError:
        _silence()  # The reader has seen enough.
        return PIPE_CLOSED
    except KeyboardInterrupt as interrupt:
        return messages.report(interrupt, exit_code=TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED)
    except OptuneError as error:
        return messages.report(error, exit_code=error.exit_code)
    except Exception as error:
        return messages.report(_name_full_output(error), exit_code=1)


def _work(words: list[str]) -> int:
    """The command, as a worker of a launcher."""
    with signals_unwind(is_worker=True):
        worker.begin()
        code = _dispatch(words)
        _flush()
        worker.leave_report(exit_code=code, kind="stopped" if code in (INTERRUPTED, TERMINATED) else "done")
    return code


def _name_full_output(error: Exception) -> Exception:
    """`error`, or in plain words that stdout, or another file without a name, has no room: `optune ls > /dev/full`."""
    try:
        _flush()
    except OSError as full:
        _silence()
        return OptuneError(f"cannot be written: {full.strerror}", where="standard output")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return OptuneError("what was to be written found no room: no space left on device", hint="free some room")
    return error


def _flush() -> None:
    if sys.stdout is not None:  # closed by the shell: `>&-`
        sys.stdout.flush()


def _silence() -> None:
    """Sends what is left for stdout nowhere: Python would complain once more when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        import optune

        print(f"optune {optune.__version__}")
        return 0
    if name not in COMMANDS:
        raise _unknown_command(name)
    return importlib.import_module(f"tune_cli.{name.replace('-', '_')}").run(rest)


def _replace_what_cannot_be_printed() -> None:
    """A terminal that is not UTF-8 gets escapes for what it cannot show, never an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """The words without `--debug`, which may stand before or after the command, and whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


def _unknown_command(name: str) -> ConfigError:
    from optune.config.problems import suggest

    kind = "option" if name.startswith("-") else "command"
    return ConfigError(f"unknown {kind} {name!r}", hint=suggest(name, COMMANDS) or "`optune --help` lists the commands")


def _help() -> str:
    width = max(len(name) + len(usage) for name, (usage, _) in COMMANDS.items()) + 3
    lines = [f"  {f'{name} {usage}':<{width}}{summary}" for name, (usage, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "optune finetunes language models from YAML recipes.",
            "",
            "usage: optune COMMAND …",
            "",
            *lines,
            "",
            "`optune COMMAND --help` says more. --debug, anywhere, shows an error's traceback; --version the version.",
        ]
    )


if __name__ == "__main__":
    code = main()
    if worker.is_worker():
        worker.leave(code)
    sys.exit(code)
