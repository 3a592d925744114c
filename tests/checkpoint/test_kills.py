"""SIGKILL at any moment of a save loses nothing that was saved, and the run comes to the same end.

`python -m tests.checkpoint.kill_harness FOLDER KILLS SEED` runs the second test with any number of kills.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked

KILLS, SEED = 32, 20250


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a kill does not ask whether the disk has it, and syncing takes long."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def run_harness(*arguments: str) -> list[dict[str, Any]]:
    command = [forked.python(), "-m", "tests.checkpoint.kill_harness", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check_trial(trial: dict[str, Any]) -> None:
    assert not trial["lost"], trial
    assert trial["not_whole"] == [], trial
    assert trial.get("leftovers", []) == [], trial


@pytest.mark.slow
def test_a_kill_before_any_touch_of_the_disk_loses_nothing(folder: Path) -> None:
    *killed, finished = run_harness(str(folder), "events")
    assert len(killed) > 40
    assert {trial["step"] for trial in killed} == {1, 2}
    for trial in killed:
        assert trial["killed"]
        check_trial(trial)
        assert trial.get("sums", finished["sums"]) == finished["sums"], trial["event"]
    assert not finished["killed"]
    assert "model/model.safetensors" in finished["sums"]


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_and_change_nothing(folder: Path) -> None:
    straight, *trials = run_harness(str(folder), str(KILLS), str(SEED))
    assert sum(trial["killed"] for trial in trials) == KILLS
    assert any("sums" in trial for trial in trials)
    for trial in trials:
        check_trial(trial)
        assert trial.get("sums", straight["sums"]) == straight["sums"]
