"""Runs a function in several processes that talk over gloo: what a launcher does, for tests.

A rank is forked from a process that has imported torch (`forked.py`): a launch costs little, a true start seconds.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forked

TIMEOUT_S = 600


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list:
    """`function(*arguments)` in `world_size` processes with a launcher's environment; what each returned, by rank.

    `function` stands at the top of a module; `arguments` and what it returns can be pickled. No group is joined: the
    function calls `optune.distributed.start`, or `join` below. Raises AssertionError with the traceback of the rank
    that failed first, and when a rank has not ended after `timeout_s`; none of the processes is left behind.
    """
    with tempfile.TemporaryDirectory() as name, socket.socket() as held:
        folder = Path(name)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        work = (function.__module__, function.__qualname__, arguments, timeout_s)
        (folder / "work").write_bytes(pickle.dumps(work))
        ranks = [_start(folder, rank, world_size, port) for rank in range(world_size)]
        try:
            for process in ranks:
                process.wait(timeout_s)
                if process.returncode:
                    break
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank had not ended after {timeout_s} s\n{_read_output(folder)}") from None
        finally:
            failed = any(process.returncode for process in ranks)
            for process in ranks:
                if failed:
                    _end(process)
                elif process.poll() is None:
                    process.kill()
                    process.wait()
        failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(f"{failures[0].name}:\n{failures[0].read_text()}\n{_read_output(folder)}")
        codes = [process.returncode for process in ranks]
        assert not any(codes), f"exit codes {codes}\n{_read_output(folder)}"
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def join() -> int:
    """Joins the gloo group of `run_ranks`; the rank."""
    import torch

    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


def _start(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    with (folder / f"output-{rank}").open("wb") as output:
        command = [forked.python(), "-m", "tests.distributed_ranks", str(folder)]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=Path(__file__).parents[1])


def _end(process: subprocess.Popen, patience_s: float = 5) -> None:
    """The others of a rank that failed notice by themselves as a rule, and their traceback is worth having."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_output(folder: Path, most: int = 4000) -> str:
    texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-most:]}" for path in sorted(folder.glob("output-*"))]
    return "\n".join(texts)


def _main(folder: Path) -> int:
    rank = os.environ["RANK"]
    try:
        import importlib

        module, name, arguments, timeout_s = pickle.loads((folder / "work").read_bytes())
        faulthandler.dump_traceback_later(0.9 * timeout_s)  # a rank that hangs says where
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        result = function(*arguments)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"failure-{rank}").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    # Straight out: what a failed group leaves behind must not hold the process.
    code = _main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
