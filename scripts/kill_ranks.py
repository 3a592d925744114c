"""The workers of `kill_runs.py --ranks N`: torch's launcher and ours as they are, but each worker is forked from the
process that has imported everything, where a user's launcher starts Python anew. A hundred deaths take minutes then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from tune_cli.main import main

Arm = Callable[[int], None]
"""Called in each worker with its rank, before it begins."""


def mend_libraries() -> None:
    """For a process that was just forked. tqdm's lock is shared with processes that died holding it; and torch lets
    the first thread that asks make its pool of threads anew, while a second one that asks at once finds none."""
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(torch.get_num_threads())


class ForkedWorker:
    """What the launcher uses of `subprocess.Popen`; a fork of this process that runs the command line."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], arm: Arm) -> None:
        self.returncode: int | None = None
        words = list(args[args.index("tune_cli.main") + 1 :])
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _work(words, env, arm)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _work(words: list[str], env: dict[str, str], arm: Arm) -> None:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # the launcher's own are not inherited by what it starts
        signal.set_wakeup_fd(-1)
        os.environ.clear()
        os.environ.update(env)
        mend_libraries()
        arm(int(env["RANK"]))
        code = main(words)
    finally:
        os._exit(code)


def launch(words: list[str], ranks: int, arm: Arm) -> int:
    """`optune <words>` on so many ranks; the exit code."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args: tuple[str, ...], env: dict[str, str], **keywords: Any) -> ForkedWorker:
        return ForkedWorker(args, env, arm)

    handlers: Any = subprocess_handler
    handlers.Popen = start
    command, *rest = words
    return main([command, "--nproc-per-node", str(ranks), *rest])


def die_later(number: signal.Signals, after_s: float, note: Callable[[], None]) -> None:
    """Sends this process a signal after a time, and calls `note` right before."""

    def send() -> None:
        note()
        os.kill(os.getpid(), number)

    timer = threading.Timer(after_s, send)
    timer.daemon = True
    timer.start()
