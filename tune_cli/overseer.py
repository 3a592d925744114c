"""The launcher's side of its workers: their signals, their ends, and the machine that no longer answers.

torch's agent starts, watches and restarts workers; `agent.py` adds to it, through this, what it leaves open:

- the others end within seconds of the first that failed, however they hang; nobody waits for the dead;
- a stop is waited for as long as the save takes, a second one ends all at once; SIGUSR1 goes to the workers;
- what a restart cannot mend (a wrong config, a stop) is not restarted;
- a worker that hangs as a whole ends the others in `heartbeat.SILENT_S`, a machine that is cut off in
  `machines.SILENT_S`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tune_cli import worker
from tune_cli.failures import Conclusion, conclude, pack, print_conclusion, read_ends, unpack
from tune_cli.heartbeat import Listener, describe_silence
from tune_cli.machines import Pulse
from tune_cli.messages import DEBUG

LEAVE_S = 3.0
"""How long the others have to notice by themselves that one has failed, and to say so."""
GRACE_S = 5.0
"""How long they then have to end, before they are killed."""
LAST_S = 20.0
"""How long the last ones may take once one has left after a stop: all of them leave after the same save."""
ECHO_S = 0.5
"""A signal that comes again so soon is the same one: `timeout` and process groups deliver it twice."""
POLL_S = 0.05
TELL_S = 3.0


class Overseer:
    """What is known of the workers of this machine, over all attempts. `base` takes a folder for each attempt."""

    def __init__(self, base: Path, *, keeps_words: bool, log: Path | None = None) -> None:
        self.stop: signal.Signals | None = None
        self.folder = base
        self._base, self._keeps_words, self._log = base, keeps_words, log
        self._stopped_at = 0.0
        self._processes: dict[int, Any] = {}
        self._seen: dict[int, float] = {}
        self._is_killed = False
        self._found: Conclusion | None = None
        self._is_over = False
        self._attempts = 0
        self._silence = ""
        self._pulse: Pulse | None = None
        self._listener: Listener | None = None
        self._store: Any = None
        self._group_size = self._world_size = 1
        self._has_told = threading.Lock()

    # Starting

    def prepare(self, restarts: int) -> None:
        """Before the workers start: a folder for this attempt, and what they must know of it."""
        self.folder = self._base / f"attempt-{self._attempts}"
        self._attempts += 1
        self.folder.mkdir()
        os.environ[worker.FOLDER], os.environ[worker.RESTART] = str(self.folder), str(restarts)
        os.environ[worker.KEEPS_WORDS] = "1" if self._keeps_words else ""

    def watch(self, group: Any, context: Any, signals: Iterable[str]) -> None:
        """After they have started."""
        handlers = getattr(context, "subprocess_handlers", {})
        self._processes = {item.global_rank: handlers[item.local_rank].proc for item in group.workers}
        self._seen, self._silence, self._is_over, self._found = {}, "", False, None
        self._store, self._group_size = group.store, group.group_world_size
        self._world_size = group.workers[0].world_size
        pids = {rank: process.pid for rank, process in self._processes.items()}
        self._listener = Listener(self.folder, pids, has_others=self._world_size > len(pids))
        for name in signals:
            signal.signal(signal.Signals[name], self._on_stop)
        if "SIGUSR1" not in signals:
            signal.signal(signal.SIGUSR1, lambda number, frame: self._send(signal.SIGUSR1))
        if self._group_size > 1:
            self._pulse = Pulse(self._store, group.group_rank, self._group_size, self._on_silence)

    def stop_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
            self._pulse = None

    # Signals

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        now = time.monotonic()
        if self.stop is None:
            self.stop, self._stopped_at = signal.Signals(number), now
            raise SignalException(f"got {self.stop.name}", sigval=self.stop)
        if now - self._stopped_at > ECHO_S:
            self._is_killed = True
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                try:
                    # A worker leads a session of its own; what it started goes with it, but only where it must.
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
                except ProcessLookupError:
                    continue

    # Ends

    def look(self) -> tuple[list[int], list[int]]:
        """The ranks that still run, and those that ended otherwise than with 0. One that hangs is ended."""
        running, ended = [], []
        for rank, process in self._processes.items():
            code = process.poll()
            if code is None:
                running.append(rank)
            elif code != 0:
                ended.append(rank)
                if not self._is_over:
                    self._seen.setdefault(rank, time.time())
        if self._listener is not None and not self._is_over:
            for rank in self._listener.find_silent(running):
                self._end_silent(rank, self._listener.describe(rank))
        return running, ended

    def _end_silent(self, rank: int, state: str) -> None:
        """It cannot say so itself: its report is written for it."""
        cause = describe_silence(state)
        worker.write_report(self.folder, rank, exit_code=1, kind="failed", causes=[cause])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)

    def wait_for_ends(self, limit_s: float, leaves: Callable[[], bool] = lambda: False) -> None:
        """Until all workers have ended, `leaves()` says so, or `limit_s` is over."""
        end = time.monotonic() + limit_s
        while self.look()[0] and time.monotonic() < end and not leaves():
            time.sleep(POLL_S)

    def let_leave(self) -> None:
        """Some worker has ended: gives the others the time that is theirs, then says that it is over for them."""
        running, ended = self.look()
        if not running or not ended:
            return
        if not self.has_failed():
            self.wait_for_ends(LAST_S, self.has_failed)
        self.wait_for_ends(LEAVE_S)
        self.end_all()

    def has_failed(self) -> bool:
        """Whether a worker has ended in another way than by a stop."""
        self.look()
        ends = read_ends(self.folder, {rank: self._processes[rank].returncode for rank in self._seen}, self._seen)
        return any(end.kind != "stopped" for end in ends)

    def end_all(self) -> None:
        """Ends all workers that still run; within `GRACE_S` with their last words."""
        if not self.look()[0]:
            return
        self._is_over = True  # from here on none ends by itself
        self._send(signal.SIGHUP)
        self.wait_for_ends(GRACE_S)
        self._send(signal.SIGKILL)
        self.wait_for_ends(GRACE_S)

    def stop_all(self, limit_s: float) -> None:
        """Asks all workers to save and leave, and waits; one that fails meanwhile ends it for all."""
        number = self.stop or signal.SIGTERM
        self._send(number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGHUP)
        end = time.monotonic() + limit_s
        while self.look()[0] and time.monotonic() < end and not self._silence:
            if len(self._processes) > len(self.look()[0]):
                self._leave_after_stop()
                return
            time.sleep(POLL_S)

    def _leave_after_stop(self) -> None:
        """One has ended; all of them leave after the same save."""
        self.wait_for_ends(LAST_S, self.has_failed)
        if self.has_failed():
            self.wait_for_ends(LEAVE_S)

    # Conclusions

    @property
    def has_ends(self) -> bool:
        """Whether workers were started, and have ended."""
        return bool(self._processes)

    def conclude(self) -> Conclusion:
        """What to tell of this attempt, and to the other machines; theirs, where these ranks only lost the others."""
        if self._found is None:
            self._found = self._conclude()
        return self._found

    def _conclude(self) -> Conclusion:
        self.look()
        if self.stop is not None and self._is_killed:
            return Conclusion(128 + self.stop)
        codes = {rank: process.returncode for rank, process in self._processes.items()}
        found = conclude(read_ends(self.folder, codes, self._seen), self._world_size)
        if self._silence and not found.may_restart:
            return _describe_silence(self._silence)
        if self._group_size == 1 or not found.causes:
            return found
        if not found.is_lost:
            _within(TELL_S, lambda: self._store.compare_set("optune/cause", "", pack(found)))
            return found
        return _within(TELL_S + 1, self._ask_others) or (_describe_silence(self._silence) if self._silence else found)

    def _ask_others(self) -> Conclusion | None:
        end = time.monotonic() + TELL_S
        while time.monotonic() < end:
            if self._store.check(["optune/cause"]):
                return unpack(self._store.get("optune/cause"))
            time.sleep(POLL_S)
        return None

    def keep_words(self) -> None:
        """Adds what ranks wrote outside the run's own log to it: before there was a run folder, and by libraries. Where
        there is no run folder they are shown with --debug alone: nothing has begun, and the cause is told."""
        for path in sorted(self.folder.glob("rank-*.txt")):
            words = path.read_bytes()
            log = None if self._log is None else self._log.parent / "logs" / path.name
            if not words:
                continue
            if log is not None and log.parent.is_dir():
                with log.open("ab") as file:
                    file.write(
                        b"written to stdout and stderr, before the run folder was there or by libraries:\n" + words
                    )
            elif os.environ.get(DEBUG):
                print(f"{path.stem} wrote:\n{words.decode(errors='replace')}", file=sys.stderr)

    def tell(self, found: Conclusion, *, prefix: str = "error") -> None:
        """Prints a conclusion, and adds it to the run's log."""
        if not self._has_told.acquire(blocking=False):
            return
        try:
            print_conclusion(found, prefix=prefix)
            if self._log is not None and self._log.exists() and 0 in self._processes:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                with self._log.open("a", encoding="utf-8") as log:
                    log.writelines(f"{now} {prefix}: {message}\n" for message, _ in found.causes)
        except OSError:
            pass  # It has been printed.
        finally:
            if prefix != "error":
                self._has_told.release()

    # A machine that is gone

    @property
    def silence(self) -> str:
        """What has not answered for too long; empty where all do."""
        return self._silence

    def forgive(self) -> None:
        """The workers are started again: what was silent may come back."""
        self._silence = ""

    def _on_silence(self, what: str) -> None:
        """In the pulse's thread, for the main thread may be stuck in a call to the machine that is gone."""
        self._silence = what
        self.end_all()
        time.sleep(GRACE_S)
        if self._silence:
            self.tell(_describe_silence(what))
            sys.stderr.flush()
            os._exit(1)


def _describe_silence(what: str) -> Conclusion:
    hint = "is the machine up, and the network between them? `optune resume` goes on from the newest whole checkpoint"
    return Conclusion(1, [(what, hint)], may_restart=True, is_lost=True)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, None where it takes longer or fails: it asks a machine that may be gone."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
