"""Rows are the same whatever the number of processes, and the processes come and go cleanly."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from optune import data
from optune.data import loading, preparing, workers
from optune.data.encoder import RowEncoder
from optune.errors import DataError
from tests import fixtures
from tests.data.test_cache import assert_same

ROWS = [
    *fixtures.numbered_rows(30),
    fixtures.chat("w1", ""),
    fixtures.chat("a <end> b", "w2"),
    fixtures.chat(" ".join(["w1"] * 70), "w2"),
    *fixtures.numbered_rows(30),
]


@pytest.fixture
def t0(tmp_path: Path) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes are started after the first chunk of 7 rows; the list holds their ids."""
    started: list[int] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(preparing, "CHUNK", 7)
    monkeypatch.setattr(preparing, "PATIENCE_S", 0)
    monkeypatch.setattr(workers.subprocess, "Popen", start)
    return started


def use(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(preparing, "count_cores", lambda: cores)


def are_gone(processes: list[int]) -> bool:
    return not any(psutil.pid_exists(process) for process in processes)


def test_rows_report_and_errors_do_not_depend_on_the_number_of_processes(
    tmp_path: Path,
    t0: data.Tokenizer,
    eager: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [fixtures.write_rows(tmp_path / f"{name}.jsonl", ROWS) for name in "ab"]
    bad = fixtures.write_rows(tmp_path / "bad.jsonl", [*ROWS[:20], {"messages": [{"role": "user"}]}, *ROWS, {"x": 1}])
    results, errors = [], []
    for cores in (1, 3):
        use(monkeypatch, cores)
        results.append(data.load_rows(paths, t0, max_length=64))
        with pytest.raises(DataError) as caught:
            data.load_rows(bad, t0)
        errors.append((str(caught.value), caught.value.where, caught.value.hint))
    assert len(eager) == 6
    assert are_gone(eager)
    assert_same(*results)
    assert results[0].report.skipped_lines() == results[1].report.skipped_lines() != []
    assert list(results[0].report.notes) != []
    assert errors[0] == errors[1]
    assert "bad.jsonl:21" in errors[0][0]
    assert "rows to tokens: more than 7 rows, 3 processes" in capsys.readouterr().err


def test_few_rows_start_no_process(tmp_path: Path, t0: data.Tokenizer, eager: list[int], monkeypatch: Any) -> None:
    use(monkeypatch, 4)
    data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", ROWS[:7]), t0)
    monkeypatch.setattr(preparing, "PATIENCE_S", 60)
    data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", ROWS), t0)
    assert eager == []


def test_a_format_that_cannot_be_sent_stays_here(tmp_path: Path, t0: data.Tokenizer, eager: list[int]) -> None:
    chats = data.load_rows(fixtures.write_rows(tmp_path / "rows.jsonl", fixtures.numbered_rows(20)), t0)
    eager.clear()
    own = data.load_rows(tmp_path / "rows.jsonl", t0, format=lambda row: row)
    assert eager == []
    assert own.fingerprint() == chats.fingerprint()


def test_an_encoder_that_was_sent_encodes_alike(t0: data.Tokenizer) -> None:
    encoder = RowEncoder(t0, max_length=20)
    rows = [(f"rows.jsonl:{index}", row) for index, row in enumerate(ROWS)]
    here, there = (each.encode(rows) for each in (encoder, pickle.loads(pickle.dumps(encoder))))
    assert_same(data.Rows(here.rows, here.report), data.Rows(there.rows, there.report))


def test_a_worker_that_dies_is_told_and_takes_the_others_along(
    tmp_path: Path, t0: data.Tokenizer, eager: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 2)
    path = fixtures.write_rows(tmp_path / "rows.jsonl", ROWS * 20)
    read_rows = preparing.read_rows

    def read_and_kill(source: Any) -> Any:
        for number, row in read_rows(source):
            if number == 200:
                os.kill(eager[0], signal.SIGKILL)
            yield number, row

    monkeypatch.setattr(preparing, "read_rows", read_and_kill)
    with pytest.raises(DataError, match=r"a process that prepares rows ended early \(SIGKILL\)") as caught:
        data.load_rows(path, t0)
    assert "memory" in str(caught.value.hint)
    assert len(eager) == 2
    assert are_gone(eager)


def test_a_reader_that_stops_ends_the_processes(
    tmp_path: Path, t0: data.Tokenizer, eager: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the reading: an error elsewhere, an interrupt."""
    use(monkeypatch, 2)
    sources = loading.list_sources(fixtures.write_rows(tmp_path / "rows.jsonl", ROWS * 5))
    results = preparing.encode_sources(RowEncoder(t0), sources, "auto")
    for _ in range(3):
        next(results)
    assert len(eager) == 2
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert are_gone(eager)


PROGRAM = """
import sys
from optune import data
from optune.data import preparing
preparing.PATIENCE_S, preparing.count_cores = 0, lambda: 2
data.load_rows(sys.argv[1], data.load_tokenizer(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False], ids=["as Ctrl-C does", "by kill -9 to the starter alone"])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, to_all: bool) -> None:
    folder = fixtures.write_tokenizer(tmp_path / "t0")
    with (tmp_path / "rows.jsonl").open("w") as file:
        for row in fixtures.numbered_rows(200):
            file.write((json.dumps(row) + "\n") * 1000)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.jsonl"), str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            children = psutil.Process(process.pid).children()
        if to_all:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        process.wait(30)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert not alive
    assert said.count("Traceback") == (1 if to_all else 0), said
    assert "KeyboardInterrupt" in said or not to_all


def test_workers_do_not_wait_for_torch() -> None:
    heavy = "{'torch', 'datasets', 'transformers', 'pyarrow', 'pandas'} & set(sys.modules)"
    program = f"import sys, optune.data.workers; heavy = {heavy}; assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", program], check=True)
