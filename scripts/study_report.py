"""Tables, JSON and plots of `study_immediate.py`, from its run files alone."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

COLOURS = {"standard": "tab:blue", "immediate": "tab:orange", "exact": "tab:green"}
Record = dict[str, Any]
Grouped = dict[str, dict[str, dict[float, list[Record]]]]


def final_loss(record: Record) -> float:
    """The last validation loss; infinite for a run that diverged."""
    return math.inf if record["diverged"] else record["validation"][-1][1]


def read_records(folder: Path) -> list[Record]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; infinite where one of the values is."""
    if not all(map(math.isfinite, values)):
        return math.inf, math.inf
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def group(records: Iterable[Record]) -> Grouped:
    """By optimizer, mode and rate; each list is in the order of seeds."""
    grouped: Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in sorted(records, key=lambda record: (record["lr"], record["seed"])):
        grouped[record["optimizer"]][record["mode"]][record["lr"]].append(record)
    return grouped


def best_rate(by_rate: dict[float, list[Record]]) -> float:
    return min(by_rate, key=lambda rate: mean_and_spread([final_loss(record) for record in by_rate[rate]])[0])


def steps_to_reach(records: Sequence[Record], loss: float) -> float | None:
    """Where the mean validation curve first is at or below `loss`, between validations by a straight line."""
    curve = mean_curve(records)
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss:
            return after if high <= low else before + (after - before) * min(1.0, (high - loss) / (high - low))
    return None


def mean_curve(records: Sequence[Record]) -> list[tuple[int, float]]:
    points: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for step, loss in record["validation"]:
            points[step].append(loss)
    return [(step, statistics.fmean(losses)) for step, losses in sorted(points.items()) if len(losses) == len(records)]


def summarize(records: list[Record]) -> dict[str, Any]:
    """For each optimizer and mode: final loss by rate, the best rate, step time, and how it compares with standard."""
    summary: dict[str, Any] = {}
    for optimizer, by_mode in group(records).items():
        standard = by_mode["standard"]
        reference = standard[best_rate(standard)]
        goal = mean_and_spread([final_loss(record) for record in reference])[0]
        for mode, by_rate in ((mode, by_mode[mode]) for mode in COLOURS if mode in by_mode):
            rate = best_rate(by_rate)
            best = by_rate[rate]
            pairs = list(zip(best, reference, strict=False))
            difference = mean_and_spread([final_loss(a) - final_loss(b) for a, b in pairs])
            summary[f"{optimizer} {mode}"] = {
                "final_loss_by_rate": {
                    f"{lr:g}": mean_and_spread([final_loss(record) for record in rs]) for lr, rs in by_rate.items()
                },
                "diverged_by_rate": {f"{lr:g}": sum(bool(r["diverged"]) for r in rs) for lr, rs in by_rate.items()},
                "best_rate": rate,
                "final_loss": mean_and_spread([final_loss(record) for record in best]),
                "difference_to_standard_by_seed": difference,
                "seeds": len(best),
                "steps": best[0]["steps"],
                "steps_to_standard_final_loss": steps_to_reach(best, goal),
                "step_s": statistics.median(r["step_s"] for rs in by_rate.values() for r in rs if r["step_s"]),
                "curve": mean_curve(best),
            }
    return summary


def table(part: str, summary: dict[str, Any]) -> str:
    lines = [
        f"\n### {part}\n",
        "| optimizer, mode | best rate | validation loss at the end | against standard, same seeds | "
        "steps to standard's end | step time s |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in summary.items():
        mean, spread = entry["final_loss"]
        shift, shift_spread = entry["difference_to_standard_by_seed"]
        reached = entry["steps_to_standard_final_loss"]
        lines.append(
            f"| {name} | {entry['best_rate']:g} | {mean:.4f} ± {spread:.4f} | {shift:+.4f} ± {shift_spread:.4f} | "
            f"{'never' if reached is None else f'{reached:.0f}'} of {entry['steps']} | {entry['step_s']:.3f} |"
        )
    lines += ["\n| optimizer, mode | validation loss by rate (diverged seeds) |", "|---|---|"]
    for name, entry in summary.items():
        cells = []
        for rate, (mean, _) in entry["final_loss_by_rate"].items():
            gone = entry["diverged_by_rate"][rate]
            cells.append(f"{rate}: {'—' if math.isinf(mean) else f'{mean:.3f}'}{f' ({gone})' if gone else ''}")
        lines.append(f"| {name} | {' · '.join(cells)} |")
    return "\n".join(lines)


def draw(part: str, records: list[Record], summary: dict[str, Any], file: Path) -> None:
    """A row for each optimizer: loss against steps and time at each mode's best rate, and final loss against rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    grouped = group(records)
    figure = Figure(figsize=(13, 3.6 * len(grouped)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(grouped), 3, squeeze=False)
    for row, (optimizer, by_mode) in zip(axes, grouped.items(), strict=True):
        for mode in (mode for mode in COLOURS if mode in by_mode):
            entry, colour = summary[f"{optimizer} {mode}"], COLOURS[mode]
            for record in by_mode[mode][entry["best_rate"]]:
                steps, losses = zip(*record["validation"], strict=True)
                row[0].plot(steps, losses, color=colour, alpha=0.25, linewidth=1)
            steps, losses = zip(*entry["curve"], strict=True)
            label = f"{mode}, rate {entry['best_rate']:g}"
            row[0].plot(steps, losses, color=colour, label=label)
            if mode != "exact":
                row[1].plot([step * entry["step_s"] for step in steps], losses, color=colour, label=label)
            rates = {float(k): v for k, v in entry["final_loss_by_rate"].items() if math.isfinite(v[0])}
            row[2].errorbar(
                list(rates), [m for m, _ in rates.values()], [s for _, s in rates.values()],
                color=colour, label=mode, marker="o", markersize=3, capsize=2,
            )  # fmt: skip
        row[2].set_xscale("log")
        for axis, label in zip(row, ("step", "training time, s", "learning rate"), strict=True):
            axis.set_xlabel(label)
            axis.set_title(f"{part}, {optimizer}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        row[0].set_ylabel("validation loss")
        row[2].set_ylabel("validation loss at the end")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def write_report(results: Path, destination: Path, page: Path) -> None:
    """Writes `immediate_study.json` and `immediate_<part>.png` into `destination`, and the tables into `page`."""
    report: dict[str, Any] = {}
    sections: list[str] = []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        records = read_records(folder)
        if records:
            summary = summarize(records)
            report[folder.name] = summary
            image = destination / f"immediate_{folder.name}.png"
            draw(folder.name, records, summary, image)
            link = os.path.relpath(image, page.parent)
            sections.append(f"{table(folder.name, summary)}\n\n![losses and rates]({link})")
    if not report:
        raise SystemExit(f"no runs in {results}: `study_immediate.py run` makes them")
    file = destination / "immediate_study.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(sections))
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- study -->")
    _, _, after = rest.partition("<!-- /study -->")
    text = "\n".join(sections)
    page.write_text(f"{before}<!-- study -->\n{text}\n<!-- /study -->{after}", encoding="utf-8")
    print(f"\nwritten: {file} and {page}")
