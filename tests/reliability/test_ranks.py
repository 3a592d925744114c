"""Two processes that something happens to: they save together and leave together, none waits for one that is dead, and
what goes on is the run that nothing happened to. `rank_scenarios.py` plays it, once for all tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optune import checkpoint
from tests import forked
from tests.recipes.running import ROOT, Finished, assert_equal_runs
from tests.reliability.interrupting import assert_same_end

pytestmark = pytest.mark.slow
ENDS_S = 30
"""How long the others may take to end when one has died or all were told to."""


class Played:
    """What the scenarios left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())

    def code(self, name: str) -> int:
        return self.results[name]["code"]

    def said(self, name: str) -> str:
        return self.results[name]["said"]

    def errors(self, name: str) -> list[str]:
        return [line for line in self.said(name).splitlines() if line.startswith("error: ")]

    def run(self, name: str) -> Finished:
        return Finished(self.folder / name)

    @property
    def straight(self) -> Finished:
        assert self.code("straight") == 0, self.said("straight")
        return self.run("straight")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("ranks")
    command = [forked.python(), "-m", "tests.reliability.rank_scenarios", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return Played(folder)


@pytest.mark.parametrize(
    ("name", "code", "signal_name"),
    [
        ("save, then int", 130, "SIGINT"),
        ("term of one rank", 143, "SIGTERM"),
        ("term of all", 143, "SIGTERM"),
    ],
)
def test_a_signal_to_one_or_all_saves_one_checkpoint_and_ends_all(
    played: Played, name: str, code: int, signal_name: str
) -> None:
    assert played.code(name) == code, played.said(name)
    # The last step was saved for the signal, or just before it because a save was due.
    left = re.findall(r"stopped after step (\d+)", played.said(name))[0]
    assert re.search(rf"{signal_name}: (saving after step {left}\b|nothing new to save)", played.said(name))
    assert f"checkpoints/step-{int(left):06}" in played.said(name)
    assert played.said(name).count("stopped after step") == 1
    assert played.errors(name) == []
    assert "Traceback" not in played.said(name)


def test_sigusr1_to_the_launcher_saves_and_trains_on(played: Played) -> None:
    assert played.said("save, then int").count("SIGUSR1: saving after step") == 1


def test_a_run_stopped_in_three_ways_ends_as_if_nothing_had_been(played: Played) -> None:
    assert played.code("chain's end") == 0, played.said("chain's end")
    assert_same_end(played.run("chain"), played.straight)


def test_a_second_signal_ends_a_hung_step_at_once(played: Played) -> None:
    assert played.code("second signal") == 130
    assert "a second signal stops it at once" in played.said("second signal")
    assert played.errors("second signal") == []
    assert played.results["second signal"]["seconds"] < 300  # rank 1 sleeps for ten minutes


def test_workers_of_a_killed_launcher_save_and_end(played: Played) -> None:
    assert played.code("launcher killed") == -9
    assert played.results["launcher killed"]["seconds"] < ENDS_S
    saved = [path for path in checkpoint.list_checkpoints(played.folder / "orphans") if not checkpoint.check(path)]
    assert saved
    assert played.code("orphans' end") == 0, played.said("orphans' end")
    assert_same_end(played.run("orphans"), played.straight)


def test_a_restart_goes_on_by_itself(played: Played) -> None:
    """Rank 0 is late after it: it must not be looked for where it was before."""
    said = played.said("restart")
    assert played.code("restart") == 0, said
    assert "warning: rank 1: the process was killed by SIGKILL" in said
    assert "restart 1: going on from the newest whole checkpoint (resume=auto)" in said
    assert_same_end(played.run("restarted"), played.straight)


def test_what_breaks_on_all_ranks_is_told_once_and_fails(played: Played) -> None:
    """Case A08, two processes."""
    assert played.code("broken") == 1, played.said("broken")
    (error,) = played.errors("broken")
    assert "not finite" in error
    assert not error.startswith("error: rank")
    assert played.said("broken").rstrip().splitlines()[-2].startswith("error: ")
    assert "Traceback" not in played.said("broken")
    assert error.removeprefix("error: ") in (played.folder / "broken/log.txt").read_text()


def test_rows_that_do_not_divide_among_the_ranks_give_the_run_of_one_process(played: Played) -> None:
    """Case A50: three rows on two ranks; and one row, in training and validation."""
    for name in ("three rows, two", "three rows, one", "one row"):
        assert played.code(name) == 0, played.said(name)
    assert_equal_runs(played.run("three-two"), played.run("three-one"), relative=1e-5)
    assert played.run("one-row").losses


def test_every_rank_has_a_log(played: Played) -> None:
    assert (played.folder / "straight/log.txt").read_text().count("finished after step") == 1
    assert (played.folder / "straight/logs/rank-0001.txt").exists()
