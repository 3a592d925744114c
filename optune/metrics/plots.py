"""plot.png: loss, learning rate and gradient norm of a run against its steps."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optune import files
from optune.metrics.measure import format_value
from optune.metrics.metrics_file import read_metrics

SMOOTH_FROM = 200
"""Points from which on a smoothed line is drawn over the raw one."""

_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#d9661f", "#2e8b57", "#8a8a8a"

_FEW = 20

Points = list[tuple[int, float]]


def draw_plot(run_dir: Path, title: str | None = None) -> Path | None:
    """Draw `plot.png` in `run_dir` from its metrics.jsonl; None without matplotlib (extra `plots`) or logged steps.

    Loss on top (training, smoothed from 200 points on, and validation), then rate and gradient norm where they are
    logged. Loss and norm are drawn on a logarithmic axis where they span a wide range.
    """
    metrics = read_metrics(run_dir / "metrics.jsonl")
    loss, validation = _points(metrics, "loss"), _points(metrics, "validation_loss")
    rate, norm = _points(metrics, "lr"), _points(metrics, "grad_norm")
    if not (loss or validation) or importlib.util.find_spec("matplotlib") is None:
        return None
    # Here, not above: a run that is not plotted does not wait for it. And no pyplot: that keeps state of its own.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    small = [name for name, points in (("rate", rate), ("norm", norm)) if points]
    figure = Figure(figsize=(9, 4.2 + 1.7 * len(small)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [2.6] + [1.0] * len(small)
    top, *others = figure.subplots(1 + len(small), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_loss(top, loss, validation)
    for axes, name in zip(others, small, strict=True):
        if name == "rate":
            _draw_rate(axes, rate)
        else:
            _draw_norm(axes, norm)
    for axes in (top, *others):
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.015)
    steps = [step for step, _ in loss + validation]
    if max(steps) - min(steps) < _FEW:
        top.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    last = (top, *others)[-1]
    last.set_xlabel("step")
    last.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    figure.suptitle(title or run_dir.absolute().name)
    aside = run_dir / f"{files.ASIDE}plot.png"
    figure.savefig(aside, format="png")
    return aside.replace(run_dir / "plot.png")


def _points(metrics: Sequence[dict[str, Any]], key: str) -> Points:
    pairs = ((line["step"], line.get(key)) for line in metrics)
    return [(step, value) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)]


def _draw_loss(axes: Any, loss: Points, validation: Points) -> None:
    is_long = len(loss) > SMOOTH_FROM
    if loss:
        steps, values = zip(*loss, strict=True)
        label = f"training, last {format_value(values[-1])}"
        if is_long:
            axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=0.7)
            values = smooth(values)
            label = f"training, smoothed, last {format_value(values[-1])}"
        axes.plot(steps, values, color=_BLUE, linewidth=1.6, label=label, **_marker(len(steps)))
    if validation:
        steps, values = zip(*validation, strict=True)
        label = f"validation, best {format_value(min(values))}"
        size = 5 if len(steps) <= 40 else 0
        axes.plot(steps, values, color=_ORANGE, linewidth=1.4, marker="o", markersize=size, label=label)
    axes.set_ylabel("loss (nats per target)")
    _choose_scale(axes, [value for _, value in loss + validation])
    axes.legend(frameon=False, loc="upper right")


def _draw_rate(axes: Any, rate: Points) -> None:
    axes.plot(*zip(*rate, strict=True), color=_GREEN, linewidth=1.4, **_marker(len(rate)))
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)


def _draw_norm(axes: Any, norm: Points) -> None:
    steps, values = zip(*norm, strict=True)
    if len(norm) > SMOOTH_FROM:
        axes.plot(steps, values, color=_GREY, alpha=0.35, linewidth=0.7)
        values = smooth(values)
    axes.plot(steps, values, color=_GREY, linewidth=1.4, **_marker(len(norm)))
    axes.set_ylabel("gradient norm")
    _choose_scale(axes, [value for _, value in norm])


def _marker(count: int) -> dict[str, Any]:
    """Few points are shown as points: a line through one would show nothing."""
    return {"marker": "o", "markersize": 4} if count <= _FEW else {}


def _choose_scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic when the values, but for a few, span more than a factor of 20; else from zero where that is near."""
    ordered = sorted(values)
    few = len(ordered) // 50
    if ordered[0] > 0 and ordered[-1 - few] > 20 * ordered[few]:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if ordered[-1] > 300 * ordered[0] else (1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif 0 <= ordered[0] < 0.35 * ordered[-1]:
        axes.set_ylim(bottom=0)


def smooth(values: Sequence[float]) -> list[float]:
    """A centred mean over a fiftieth of the points; at the ends over those that are there."""
    half = max(1, len(values) // 100)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = ((max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]
