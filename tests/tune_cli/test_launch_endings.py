"""However a launch ends: the cause is told without noise, and nothing stays in the place for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.tune_cli.conftest import CONFIG
from tune_cli import scratch
from tune_cli.failures import read_ends

RECIPE = '''"""A recipe that ends as its config says, after words that nobody needs."""

import os
import signal
import sys
import time
from dataclasses import dataclass

from optune.config import RunConfig
from optune.errors import ConfigError


@dataclass
class Config(RunConfig):
    ends: str = "fine"


def main(cfg, validate_only=False):
    rank = os.environ["RANK"]
    print(f"preparing rows on {rank}: 100%", file=sys.stderr)
    if cfg.ends == "refused":
        raise ConfigError("no such file", where="data.train")
    if cfg.ends == "stopped" and rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if cfg.ends == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.ends != "fine":
        open(f"started-{rank}", "w").close()
        time.sleep(600)
    print("validated" if validate_only else "trained", rank)
    return 0
'''
LAUNCH = """
import sys
import tempfile
from tune_cli import heartbeat
from tune_cli.main import main
tempfile.tempdir = None  # as found before TMPDIR was set
heartbeat.SILENT_S = 4.0
sys.exit(main(sys.argv[1:]))
"""
"""The launcher, that listens for 4 s and not for 30."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ends.py").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "tmp").mkdir()
    return tmp_path


Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts a launch of two ranks; what still runs at the end of the test is killed."""
    launches: list[subprocess.Popen] = []

    def call(ends: str, command: str = "run") -> subprocess.Popen:
        words = [forked.python(), "-c", LAUNCH, command, "--nproc-per-node", "2", "ends.py", "--config", "c.yaml"]
        environment = os.environ | {"TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
        launches.append(
            subprocess.Popen(
                [*words, "device=cpu", f"ends={ends}"], cwd=place, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return launches[-1]

    yield call
    for launch in launches:
        launch.kill()
        launch.wait()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ends_all(place: Path, start: Start) -> None:
    began = time.monotonic()
    launch = start("stopped")
    _, err = launch.communicate(timeout=300)
    assert launch.returncode == 1, err
    assert time.monotonic() - began < 60  # rank 0 would sleep for ten minutes
    assert err.splitlines()[-2].startswith("error: rank 1: has not answered for 4 s: its process is stopped"), err
    assert not list((place / "tmp").iterdir())


@pytest.mark.slow
def test_a_late_refusal_is_its_cause_alone(place: Path, start: Start) -> None:
    launch = start("refused")
    _, err = launch.communicate(timeout=300)
    assert launch.returncode == 2
    said = [line for line in err.splitlines() if not line.startswith("preparing rows on 0")]
    assert said == ["error: data.train: no such file"], err
    assert not list((place / "tmp").iterdir())


@pytest.mark.slow
def test_started_processes_validate_together_and_one_of_them_prints(place: Path, start: Start) -> None:
    launch = start("fine", "validate")
    out, err = launch.communicate(timeout=300)
    assert launch.returncode == 0, err
    assert out.startswith("validated 0\n")
    assert (out.count("validated"), out.count("ends: fine"), err.count("preparing")) == (1, 1, 1)
    assert not list((place / "tmp").iterdir())


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing_once_its_workers_have_ended(place: Path, start: Start) -> None:
    launch = start("waits")
    end = time.monotonic() + 120
    while len(list(place.glob("started-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    (folder,) = (place / "tmp").glob(f"{scratch.PREFIX}*")
    launch.send_signal(signal.SIGKILL)
    launch.communicate(timeout=60)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()


def test_folders_of_launchers_that_are_gone_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forsaken, strange = tmp_path / f"{scratch.PREFIX}x", tmp_path / f"{scratch.PREFIX}without-lock"
    (forsaken / "attempt-0").mkdir(parents=True)
    (forsaken / ".lock").touch()
    strange.mkdir()
    with scratch.make_folder() as first, scratch.make_folder() as second:
        assert not forsaken.exists()
        assert strange.exists()  # perhaps made this very moment
        assert first.exists() and second.exists() and first != second
    assert set(tmp_path.iterdir()) == {strange}


WORDS = """\
preparing rows: 100%|##########| 12/12
12:00:01 warning: 3 rows are left out
"""
FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "recipe.py", line 3 in main
"""


@pytest.mark.parametrize(("words", "told"), [(WORDS, ""), (WORDS + FATAL, FATAL.strip())])
def test_last_words_are_those_of_the_death_alone(tmp_path: Path, words: str, told: str) -> None:
    (tmp_path / "rank-0001.txt").write_text(words)
    (end,) = read_ends(tmp_path, {1: -11}, {1: 1.0})
    assert end.last_words == told
