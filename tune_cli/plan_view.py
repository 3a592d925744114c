"""What `optune plan` shows to people, in 80 columns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from optune.plan import Forecast
    from tune_cli.fitting import Fit
    from tune_cli.plan_result import Result

_WIDEST = 80
_BAR = 24
GREY = "bright_black"
_COLOURS = {
    "weights": "blue", "masters": "cyan", "optimizer": "magenta", "gradients": "red", "gathered": "bright_blue",
    "activations": "green", "loss": "yellow", "stash": "bright_red", "update": "bright_magenta", "batch": GREY,
    "copies": "bright_cyan",
}  # fmt: skip


def show(result: Result) -> None:
    """Prints to stdout."""
    from optune import metrics

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as captured:
        console.print(Text(metrics.format_fields("plan", result.summary)))
        console.print()
        console.print(_show_moments(result.forecast))
        console.print()
        console.print(_show_peak(result))
        if result.memory is not None and not result.is_enough(result.forecast):
            console.print()
            console.print(_show_fits(result))
        for note in result.notes:
            console.print()
            console.print(Text(note, style=GREY))
    lines = captured.get().removesuffix("\n").split("\n")
    has_colour = console.color_system is not None
    sys.stdout.write("".join(f"{line if has_colour else line.rstrip()}\n" for line in lines))


def format_size(size: float) -> str:
    """`61.2 GiB`, `843 MiB`."""
    unit, name = _unit(size)
    return f"{_number(size / unit)} {name}"


def _unit(size: float) -> tuple[int, str]:
    return (2**30, "GiB") if size >= 0.9 * 2**30 else (2**20, "MiB")


def _number(value: float) -> str:
    from optune.files import three_digits

    return three_digits(value)


def _show_moments(forecast: Forecast) -> RenderableType:
    """Parts by moments."""
    from optune.plan import PARTS

    unit, name = _unit(forecast.peak)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"{name} at the fullest point of", style="none", min_width=26)
    for moment in forecast.moments:
        is_fullest = moment == forecast.fullest
        table.add_column(moment, justify="right", min_width=6, style="bold" if is_fullest else "none")
    for part, words in PARTS.items():
        sizes = [parts.get(part, 0) for parts in forecast.moments.values()]
        if max(sizes) / unit >= 0.005:
            name = Text.assemble(("■ ", _COLOURS[part]), words)
            table.add_row(name, *(_number(size / unit) if size / unit >= 0.005 else "·" for size in sizes))
    table.add_section()
    table.add_row("  together", *(_number(total / unit) for total in forecast.totals.values()))
    return Padding(table, (0, 0, 0, 2))


def _show_peak(result: Result) -> RenderableType:
    """The peak, what it consists of, and whether that fits."""
    forecast, memory = result.forecast, result.memory
    parts = forecast.moments[forecast.fullest]
    head = Text.assemble(
        ("peak ", "bold"),
        (format_size(forecast.peak), "bold"),
        f" in {forecast.fullest}, and about {format_size(result.overhead)} for {_overhead_of(result)}",
    )
    whole = max(memory or 0, forecast.peak + result.overhead)
    bar, done = Text(), 0.0
    for part, size in parts.items():
        done += size
        bar.append("█" * (round(3 * _BAR * done / whole) - len(bar)), style=_COLOURS[part])
    done += result.overhead
    bar.append("▒" * (round(3 * _BAR * done / whole) - len(bar)), style=GREY)
    bar.append("░" * (3 * _BAR - len(bar)), style=GREY)
    lines: list[RenderableType] = [head, Padding(bar, (0, 0, 0, 2))]
    if memory is not None:
        needed = forecast.peak + result.overhead
        if needed <= memory:
            lines.append(Text(f"fits into {format_size(memory)}, with {format_size(memory - needed)} left", "green"))
        else:
            lack = format_size(needed - memory)
            lines.append(Text(f"does not fit into {format_size(memory)}: {lack} more are needed", "red"))
    return Group(*lines)


def _show_fits(result: Result) -> RenderableType:
    """The settings that fit, or the one that comes nearest."""
    lines: list[RenderableType] = []
    if result.fits:
        lines.append(Text("trains the same and fits, cheapest first (time: work against the step as set)", "bold"))
        lines += [_show_fit(fit, result.overhead) for fit in result.fits]
    elif result.stays > (result.memory or 0):
        stays = format_size(result.stays)
        lines.append(Text(f"no setting that trains the same fits: {stays} are there all the time", "bold"))
    elif result.smallest is not None:
        lines.append(Text("no setting that trains the same fits; this one takes least", "bold"))
        lines.append(_show_fit(result.smallest, result.overhead))
    if result.adapters is not None:
        verdict = "fits" if result.is_enough(result.adapters) else "does not fit either"
        size = format_size(result.adapters.peak + result.overhead)
        lines.append(Text(f"adapters alone ({result.adapters_by}): {size}, which {verdict}"))
    if lines:
        lines.append(Text(f"each with {format_size(result.overhead)} for {_overhead_of(result)}", GREY))
    return Group(*lines)


def _overhead_of(result: Result) -> str:
    return "Python and torch" if result.device == "cpu" else "CUDA's context"


def _show_fit(fit: Fit, overhead: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", width=7)
    grid.add_column(justify="right", width=9)
    grid.add_column(overflow="fold")
    grid.add_row(
        f"×{fit.setting.time:.2f}", format_size(fit.forecast.peak + overhead), Text(" ".join(fit.setting.words), "cyan")
    )
    return grid
