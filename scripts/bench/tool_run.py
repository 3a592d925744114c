"""One measured run of an unmodified tool: its user's command, with `inside/sitecustomize.py` watching from within."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.bench.machine import plain_environment

INSIDE = Path(__file__).parent / "inside"
POLL_S = 0.05


class ToolFailedError(Exception):
    """The tool ended before its last step; the message is the end of what it said."""


def run_tool(
    command: Sequence[str], work: Path, caches: Path, steps: int, *, cores: Sequence[int], timeout_s: float
) -> dict[str, Any]:
    """Runs `command` on these cores until its optimizer has made `steps` steps.

    `work` is an empty folder for what this run writes, `caches` one for temporary files and caches, which an earlier
    run may have filled. Returns

    - `first_step_s`: from the start of the process to the end of its first optimizer step;
      `first_step_processor_s`: the processor's time by then, without compiling workers that have not ended;
    - `steps_s`: from each step's end to the next one's, so the first step is not in it;
    - `peak_mib`: the largest resident set of any process of the run, until the last step's end;
    - `threads`, `torch`, `optimizer`, `fused`.

    Raises ToolFailedError.
    """
    record = work / "record"
    record.mkdir()
    with (work / "output.txt").open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=work, env=_environment(caches, record, steps), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        try:
            largest_kib = _wait(process, record, steps, started + timeout_s)
        finally:
            _end_group(process)
    lines = _read_record(record)
    if len(lines) < steps:
        said = (work / "output.txt").read_text(errors="replace").strip()
        raise ToolFailedError(f"{len(lines)} of {steps} steps in {time.monotonic() - started:.0f} s\n{said[-2000:]}")
    ends = [line["end"] for line in lines]
    return {
        "first_step_s": round(ends[0] - started, 3),
        "first_step_processor_s": round(lines[0]["processor_s"], 2),
        "steps_s": [round(after - before, 4) for before, after in pairwise(ends)],
        "peak_mib": round(max(largest_kib / 1024, lines[-1]["resident_mib"]), 1),
        **{key: lines[0][key] for key in ("threads", "torch", "optimizer", "fused")},
    }


def _environment(caches: Path, record: Path, steps: int) -> dict[str, str]:
    kept = plain_environment()
    for name, folder in {"TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "HF_HOME": "huggingface"}.items():
        (caches / folder).mkdir(parents=True, exist_ok=True)
        kept[name] = str(caches / folder)
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(INSIDE),
        "OPTUNE_BENCH_RECORD": str(record),
        "OPTUNE_BENCH_STEPS": str(steps),
    }


def _wait(process: subprocess.Popen[bytes], record: Path, steps: int, deadline: float) -> int:
    """Until the process has ended, or a child of its own has made the last step; the largest resident set in KiB."""
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_maxrss
        if len(_read_record(record)) >= steps:
            time.sleep(1.0)  # The usual case: it is the process itself, on its way out.
            deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(POLL_S)
    return 0


def _read_record(record: Path) -> list[dict[str, Any]]:
    """The lines of the process that made most steps."""
    found = [path.read_text().splitlines() for path in record.glob("*.jsonl")]
    return [json.loads(line) for line in max(found, key=len, default=[])]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """What the tool left behind: workers that compile, a launcher that waits."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        process.wait()
