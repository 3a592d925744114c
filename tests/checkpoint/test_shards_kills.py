"""SIGKILL of either of two ranks, at any moment of a save that they make together, costs no checkpoint and no hang.

`python -m tests.checkpoint.kill_ranks FOLDER 1` tries every single moment.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import forked

EVERY = 16


@pytest.mark.slow
def test_a_rank_that_is_killed_while_saving_leaves_whole_checkpoints_and_the_other_ends(tmp_path: Path) -> None:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        command = [forked.python(), "-m", "tests.checkpoint.kill_ranks", folder, str(EVERY)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, ended.stderr
    trials = [json.loads(line) for line in ended.stdout.splitlines()]
    killed = [trial for trial in trials if trial["killed"]]
    assert {trial["victim"] for trial in killed} == {0, 1}
    assert len(killed) >= 5
    assert "waited for the other processes in vain: Connection closed by peer" in ended.stderr
    for trial in trials:
        survivor = trial["codes"][str(1 - trial["victim"])]
        assert trial["left"], trial
        assert not any(trial["left"].values()), trial
        assert trial["newest"] == max(trial["left"]), trial
        # Once all is written, the end of one rank is no failure of the other; the first call is before any save.
        assert survivor in ((3, 0) if trial["killed"] else (0,)) or trial["event"] == 1, (trial, ended.stderr)
        assert trial["s"] < 30, trial
        assert trial["again"] == {"0": 0, "1": 0}, (trial, ended.stderr)
        assert trial["asides"] == [], trial
        assert trial["then"] == [f"step-{int(trial['newest'][-6:]) + 1:06}"], trial
