"""Runs that something happens to, through the command line, and what they are compared with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optune import checkpoint, files
from tests import fixtures
from tests.recipes.running import Finished, assert_equal_runs, read_tensors
from tune_cli.main import main

CLOCK = ("tokens_per_s", "peak_memory_gib", "step_s")
EVERY_STEP = "checkpoint={save_every_steps: 1, keep_last: null}"


@dataclass(frozen=True)
class Result:
    """What a command came to."""

    code: int
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Place:
    """A folder with inputs; runs in it are M0 on 12 rows, 12 steps in 2 epochs, validated every 4."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self._capsys = capsys
        if not self.config.exists():
            self._write_inputs()

    def _write_inputs(self) -> None:
        fixtures.write_model(self.folder / "m0")
        fixtures.write_rows(self.folder / "train.jsonl", fixtures.numbered_rows(12))
        fixtures.write_rows(self.folder / "validation.jsonl", fixtures.numbered_rows(5))
        self.config.write_text(
            f"""
model: {{path: {self.folder / "m0"}, dtype: fp32}}
data: {{train: {self.folder / "train.jsonl"}, validation: {self.folder / "validation.jsonl"}, max_length: 64}}
batch_size: 2
epochs: 2
validation_every_steps: 4
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1}}
schedule: {{name: cosine, warmup_steps: 2}}
seed: 3
device: cpu
"""
        )

    def call(self, *words: str) -> Result:
        """`optune …` in this process."""
        self._capsys.readouterr()
        code = main(words)
        err = self._capsys.readouterr().err
        assert "Traceback" not in err
        return Result(code, err)

    def run(self, output: str, *overrides: str, recipe: str = "full_finetune") -> Result:
        return self.call("run", recipe, "--config", str(self.config), f"output_dir={self.folder / output}", *overrides)

    def resume(self, output: str, *overrides: str) -> Result:
        return self.call("resume", str(self.folder / output), *overrides)

    def finished(self, output: str) -> Finished:
        return Finished(self.folder / output)

    def straight(self, *overrides: str, recipe: str = "full_finetune") -> Finished:
        """The run that nothing happens to; made once for the same overrides."""
        name = "straight-" + re.sub(r"\W+", "-", "-".join([recipe, *overrides])).strip("-")
        if not (self.folder / name).exists():
            result = self.run(name, *overrides, recipe=recipe)
            assert result.code == 0, result.err
        return self.finished(name)


def cut(straight: Finished, step: int, folder: Path, lines: int = 2) -> Path:
    """The run folder of a run that died: its newest checkpoint is that of `step`, metrics go on for `lines` lines."""
    shutil.copytree(straight.folder, folder, ignore=shutil.ignore_patterns("model", "plot.png"))
    for saved in (folder / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    metrics = folder / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step + lines]
    metrics.write_text("".join(kept))
    return folder


def all_metrics(finished: Finished) -> list[dict[str, Any]]:
    """Every line, validation too, without what a clock or a machine decides."""
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def progress(finished: Finished) -> dict[str, Any]:
    """The counters of the newest checkpoint."""
    newest = checkpoint.list_checkpoints(finished.folder)[-1]
    return {key: value for key, value in checkpoint.read_progress(newest).items() if key != "saved_at"}


def assert_same_end(run: Finished, straight: Finished) -> None:
    """Weights, optimizer state, metrics and counters are equal bit for bit, every checkpoint is whole, nothing lies
    about."""
    assert_equal_runs(run, straight)
    assert all_metrics(run) == all_metrics(straight)
    assert progress(run) == progress(straight)
    for saved in checkpoint.list_checkpoints(run.folder):
        assert checkpoint.check(saved) == []
    assert sorted(run.folder.rglob(f"{files.ASIDE}*")) == []
    newest = checkpoint.list_checkpoints(run.folder)[-1]
    assert read_tensors(newest).keys() == run.weights.keys()


def at_call(
    monkeypatch: pytest.MonkeyPatch, target: str, count: int, happens: Callable[[], object], *, after: bool = False
) -> None:
    """`happens()` before (or after) the `count`-th call of the function that `target` names."""
    owner_name, _, name = target.rpartition(".")
    owner = pytest.importorskip(owner_name) if owner_name.islower() else _find(owner_name)
    original = getattr(owner, name)
    calls = 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls
        if mine == count and not after:
            happens()
        result = original(*arguments, **keywords)
        if mine == count and after:
            happens()
        return result

    monkeypatch.setattr(owner, name, counted)


def _find(dotted: str) -> Any:
    """A class by its dotted name."""
    module, _, name = dotted.rpartition(".")
    return getattr(pytest.importorskip(module), name)
