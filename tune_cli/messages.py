"""What a user reads when something goes wrong: one `error:` line a cause, and the way out behind `hint:`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from optune.errors import OptuneError
from tune_cli.stopping import Terminated

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
DEBUG = "OPTUNE_DEBUG"
QUIET_WORKER = "OPTUNE_QUIET_WORKER"
"""Set by `launch.py` for its workers: the parent prints the first failing rank's cause, last and once."""

Cause = tuple[str, str | None]
"""A message and its hint."""


def report(error: BaseException, *, exit_code: int) -> int:
    """Prints an error (as a worker: leaves it to the parent) and returns the exit code; with --debug its traceback."""
    causes = list_causes(error)
    if ERROR_FILE in os.environ:
        _leave_for_parent(causes, exit_code)
    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exception(error)
    if not os.environ.get(QUIET_WORKER) or _is_restarted():
        print_causes(causes)
    return exit_code


def list_causes(error: BaseException) -> list[Cause]:
    """The causes in an error: one, or all that is wrong with a config."""
    if isinstance(error, OptuneError):
        return [(str(part), part.hint) for part in getattr(error, "errors", [error])]
    if isinstance(error, KeyboardInterrupt):
        return [("terminated" if isinstance(error, Terminated) else "interrupted", None)]
    text = str(error).strip() or "no message"
    return [(f"{type(error).__name__}: {text}", "this was not foreseen; --debug shows where it happened")]


def print_causes(causes: list[Cause]) -> None:
    """Prints causes to stderr; stdout comes first where both go to one place."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    for message, hint in causes:
        print(f"error: {message}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
    sys.stderr.flush()


def _is_restarted() -> bool:
    """Whether the launcher will start the workers again, so that its own last word will be of another failure."""
    environment = os.environ
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(
        environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    )


def _leave_for_parent(causes: list[Cause], exit_code: int) -> None:
    """Writes the cause where torch's launcher looks for it, in its format and with our own beside it."""
    content = {
        "message": {
            "message": "\n".join(message for message, _ in causes),
            "extraInfo": {"timestamp": str(int(time.time()))},
        },
        "optune": {"causes": causes, "exit_code": exit_code, "time": time.time()},
    }
    try:
        Path(os.environ[ERROR_FILE]).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        print(f"error: {os.environ[ERROR_FILE]}: cannot be written: {error.strerror}", file=sys.stderr)
