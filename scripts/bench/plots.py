"""The plots of docs/benchmarks.md, drawn from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.roofline import machine_rate, step_shares
from scripts.bench.scaling import count_tokens, curves, line_through, median_times
from scripts.bench.tables import TOOLS, Run, by_cell, summarize

COLOURS = {"torchtune": "#d9661f", "litgpt": "#2e8b57", "trl": "#8a8a8a", "optune": "#1f5fa8"}
KINDS = {"forward": "#1f5fa8", "dX": "#6fa0d8", "dW": "#d9661f"}
CURVES = (("#1f5fa8", "o", 8), ("#d9661f", "s", 4), ("#2e8b57", "^", 5))
"""Colour, marker and its size: where curves lie upon each other, each is still seen."""


def _figure(width: float, height: float, **layout: Any) -> tuple[Any, Any]:
    """A figure and its axes, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**layout)
    for each in axes:
        each.grid(alpha=0.3, linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_peers(runs: Sequence[Run], path: Path) -> None:
    """Speed and memory of every contestant, cell by cell."""
    cells = by_cell(summarize(runs))
    places, ticks, place = [], [], 0.0
    for cell, own in cells.items():
        ticks.append((place + (len(own) - 1) / 2, cell.replace(" 4 x 512,", ",")))
        places += [(place + index, one) for index, one in enumerate(own)]
        place += len(own) + 0.8
    figure, (left, right) = _figure(11, 1.4 + 0.26 * place, ncols=2, sharey=True)
    for at, one in places:
        colour = COLOURS[one.tool]
        left.barh(at, one.speed, color=colour, height=0.85)
        left.plot([one.lowest, one.highest], [at, at], color="black", linewidth=1.2)
        left.text(one.highest, at, f" {one.speed:.0f}", va="center", fontsize=8)
        right.barh(at, one.peak_mib / 1024, color=colour, height=0.85)
        right.text(one.peak_mib / 1024, at, f" {one.peak_mib / 1024:.1f}", va="center", fontsize=8)
    left.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=9)
    left.set_ylim(place - 0.4, -1)
    left.set_xlabel("tokens/s, median; line: lowest to highest")
    right.set_xlabel("peak resident memory GiB")
    for axes in (left, right):
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
    present = {one.tool for _, one in places}
    handles = [left.barh(0, 0, color=COLOURS[tool], label=TOOLS[tool]) for tool in TOOLS if tool in present]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(present), frameon=False)
    figure.savefig(path)


def draw_scaling(result: Mapping[str, Any], path: Path) -> None:
    """Time of a step with its line, tokens a second, and live memory, against tokens."""
    figure, (times_axes, speed_axes, memory_axes) = _figure(12, 4, ncols=3)
    for (title, names), (colour, marker, size) in zip(curves().items(), CURVES, strict=True):
        times = median_times(result["cells"], names)
        if not times:
            continue
        tokens = sorted(times)
        style = {"color": colour, "marker": marker, "markersize": size, "label": title}
        if title != "longer rows" and len(times) > 2:
            start, slope, _ = line_through(times)
            ends = [tokens[0], tokens[-1]]
            times_axes.plot(ends, [start + slope * x for x in ends], color=colour, linewidth=1, linestyle="--")
            times_axes.plot(tokens, [times[x] for x in tokens], **style | {"linestyle": "none"})
        else:
            times_axes.plot(tokens, [times[x] for x in tokens], **style)
        speed_axes.plot(tokens, [x / times[x] for x in tokens], **style)
        memory = [(count_tokens(name), result["cells"][name]) for name in names if name in result["cells"]]
        shown = [(x, cell["live_mib"]) for x, cell in memory if "live_mib" in cell]
        memory_axes.plot([x for x, _ in shown], [y for _, y in shown], **style)
    for axes, label in (
        (times_axes, "step s (dashed: the line through them)"),
        (speed_axes, "tokens/s"),
        (memory_axes, "peak of live tensors in the step MiB"),
    ):
        axes.set_xlabel("tokens in a step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    speed_axes.set_xscale("log", base=2)
    speed_axes.xaxis.set_major_formatter("{x:g}")
    times_axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_roofline(result: Mapping[str, Any], path: Path) -> None:
    """The rate of each product, that of all of them in a row, and what the steps reach."""
    figure, axes = _figure(11, 4.4, ncols=2)
    shares = step_shares(dict(result))
    for panel, dtype, short in zip(axes, ("bfloat16", "float32"), ("bf16", "fp32"), strict=True):
        products = [product for product in result["products"] if product["dtype"] == dtype]
        for index, product in enumerate(products):
            for place, (kind, colour) in enumerate(KINDS.items()):
                label = kind if index == 0 else None
                rate = product["gflops_per_s"][kind]
                panel.bar(index + (place - 1) * 0.27, rate, width=0.25, color=colour, label=label)
        rate = machine_rate(dict(result), dtype)
        panel.axhline(rate, color="black", linewidth=1.2, label=f"all in a row: {rate:,.0f}")
        for share, style in zip((each for each in shares if each["dtype"] == short), ("--", ":", "-."), strict=False):
            label = f"{share['mode']} step: {share['needed']:,.0f} ({share['needed_share']:.0%})"
            panel.axhline(share["needed"], color="#b03060", linewidth=1.4, linestyle=style, label=label)
        names = [product["name"].replace(", ", ",\n").replace("_proj", "") for product in products]
        panel.set_xticks(range(len(products)), names, fontsize=9)
        panel.grid(visible=False, axis="x")
        panel.set_title(short)
        panel.set_ylabel("GFLOP/s")
        panel.set_ylim(top=1.35 * max(max(product["gflops_per_s"].values()) for product in products))
        panel.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    figure.savefig(path)
