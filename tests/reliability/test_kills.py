"""Whole runs survive SIGKILL. `scripts/kill_runs.py` says how they die, docs/reliability.md what that came to."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests import forked
from tests.recipes.running import ROOT

KILLS, SEED = 25, 20251


@pytest.mark.slow
def test_runs_that_are_killed_again_and_again_end_as_if_nothing_had_been() -> None:
    command = [forked.python(), str(ROOT / "scripts" / "kill_runs.py"), "--kills", str(KILLS), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["deaths"] >= KILLS
    assert len(summary["by kind"]) == 3
    assert summary["equal"] == summary["runs"] >= 4
    assert summary["lost"] == summary["unequal"] == []
