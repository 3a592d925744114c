"""Worker processes that encode chunks of rows.

A worker is a new Python that reads chunks from its standard input and writes what became of them to its standard
output. It imports neither torch nor the program that started it, shares no memory or lock with it, and ends when its
input does: so a worker cannot outlive the run, a dead one is an end of file, and Ctrl-C is the starter's business.
What is sent is pickled; both ends of the pipe belong to one run.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, BinaryIO

from optune.data.encoder import EncodedChunk, RowEncoder
from optune.data.rows import Rows
from optune.errors import DataError
from optune.garbage import uncollected

_MOST = 32
_START = "import sys; sys.path = {path!r}; from optune.data.workers import main; main()"

Task = dict[str, Any]
"""Keywords of `RowEncoder.encode`."""
Result = tuple[EncodedChunk, Rows]


def count_cores() -> int:
    """Cores that this process may use."""
    try:
        return min(_MOST, len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        return min(_MOST, os.cpu_count() or 1)


def encode_here(encoder: RowEncoder, task: Task) -> Result:
    """What becomes of a chunk, its rows apart as flat arrays, which are quick to send and to join."""
    with uncollected():  # Looking for cycles meanwhile takes a fifth of the time.
        chunk = encoder.encode(**task)
        rows, chunk.rows = Rows(chunk.rows), []
    return chunk, rows


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process that is started meanwhile never sees Ctrl-C, not even while Python begins: its starter says when it
    ends. One that comes meanwhile reaches this process afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """`count` processes with `encoder`; close it, or use it as a context, to end them.

    Raises whatever pickling raises where the encoder cannot be sent.
    """

    def __init__(self, encoder: RowEncoder, count: int) -> None:
        message = pickle.dumps(encoder)
        # One thread of tokenizers in each: the cores are taken.
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-c", _START.format(path=sys.path)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        try:
            for _ in range(count):
                with _deaf_to_interrupts():
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=1 << 16
                    )
                self._processes.append(process)
                self._free.put(process)
            for process in self._processes:
                self._send(process, message)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, also in the middle of a chunk."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # What was not sent yet has no reader any more.
                    pipe.close()

    def encode_all(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """What becomes of each task, in their order. Raises DataError where a process ends before its time."""
        running: deque[Future[Result]] = deque()
        for task in tasks:
            running.append(self._threads.submit(self._encode, task))
            # Enough that nobody waits, few enough that rows do not pile up.
            if len(running) > 2 * len(self._processes):
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _encode(self, task: Task) -> Result:
        process = self._free.get()
        try:
            self._send(process, pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL))
            assert process.stdout is not None
            result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._died(process) from None
        finally:
            self._free.put(process)
        if isinstance(result, BaseException):
            raise result
        return result

    def _send(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
        except OSError:
            raise self._died(process) from None

    def _died(self, process: subprocess.Popen[bytes]) -> DataError:
        process.kill()
        code = process.wait()
        # A negative code is the signal's number; -9 is also how this method ends one that closed its pipe.
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return DataError(
            f"a process that prepares rows ended early ({how})",
            hint="the system may have run out of memory: look at its log (dmesg), and free some",
        )


def main() -> None:
    """The worker's side: an encoder, then chunks, until the input ends."""
    source: BinaryIO = sys.stdin.buffer
    target: BinaryIO = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a user's own function prints must not get between the results.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    encoder: RowEncoder = _receive(source)
    while True:
        task: Task = _receive(source)
        try:
            message = pickle.dumps(encode_here(encoder, task), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            message = pickle.dumps(_portable(error))
        try:
            target.write(message)
            target.flush()
        except BrokenPipeError:  # The starter has gone.
            os._exit(0)


def _receive(source: BinaryIO) -> Any:
    """The next object; where the input ends, also in the middle of one, the starter has gone and so does this."""
    try:
        return pickle.load(source)
    except (EOFError, pickle.UnpicklingError):
        raise SystemExit from None


def _portable(error: Exception) -> Exception:
    """The error itself where it can be sent, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
