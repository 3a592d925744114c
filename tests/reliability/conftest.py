"""Inputs are made once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.interrupting import Place


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture
def place(inputs: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(inputs, capsys)


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda _: None)
