"""A worker that hangs as a whole is found; one that computes, starts, or is paused with all the others is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tune_cli import heartbeat
from tune_cli.heartbeat import BEAT_S, PAUSE_S, SILENT_S, Listener, get_beat_path


class Played:
    """Workers that beat or compute as a test says, on a clock that a test moves; the launcher looks every second."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch, *, has_others: bool = False) -> None:
        self.now, self.touched, self.used = 0.0, dict.fromkeys(range(ranks), 0), dict.fromkeys(range(ranks), 0.0)
        monkeypatch.setattr(Listener, "describe", lambda self, rank: "stopped")
        self.listener = Listener(
            Path(),
            {rank: rank for rank in range(ranks)},
            has_others=has_others,
            clock=lambda: self.now,
            read_signs=lambda path, pid: (self.touched[pid], self.used[pid]),
        )

    def live(self, seconds: float, beating: list[int], computing: list[int] | None = None) -> list[int]:
        """So many seconds go by; whoever is found silent in them."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank in beating:
                self.touched[rank] += self.now % BEAT_S == 0
            for rank in computing or []:
                self.used[rank] += 0.9
            if silent := self.listener.find_silent(self.touched):
                return silent
        return []


def test_a_rank_without_a_sign_of_life_is_found_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(3, monkeypatch)
    assert played.live(100, [0, 1, 2]) == []
    assert played.live(SILENT_S - 2, [0, 2]) == []
    assert played.live(4, [0, 2]) == [1]


def test_a_rank_that_computes_where_no_thread_may_run_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    assert played.live(500, [0], computing=[1]) == []
    assert played.live(SILENT_S + 2, [0]) == [1]


def test_a_pause_of_all_is_nobodys_fault_in_whatever_order_they_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(2, monkeypatch)
    played.live(10, [0, 1])
    assert played.live(1000, []) == []
    assert played.live(SILENT_S - 2, [0]) == []  # rank 1 wakes later
    assert played.live(50, [0, 1]) == []
    assert played.live(SILENT_S + 2, [0]) == [1]


def test_a_launcher_that_was_away_itself_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that sleeps, Ctrl-Z: its workers may be later than it."""
    played = Played(2, monkeypatch)
    played.live(10, [0, 1])
    played.now += 3600
    assert played.live(SILENT_S - 2, [0]) == []
    played.now += PAUSE_S + 1
    assert played.live(SILENT_S - 2, [0]) == []
    assert played.live(4, [0]) == [1]


def test_the_only_rank_of_a_machine_is_found_where_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Played(1, monkeypatch, has_others=True).live(SILENT_S + 2, []) == [0]
    assert Played(1, monkeypatch).live(10 * SILENT_S, []) == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int, str], int]]:
    """Starts a process that beats for a rank and then runs code; its pid."""
    processes: list[subprocess.Popen] = []

    def call(rank: int, code: str) -> int:
        head = "import pathlib, sys, time; from tune_cli import heartbeat; heartbeat.BEAT_S = 0.1; "
        head += "heartbeat.start_beating(pathlib.Path(sys.argv[1])); time.sleep(0.3); "
        processes.append(subprocess.Popen([sys.executable, "-c", head + code, str(get_beat_path(tmp_path, rank))]))
        return processes[-1].pid

    yield call
    for process in processes:
        process.kill()
        process.wait()


def test_of_real_processes_the_stopped_one_is_found_alone(
    start: Callable[[int, str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SILENT_S", 1.5), ("PAUSE_S", 1.0), ("LOOK_S", 0.05)):
        monkeypatch.setattr(heartbeat, name, seconds)
    waits = start(0, "time.sleep(600)")
    holds = start(1, "sum(range(10**12))")  # one call in C, which never lets go of the interpreter's lock
    stops = start(2, "time.sleep(600)")
    listener = Listener(tmp_path, {0: waits, 1: holds, 2: stops})
    began, silent = time.monotonic(), []
    while not silent and time.monotonic() < began + 30:
        time.sleep(0.05)
        silent = listener.find_silent([0, 1, 2])
        if time.monotonic() > began + 2.5:
            os.kill(stops, signal.SIGSTOP)
    assert silent == [2]
    assert time.monotonic() - began > 2.5
    message, _ = heartbeat.describe_silence(listener.describe(2))
    assert "its process is stopped, as by SIGSTOP" in message


def test_a_worker_stops_beating_when_its_launchers_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    path = get_beat_path(tmp_path, 0)
    before = {thread.ident for thread in heartbeat.threading.enumerate()}
    heartbeat.start_beating(path)
    (thread,) = (thread for thread in heartbeat.threading.enumerate() if thread.ident not in before)
    path.unlink()
    thread.join(5)
    assert not thread.is_alive()
