"""Of all that went wrong in several processes, the cause: the rank that failed first, what it said, the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tune_cli.messages import DEBUG, Cause, print_causes
from tune_cli.worker import get_report_path, get_words_path

_LAST_WORDS = 40
_DEATH = re.compile(
    r"^Fatal Python error|^Traceback \(most recent|^terminate called|^libc\+\+abi|^\w*(Error|Exception)\b|"
    r"Assertion .*failed|^(free|malloc|munmap|double free|corrupted)\b|Segmentation fault|Bus error|CUDA error|"
    r"device-side assert"
)
"""How accounts of a death begin: Python's, C++'s, libc's, CUDA's."""
_SEVERITY = {0: 0, 130: 1, 143: 1, 2: 2}
"""1, and whatever a recipe returns, is the worst: 2 promises that nothing was written."""
_STOPS = {-signal.SIGINT: 130, -signal.SIGTERM: 143, 130: 130, 143: 143}
"""A process that was stopped before it could answer, or twice."""


@dataclass(frozen=True)
class End:
    """How one rank ended. `kind` is that of its report, or `died` where it left none."""

    rank: int
    kind: str
    exit_code: int
    time: float
    causes: list[Cause] = field(default_factory=list)
    traceback: str = ""
    host: str = ""
    last_words: str = ""


@dataclass(frozen=True)
class Conclusion:
    """What is told of all ranks."""

    exit_code: int = 0
    causes: list[Cause] = field(default_factory=list)
    traceback: str = ""
    last_words: str = ""
    may_restart: bool = False
    is_lost: bool = False
    """Whether no rank failed by itself: other processes, perhaps of other machines, do not answer."""


def read_ends(folder: Path, exit_codes: Mapping[int, int | None], seen: Mapping[int, float]) -> list[End]:
    """The ends of the ranks of this machine. `exit_codes` are the processes' own, negative for a signal; `seen` are the
    times of the ends that nobody asked for."""
    return [_read_end(folder, rank, code, seen.get(rank)) for rank, code in sorted(exit_codes.items())]


def _read_end(folder: Path, rank: int, code: int | None, seen: float | None) -> End:
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(get_report_path(folder, rank).read_text(encoding="utf-8"))
        report["causes"] = [(message, hint) for message, hint in report["causes"]]
        return End(rank, **report)
    if code == 0:
        return End(rank, "done", 0, seen or 0.0)
    if code in _STOPS:
        return End(rank, "stopped", _STOPS[code], seen or 0.0)
    if seen is None:  # The launcher ended it.
        return End(rank, "dropped", 1, 0.0)
    words = _read_last_words(get_words_path(folder, rank))
    return End(rank, "died", code if code and code > 0 else 1, seen, [_guess_cause(code or 0)], last_words=words)


def _read_last_words(path: Path) -> str:
    """What a dying process says of it: from the first line of such an account on; progress explains nothing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = lines[-_LAST_WORDS:]
    first = next((index for index, line in enumerate(lines) if _DEATH.search(line)), len(lines))
    return "\n".join(lines[first:])


def _guess_cause(code: int) -> Cause:
    """What can be said of a process that ended without a word."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "the system kills a process that asks for more memory than there is" if name == "SIGKILL" else None
        return f"the process was killed by {name}", hint
    return f"the process ended with exit code {code} and said no more", None


def conclude(ends: Sequence[End], world_size: int = 1) -> Conclusion:
    """The cause in `ends`: of the ranks that failed by themselves the first, else of those that lost the others."""
    if failed := [end for end in ends if end.kind in ("failed", "died")]:
        return _blame(failed, max(world_size, len(ends)), may_restart=any(end.exit_code != 2 for end in failed))
    stopped = [end for end in ends if end.kind == "stopped"]
    if not stopped and (lost := [end for end in ends if end.kind == "lost"]):
        found = _blame(lost, max(world_size, len(ends)), may_restart=True, is_lost=True)
        if silent := [str(end.rank) for end in ends if end.kind == "dropped"]:
            hint = f"rank {', '.join(silent)} was still running: it hangs, or does what the others do not"
            return replace(found, causes=[(message, hint) for message, _ in found.causes])
        return found
    if stopped:  # One that was asked later than the others found them gone.
        told = next((end.causes for end in stopped if end.causes), [])
        return Conclusion(_worst(stopped), told)
    return Conclusion(_worst(ends))


def _blame(ends: Iterable[End], count: int, *, may_restart: bool, is_lost: bool = False) -> Conclusion:
    ordered = sorted(ends, key=lambda end: (end.time, end.rank))
    first = ordered[0]
    is_shared = len(ordered) == count and all(end.causes == first.causes for end in ordered)
    name = "" if is_shared else f"rank {first.rank}: "
    causes = [(f"{name}{message}", hint) for message, hint in first.causes]
    return Conclusion(_worst(ordered), causes, first.traceback, first.last_words, may_restart, is_lost)


def _worst(ends: Sequence[End]) -> int:
    return max((end.exit_code for end in ends), key=lambda code: _SEVERITY.get(code, 3), default=0)


def print_conclusion(found: Conclusion, *, prefix: str = "error") -> None:
    """The last words of a rank that said no more, its traceback with --debug, then the causes."""
    if os.environ.get(DEBUG) and found.traceback:
        print(found.traceback, file=sys.stderr, end="")
    if found.last_words:
        print(f"its last words:\n{found.last_words}", file=sys.stderr)
    print_causes(found.causes, prefix=prefix)


def pack(conclusion: Conclusion) -> str:
    """For another machine."""
    return json.dumps(asdict(conclusion))


def unpack(text: str | bytes) -> Conclusion:
    """What another machine packed."""
    values: dict[str, Any] = json.loads(text)
    values["causes"] = [(message, hint) for message, hint in values["causes"]]
    return Conclusion(**values)
