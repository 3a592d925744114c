"""Processes without the start of Python: forked from a server that has imported torch and the libraries.

`forked.python()` is a program that stands for `sys.executable`: `[forked.python(), "-m", "tune_cli.main", …]` is a
process of its own, with its own folder, environment, streams and signals, seconds sooner. What it runs is found and
started as Python does it (`-m`, `-c`, a file). The program is a small client, which lends its streams, passes its
signals on, and ends as the process does; when it is killed, so is the process. Workers that torch's launcher starts are
forked likewise.

There is no plot, as without the plots extra: drawing takes longer than most runs. What only a true start shows (what is
imported before what, variables that are read at import) is no case for this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
FORKED = "OPTUNE_FORKED_FROM"
DIED = 1000
"""What a reply adds to the number of a signal that a process died of."""


@functools.cache
def python(*prefix: str) -> str:
    """The path of the program. Its server is started by the first call, after the words `prefix` (as `ip netns exec
    NAME`), and ends with this process. What is forked itself uses the server that it came from."""
    if not prefix and FORKED in os.environ:
        return os.environ[FORKED]
    folder = tempfile.TemporaryDirectory(prefix="optune-forks-")
    program, address = Path(folder.name) / "python", Path(folder.name) / "socket"
    program.write_text(f'#!/bin/sh\n{FORKED}="$0" exec "{sys.executable}" -IS "{__file__}" --client "{address}" "$@"\n')
    program.chmod(0o755)
    server = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.forked", str(address)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return str(program)


# --- The client ------------------------------------------------------------------------------------------------------


def _ask(address: str, arguments: list[str]) -> NoReturn:
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)

        def pass_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(BrokenPipeError):
                line.send(bytes([number]))

        ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
        for number in PASSED_ON:
            if number not in ignored:
                signal.signal(number, pass_on)
        request["ignored"] = ignored
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(line, [text], [0, 1, 2])
        line.sendall(text[sent:])
        # The process alone holds its streams now: whoever reads them sees their end when it ends.
        reply = line.makefile("r").readline()
    code = int(reply or DIED + signal.SIGKILL)
    if code > DIED:
        signal.signal(code - DIED, signal.SIG_DFL) if code - DIED != signal.SIGKILL else None
        os.kill(os.getpid(), code - DIED)
    os._exit(code)


# --- The server ------------------------------------------------------------------------------------------------------


def _serve(address: str) -> None:
    _import_libraries()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(100)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return
            line, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _keep(line)
            line.close()


def _reap(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _import_libraries() -> None:
    """What a run imports sooner or later; torch imports much at its first step."""
    import hydra.compose
    import jinja2.sandbox
    import numpy
    import psutil
    import tokenizers
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor.parallel

    import optune
    import tune_cli.launch
    import tune_cli.run  # noqa: F401

    for module in pkgutil.walk_packages(optune.__path__, "optune."):
        importlib.import_module(module.name)
    del hydra, jinja2, numpy, psutil, tokenizers
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.square().sum().backward()
    torch.optim.AdamW([parameter]).step()


def _keep(line: socket.socket) -> NoReturn:
    """Starts the process, hands signals on, kills it when nobody waits any more, and says how it ended."""
    text, streams, _, _ = socket.recv_fds(line, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += line.recv(1 << 16)
    child = os.fork()
    if child == 0:
        line.close()
        _become(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        selector.register(line, selectors.EVENT_READ)
        while ended not in [key.fileobj for key, _ in selector.select()]:
            for number in line.recv(100) or [signal.SIGKILL]:
                os.kill(child, number)
                if number == signal.SIGKILL:
                    selector.unregister(line)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        line.sendall(f"{code if code >= 0 else DIED - code}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """The process that was asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_up_libraries()
    code = 1
    try:
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _set_up_libraries() -> None:
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from tqdm import tqdm

    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    # As in scripts/kill_ranks.py, which is not imported before what runs as __main__.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(torch.get_num_threads())
    handlers: Any = subprocess_handler
    handlers.Popen = _start_worker


def _start_worker(args: tuple[str, ...], env: dict[str, str], **keywords: Any) -> Any:
    # Late: what runs as __main__ must not be imported before.
    sys.path.append(str(ROOT / "scripts"))
    import kill_ranks  # pyright: ignore[reportMissingImports]

    return kill_ranks.ForkedWorker(args, env, lambda rank: None)


def _run(arguments: list[str]) -> None:
    """As `python <arguments>`."""
    import runpy

    first, *rest = arguments[1:] if arguments[0] == "-u" else arguments
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.getcwd() if first in ("-m", "-c") else str(Path(first).parent), *filter(None, paths)]  # noqa: PTH109
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--client":
        _ask(sys.argv[2], sys.argv[3:])
    _serve(sys.argv[1])
