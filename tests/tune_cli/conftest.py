"""A folder with a recipe that trains nothing, and the command line run in it, in this process or in its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import fixtures, forked
from tests.cases.place import Place, turns
from tune_cli import messages
from tune_cli.main import main

RECIPE = '''"""A recipe that does what its config says."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from optune.config import RunConfig, to_yaml
from optune.errors import ModelError, TrainingError


@dataclass
class Config(RunConfig):
    behaviour: str = "fine"
    api_token: str = ""


def main(cfg, validate_only=False):
    rank = os.environ.get("RANK", "0")
    if cfg.behaviour == f"fail-{rank}" or cfg.behaviour == "fail":
        raise TrainingError("it broke", where=f"rows.jsonl:{rank}", hint="mend it")
    if cfg.behaviour == f"kill-{rank}":
        os.kill(os.getpid(), 9)
    if cfg.behaviour[:4] in ("fail", "kill"):
        time.sleep(600)
    if cfg.behaviour == "model":
        raise ModelError("no weights", where="/m0")
    if cfg.behaviour == "crash":
        raise RuntimeError("boom")
    if cfg.behaviour == "interrupt":
        raise KeyboardInterrupt
    if cfg.behaviour == "stopped":
        return 143
    if cfg.behaviour == "exit":
        sys.exit(7)
    if validate_only:
        return None
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ran-{rank}").write_text(cfg.device)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    loss = cfg.optimizer["lr"] * 1e5
    lines = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": loss}, {"step": 2, "validation_loss": 2.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines) + '{"st')
    return None
'''

CONFIG = "model: {path: m0}\ndata: {train: a.jsonl}\noutput_dir: runs/x\n"


HALF = turns("uaua", "w1", "w2", "w3", "w4")
HALF["messages"][1]["weight"] = 0.5
ROWS = [turns("ua", "w1 w2", "w3 w4"), HALF, turns("ua", "w5", ""), *fixtures.numbered_rows(4)]


@dataclass
class Result:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Optune = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with `fake.py` and `c.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(messages.DEBUG, "")
    (tmp_path / "fake.py").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def optune(folder: Path, capsys: pytest.CaptureFixture[str]) -> Optune:
    """`optune …` in this process."""

    def call(*words: str) -> Result:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture
def shell(folder: Path) -> Callable[[str], Result]:
    """A bash line in which `optune` is the command line, as a user types it."""
    return _make_shell(forked.python())


@pytest.fixture
def fresh_shell(folder: Path) -> Callable[[str], Result]:
    """The same with a Python of its own, for what depends on how Python itself starts and ends."""
    return _make_shell(sys.executable)


def _make_shell(python: str) -> Callable[[str], Result]:
    def call(line: str) -> Result:
        program = f'optune() {{ "{python}" -m tune_cli.main "$@"; }}\nset -o pipefail\n{line}'
        environment = {key: value for key, value in os.environ.items() if key != messages.DEBUG}
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, env=environment)
        return Result(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    """Rows in train.jsonl, and a model without weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(messages.DEBUG, "")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    place = Place(tmp_path, capsys)
    (tmp_path / "m0/model.safetensors").unlink()
    place.write(ROWS)
    return place
