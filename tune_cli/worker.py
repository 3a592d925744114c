"""What this process owes the launcher that started it: to end with it, to keep its words, and to say how it ended.

`launch.py` gives each attempt a folder. In it lie each rank's words and the report of its end. torch's own error
files know whole seconds; these say which rank came first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tune_cli import scratch
from tune_cli.heartbeat import get_beat_path, start_beating

FOLDER = "OPTUNE_LAUNCH_FOLDER"
RESTART = "OPTUNE_LAUNCH_RESTART"
KEEPS_WORDS = "OPTUNE_LAUNCH_KEEPS_WORDS"
"""Set by `launch.py` for its workers: the folder of this attempt, the number of restarts before it, whether words of
ranks other than 0 go to a file."""

_PR_SET_PDEATHSIG = 1
_OTHERS_S = 1.0
_launcher: int | None = None
"""The process that started this one."""


def is_worker() -> bool:
    """Whether `launch.py` started this process."""
    return FOLDER in os.environ


def read_rank() -> int:
    """This process's rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def read_restart() -> int:
    """How often the processes of this run have been started again, by our launcher or by torch's."""
    ours, torchs = os.environ.get(RESTART, "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return max(int(ours), int(torchs))


def get_words_path(folder: Path, rank: int) -> Path:
    """What a rank wrote to stdout and stderr."""
    return folder / f"rank-{rank:04}.txt"


def get_report_path(folder: Path, rank: int) -> Path:
    """How a rank ended."""
    return folder / f"rank-{rank:04}.json"


def begin() -> None:
    """Ends with the launcher from here on, and shows it that this process lives; sends the words of all ranks but 0 to
    a file of their own."""
    global _launcher
    _launcher = os.getppid()
    _end_with_launcher()
    start_beating(get_beat_path(Path(os.environ[FOLDER]), read_rank()))
    if read_rank() == 0 or not os.environ.get(KEEPS_WORDS):
        return
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    path = get_words_path(Path(os.environ[FOLDER]), read_rank())
    # The descriptors, not the streams: libraries in C and a dying interpreter write there.
    words = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.close(words)


def _end_with_launcher() -> None:
    """A launcher that is killed tells nobody, and would leave its workers behind: let the system tell them."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1 and os.getpid() != 1:
        os.kill(os.getpid(), signal.SIGTERM)


def leave_report(
    *, exit_code: int, kind: str, causes: list[tuple[str, str | None]] | None = None, traceback: str = ""
) -> None:
    """Says how this process ends: `kind` is done, stopped, failed, lost (another process does not answer) or dropped
    (the launcher gave it up)."""
    folder = Path(os.environ[FOLDER])
    write_report(folder, read_rank(), exit_code=exit_code, kind=kind, causes=causes, traceback=traceback)
    if kind == "failed":
        _wait_for_others(folder)
    if _launcher is not None:
        scratch.remove_if_forsaken(folder, _launcher)


def leave(exit_code: int) -> NoReturn:
    """Ends this process, after what was registered for its end. Not by Python's own end: threads of torch's process
    groups that nobody has joined may abort it there ("terminate called without an active exception"), and a run that
    is done would count as failed."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(exit_code)


def write_report(
    folder: Path,
    rank: int,
    *,
    exit_code: int,
    kind: str,
    causes: list[tuple[str, str | None]] | None = None,
    traceback: str = "",
) -> None:
    """The report of a rank's end; by itself, or by the launcher for one that cannot."""
    report: dict[str, Any] = {
        "kind": kind,
        "exit_code": exit_code,
        "causes": causes or [],
        "traceback": traceback,
        "time": time.time(),
        "host": socket.gethostname(),
    }
    path = get_report_path(folder, rank)
    aside = path.with_suffix(".part")
    with contextlib.suppress(OSError):
        aside.write_text(json.dumps(report), encoding="utf-8")
        aside.replace(path)


def _wait_for_others(folder: Path) -> None:
    """A moment for the other ranks of this machine: what fails on all of them is then told once, as everybody's."""
    end = time.monotonic() + _OTHERS_S
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    while time.monotonic() < end and len(list(folder.glob("rank-*.json"))) < count:
        time.sleep(0.02)
