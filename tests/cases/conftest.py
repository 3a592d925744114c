"""The place in which cases are run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cases.place import Place
from tune_cli import messages


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(messages.DEBUG, "")
    # As without the plots extra: drawing takes longer than the runs themselves.
    monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda run_dir: None)
    return Place(tmp_path, capsys)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose command reads weights."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("optune.models.weights.read_tensor", refuse)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose command asks for a host or connects to one."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"the network was called: {arguments[1:]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
