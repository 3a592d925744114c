"""What a user reads when something goes wrong: one `error:` line a cause, and the way out behind `hint:`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from optune.errors import OptuneError
from tune_cli import worker
from tune_cli.stopping import HungUp, Terminated

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
DEBUG = "OPTUNE_DEBUG"
_LOST = re.compile(
    r"gloo/|Gloo |NCCL|ncclRemoteError|ncclSystemError|TCPStore|wait timeout after|"
    r"Connection (closed|reset) by (peer|remote)|Broken pipe"
)
_NETWORK_ERRORS = ("DistNetworkError", "DistStoreError", "DistBackendError")

Cause = tuple[str, str | None]
"""A message and its hint."""


def report(error: BaseException, *, exit_code: int) -> int:
    """Prints an error (a worker leaves it to the launcher), with --debug its traceback; returns the exit code."""
    causes = list_causes(error)
    trace = "".join(traceback.format_exception(error))
    if worker.is_worker():
        # The launcher prints the first failing rank's cause, last and once.
        worker.leave_report(exit_code=exit_code, kind=_name_kind(error), causes=causes, traceback=trace)
        return exit_code
    if ERROR_FILE in os.environ:
        _leave_for_torchrun(causes)
    if os.environ.get(DEBUG):
        print(trace, file=sys.stderr, end="")
    rank = worker.read_rank()
    print_causes([(f"rank {rank}: {message}", hint) for message, hint in causes] if rank else causes)
    return exit_code


def _name_kind(error: BaseException) -> str:
    if isinstance(error, HungUp):
        return "dropped"
    if isinstance(error, KeyboardInterrupt):
        return "stopped"
    return "lost" if _is_lost(_walk(error)[-1]) else "failed"


def _walk(error: BaseException) -> list[BaseException]:
    """`error` and, behind it, what was being handled when it came: the last one came first."""
    chain = [error]
    while (before := _find_before(chain[-1])) is not None and before not in chain:
        chain.append(before)
    return chain


def _find_before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_lost(error: BaseException) -> bool:
    """Whether `error` says that another process does not answer, in the words of torch's backends."""
    if isinstance(error, OptuneError):
        return False
    return type(error).__name__ in _NETWORK_ERRORS or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    )


def list_causes(error: BaseException) -> list[Cause]:
    """The causes in an error: one, or all that is wrong with a config."""
    chain = _walk(error)
    if _is_lost(chain[-1]):
        return [_describe_lost(chain[-1])]
    if _is_lost(error):  # The others have left because this process was failing.
        error = next(part for part in reversed(chain) if not _is_lost(part))
    if isinstance(error, OptuneError):
        return [(str(part), part.hint) for part in getattr(error, "errors", [error])]
    if isinstance(error, KeyboardInterrupt):
        return [("terminated" if isinstance(error, Terminated) else "interrupted", None)]
    text = str(error).strip() or "no message"
    return [(f"{type(error).__name__}: {text}", "this was not foreseen; --debug shows where it happened")]


def _describe_lost(error: BaseException) -> Cause:
    text = re.sub(r"\[\S*gloo\S*:\d+\] ", "", str(error).strip().partition("\n")[0])
    text = text.partition(". This is typically")[0]
    hint = "it has ended, hangs, or cannot be reached: its own log says more, see logs/ in the run folder"
    return f"another process of this run does not answer: {text}", hint


def print_causes(causes: list[Cause], *, prefix: str = "error") -> None:
    """Prints causes to stderr; stdout comes first where both go to one place."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    for message, hint in causes:
        print(f"{prefix}: {message}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
    sys.stderr.flush()


def _leave_for_torchrun(causes: list[Cause]) -> None:
    """Writes the cause where torch's launcher looks for it, in its format."""
    text = "\n".join(message for message, _ in causes)
    content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        Path(os.environ[ERROR_FILE]).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        print(f"error: {os.environ[ERROR_FILE]}: cannot be written: {error.strerror}", file=sys.stderr)
