"""plot.png shows what was logged, and costs nothing where matplotlib is not."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from optune.metrics import draw_plot
from optune.metrics.plots import SMOOTH_FROM, smooth

matplotlib = pytest.importorskip("matplotlib")


def write(run_dir: Path, count: int, **series: Any) -> Path:
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            file.write(json.dumps({"step": step} | {key: make(step) for key, make in series.items()}) + "\n")
    return run_dir


def draw(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that was drawn, besides the file."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    path = draw_plot(run_dir)
    assert path == run_dir / "plot.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    return figures[0]


def test_loss_rate_and_norm_are_drawn_against_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 50, loss=lambda s: 3 / s, lr=lambda s: s / 1000, grad_norm=lambda s: 1 + s % 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "validation_loss": 0.5}\n')
    figure = draw(tmp_path, monkeypatch)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats per target)", "learning rate", "gradient norm"]
    assert figure.axes[-1].get_xlabel() == "step"
    training, validation = figure.axes[0].lines
    assert list(training.get_xdata()) == list(range(1, 51))
    assert list(training.get_ydata()) == [3 / step for step in range(1, 51)]
    assert list(validation.get_ydata()) == [0.5]
    assert list(figure.axes[1].lines[0].get_ydata()) == [step / 1000 for step in range(1, 51)]
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[2].get_yscale() == "linear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plot.png"]


def test_a_long_run_is_smoothed_over_the_raw_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, SMOOTH_FROM + 1, loss=lambda s: 2 + s % 2)
    raw, smoothed = draw(tmp_path, monkeypatch).axes[0].lines
    assert raw.get_alpha() < 0.5 < smoothed.get_linewidth()
    assert max(smoothed.get_ydata()[10:-10]) - min(smoothed.get_ydata()[10:-10]) < 0.5


def test_smoothing_is_a_mean_of_the_points_around() -> None:
    values = [float(index % 7) for index in range(300)]
    smoothed = smooth(values)
    assert smoothed[150] == pytest.approx(sum(values[147:154]) / 7)
    assert smoothed[0] == pytest.approx(sum(values[:4]) / 4)
    assert smoothed[-1] == pytest.approx(sum(values[-4:]) / 4)


def test_values_that_are_not_numbers_and_panels_without_any_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 5, loss=lambda s: None if s == 3 else 1.0, grad_norm=lambda s: None)
    figure = draw(tmp_path, monkeypatch)
    assert len(figure.axes) == 1
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 4, 5]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("loss", [0.0, -1.0, 1e-30, 1e30])
def test_odd_runs_are_drawn_without_a_warning(tmp_path: Path, count: int, loss: float) -> None:
    write(tmp_path, count, loss=lambda s: loss, lr=lambda s: 0.0, grad_norm=lambda s: 0.0)
    assert draw_plot(tmp_path) is not None


def test_nothing_logged_draws_nothing(tmp_path: Path) -> None:
    assert draw_plot(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    assert draw_plot(tmp_path) is None
    assert not (tmp_path / "plot.png").exists()


def test_without_matplotlib_nothing_is_drawn_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5, loss=lambda s: 1.0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert draw_plot(tmp_path) is None


def test_drawing_leaves_no_state_behind(tmp_path: Path) -> None:
    write(tmp_path, 5, loss=lambda s: math.exp(-s))
    sys.modules.pop("matplotlib.pyplot", None)
    draw_plot(tmp_path)
    assert "matplotlib.pyplot" not in sys.modules
