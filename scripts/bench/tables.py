"""Markdown tables from the results, and the goals that they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.roofline import machine_rate, step_shares
from scripts.bench.scaling import count_tokens, curves, line_through, median_times

WARM_UP = 1
"""Of the times between steps, so many at the start of each run are not counted."""
TOOLS = {"torchtune": "torchtune 0.6.1", "litgpt": "LitGPT 0.5.13", "trl": "TRL 1.16", "optune": "optune"}

Run = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """All runs of a contestant. `speed` is in tokens a second: the median of the runs' medians."""

    tool: str
    cell: str
    speed: float
    lowest: float
    highest: float
    peak_mib: float
    first_step_s: float
    runs: int


def speed(run: Run) -> float:
    """Tokens per second of one run: of the median step after the warm-up."""
    return run["tokens_per_step"] / statistics.median(run["steps_s"][WARM_UP:])


def summarize(runs: Sequence[Run]) -> dict[str, Summary]:
    """By contestant, without runs that failed. Lowest and highest are of runs, or of the steps of a single run."""
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        if "failed" not in run:
            grouped.setdefault(run["name"], []).append(run)
    found = {}
    for name, own in grouped.items():
        speeds = [speed(run) for run in own]
        if len(own) == 1:
            spread = [own[0]["tokens_per_step"] / seconds for seconds in own[0]["steps_s"][WARM_UP:]]
        else:
            spread = speeds
        found[name] = Summary(
            tool=own[0]["tool"],
            cell=name.partition(": ")[2],
            speed=statistics.median(speeds),
            lowest=min(spread),
            highest=max(spread),
            peak_mib=statistics.median(run["peak_mib"] for run in own),
            first_step_s=statistics.median(run["first_step_s"] for run in own),
            runs=len(own),
        )
    return found


def by_cell(summaries: Mapping[str, Summary]) -> dict[str, list[Summary]]:
    """Cells in the order in which they were met, and in each the tools in the order of `TOOLS`."""
    cells: dict[str, list[Summary]] = {}
    for summary in summaries.values():
        cells.setdefault(summary.cell, []).append(summary)
    return {cell: sorted(own, key=lambda one: list(TOOLS).index(one.tool)) for cell, own in cells.items()}


def peers_table(runs: Sequence[Run]) -> str:
    header = [
        "trained, step", "tool", "tokens/s", "lowest–highest", "against the fastest other", "peak memory MiB",
        "against the leanest other", "to the first step s",
    ]  # fmt: skip
    lines = []
    for cell, own in by_cell(summarize(runs)).items():
        others = [one for one in own if one.tool != "optune"]
        for index, one in enumerate(own):
            faster = leaner = ""
            if one.tool == "optune" and others:
                faster = f"{one.speed / max(other.speed for other in others):.2f} ×"
                leaner = f"{one.peak_mib / min(other.peak_mib for other in others):.2f} ×"
            spread = f"{one.lowest:.0f}–{one.highest:.0f}"
            name = f"**{TOOLS[one.tool]}**" if one.tool == "optune" else TOOLS[one.tool]
            row = ["" if index else cell, name, f"{one.speed:.0f}", spread, faster, f"{one.peak_mib:,.0f}", leaner]
            lines.append([*row, f"{one.first_step_s:.1f}"])
    return table(header, lines) + f"\n\n{describe_runs(runs)}"


def describe_runs(runs: Sequence[Run]) -> str:
    """How many runs of how many steps, and which failed."""
    good = [run for run in runs if "failed" not in run]
    counts = sorted({summary.runs for summary in summarize(runs).values()})
    steps = sorted({len(run["steps_s"]) + 1 for run in good})
    times = " or ".join(f"{count} {'run' if count == 1 else 'runs'}" for count in counts)
    said = (
        f"{times} of each, of {' or '.join(map(str, steps))} steps, of which the first {WARM_UP + 1} are not counted."
    )
    failed = sorted({run["name"] for run in runs if "failed" in run} - {run["name"] for run in good})
    return said + (f" Failed: {'; '.join(failed)}." if failed else "")


def sizes_table(runs: Sequence[Run]) -> str:
    sizes = {run["tool"]: run["installed_mib"] for run in runs}
    return table(["tool", "installed MiB"], [[TOOLS[tool], f"{sizes[tool]:,}"] for tool in TOOLS if tool in sizes])


def scaling_table(result: Mapping[str, Any]) -> str:
    header = [
        "rows x length x microbatches", "tokens", "step s", "tokens/s", "peak of live tensors in the step MiB",
        "resident set of the process MiB",
    ]  # fmt: skip
    lines, cells = [], result["cells"]
    for name in dict.fromkeys(name for names in curves().values() for name in names if name in cells):
        seconds, tokens = statistics.median(cells[name]["seconds"]), count_tokens(name)
        memory = [f"{cells[name][key]:,.0f}" if key in cells[name] else "" for key in ("live_mib", "resident_mib")]
        lines.append([name.replace("x", " x "), f"{tokens:,}", f"{seconds:.2f}", f"{tokens / seconds:.0f}", *memory])
    counts = sorted({len(cell["seconds"]) for cell in cells.values()})
    said = f"Medians of {counts[0]} to {counts[-1]} steps." if counts[-1] > 1 else "One step of each."
    return f"{table(header, lines)}\n\n{said}"


def lines_table(result: Mapping[str, Any]) -> str:
    header = ["more tokens by", "from–to", "s at no tokens", "ms a token", "furthest off the line"]
    lines = []
    for title, names in curves().items():
        times = median_times(result["cells"], names)
        if len(times) > 2:
            start, slope, off = line_through(times)
            worst = max(off, key=lambda tokens: abs(off[tokens]))
            far = f"{off[worst]:+.1%} at {worst:,}"
            lines.append([title, f"{min(times):,}–{max(times):,}", f"{start:.3f}", f"{1000 * slope:.3f}", far])
    return table(header, lines)


def loss_table(result: Mapping[str, Any]) -> str:
    header = ["vocabulary", "tokens", "all logits in fp32 MiB", "held beyond the gradients MiB"]
    return table(
        header,
        [
            [f"{row['vocabulary']:,}", f"{row['tokens']:,}", f"{row['logits_mib']:,.0f}",
             f"{row['peak_mib'] - row['gradients_mib']:,.0f}"]
            for row in result.get("loss_memory", [])
        ],
    )  # fmt: skip


def products_table(result: Mapping[str, Any]) -> str:
    header = ["layer", "rows x in x out"]
    dtypes = {"bfloat16": "bf16", "float32": "fp32"}
    kinds = ["forward", "dX", "dW"]
    header += [f"{short} {kind}" for short in dtypes.values() for kind in kinds]
    rows: dict[str, list[str]] = {}
    for product in result["products"]:
        shape = f"{product['rows']:,} x {product['k']:,} x {product['n']:,}"
        row = rows.setdefault(product["name"], [product["name"], shape])
        row += [f"{product['gflops_per_s'][kind]:,.0f}" for kind in kinds]
    whole = ["all of a step, one after another", ""]
    for dtype in dtypes:
        whole += [f"**{machine_rate(dict(result), dtype):,.0f}**", "", ""]
    return table(header, [*rows.values(), whole])


def shares_table(result: Mapping[str, Any]) -> str:
    header = ["step", "s", "GFLOP/s needed", "share of the machine's", "GFLOP/s done", "share"]
    lines = [
        [f"{share['mode']}, {share['dtype']}", f"{share['seconds']:.2f}", f"{share['needed']:,.0f}",
         f"{share['needed_share']:.0%}", f"{share['done']:,.0f}", f"{share['done_share']:.0%}"]
        for share in step_shares(dict(result))
    ]  # fmt: skip
    return table(header, lines)


def machine_words(machine: Mapping[str, Any]) -> str:
    features = ", ".join(machine["features"]) or "none of note"
    return (
        f"{machine['processor']}, {machine['threads']} cores used ({features}), {machine['memory_gib']:.0f} GiB, "
        f"transparent huge pages on {machine['huge_pages'] or 'unknown'}, Python {machine['python']}, "
        f"torch {machine['torch']}."
    )


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
