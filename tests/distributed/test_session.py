"""What one process is asked, all do after the same step: signals, a limit of time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.distributed_ranks import join, run_ranks
from tests.recipes.running import Finished, assert_equal_runs, write_inputs
from tune_cli.main import main


def signal_after(lines: int, folder: Path, numbers: list[signal.Signals]) -> None:
    """Sends `numbers` to this process, one each time that so many more steps have been logged."""
    metrics = folder / "metrics.jsonl"
    for index, number in enumerate(numbers, 1):
        while not metrics.exists() or len(metrics.read_text().splitlines()) < lines * index:
            time.sleep(0.005)
        os.kill(os.getpid(), number)


def train(folder: Path, words: list[str]) -> list[int]:
    """Exit codes; the signals of the first run go to the last rank alone."""
    if join() == 1:
        asks = [signal.SIGUSR1, signal.SIGTERM]
        threading.Thread(target=signal_after, args=(2, folder / "asked", asks), daemon=True).start()
    return [
        main(["run", *words, f"output_dir={folder / 'asked'}"]),
        main(["resume", str(folder / "asked")]),
        main(["run", *words, f"output_dir={folder / 'straight'}"]),
        main(["run", *words, f"output_dir={folder / 'late'}", "max_time=0.01s"]),
    ]


@pytest.mark.slow
def test_a_signal_to_one_process_and_the_clock_end_all_after_the_same_step(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, rows=12)
    words = ["lora_finetune", "--config", str(config), "batch_size=1", "lora.dropout=0.3", "epochs=3"]
    asked, straight, late = (Finished(tmp_path / name) for name in ("asked", "straight", "late"))
    ranks = run_ranks(train, 2, tmp_path, words, timeout_s=600)
    assert ranks == [[143, 0, 0, 0]] * 2
    log = (asked.folder / "log.txt").read_text()
    saved = int(re.findall(r"SIGUSR1: saving after step (\d+)", log)[0])
    assert "go on " in log and "optune resume --nproc-per-node 2 " in " ".join(log.split())
    left = int(re.findall(r"SIGTERM: saving after step (\d+)", log)[0])
    assert saved < left < 18
    assert f"goes on after step {left} " in log
    assert (asked.folder / "logs" / "rank-0001.txt").exists()
    assert_equal_runs(asked, straight)  # bit for bit: dropout repeats
    assert "max_time is nearly over: saving after step 1 of 18" in (late.folder / "log.txt").read_text()
    assert [line["step"] for line in late.metrics] == [1]
