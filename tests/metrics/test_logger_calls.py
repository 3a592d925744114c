"""Loggers get the numbers of the lines, and never decide whether a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optune.metrics import RunLog


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda _: None)


def take_steps(log: RunLog, last: int) -> None:
    for step in range(1, last + 1):
        log.step(step, loss=1.0, targets=1, tokens=1, lr=0.1, epoch=1)


class Recorder:
    """A logger that keeps what it is told, and fails at a chosen step."""

    def __init__(self, fails_at: int | None = None, fails_to_start: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_at = fails_at
        self._fails_to_start = fails_to_start

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        self.calls.append(("start", run_dir, config, first_step))
        if self._fails_to_start:
            raise ConnectionError("no server")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the server is gone")
        self.calls.append((step, dict(metrics)))

    def close(self, succeeded: bool) -> None:
        self.calls.append(("close", succeeded))


def test_loggers_get_the_numbers_of_the_lines(tmp_path: Path) -> None:
    logger = Recorder()
    with RunLog(tmp_path, 2, loggers=[logger], config={"seed": 0}) as log:
        log.step(1, loss=1.5, targets=2, tokens=3, lr=0.1, epoch=0.5)
        log.step(2, loss=float("nan"), targets=2, tokens=3, lr=0.1, epoch=1, grad_norm=2.0)
        log.validation(2, loss=1.0, epoch=1)
    start, first, second, validation, close = logger.calls
    assert start == ("start", tmp_path, {"seed": 0}, 0)
    assert first[0] == 1 and "grad_norm" not in first[1] and first[1]["loss"] == 1.5
    assert second[1]["grad_norm"] == 2.0
    assert validation == (2, {"epoch": 1.0, "validation_loss": 1.0})
    assert close == ("close", True)


def test_a_logger_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, other = Recorder(fails_at=3), Recorder()
    with RunLog(tmp_path, 8, loggers=[failing, other]) as log:
        take_steps(log, 8)
    assert capsys.readouterr().err.count("Recorder failed and is not used any more: the server is gone") == 1
    assert [call[0] for call in failing.calls] == ["start", 1, 2]
    assert [call[0] for call in other.calls] == ["start", *range(1, 9), "close"]


def test_a_logger_that_cannot_start_stops_the_run_before_it_trains(tmp_path: Path) -> None:
    first = Recorder()
    with pytest.raises(ConnectionError, match="no server"):
        RunLog(tmp_path, 8, loggers=[first, Recorder(fails_to_start=True)])
    assert first.calls[-1] == ("close", False)


def test_a_failed_run_tells_its_loggers(tmp_path: Path) -> None:
    logger = Recorder()
    with pytest.raises(ValueError, match="broken"), RunLog(tmp_path, 8, loggers=[logger]) as log:
        take_steps(log, 1)
        raise ValueError("broken")
    assert logger.calls[-1] == ("close", False)
