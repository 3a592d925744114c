"""What `optune data` shows to people: counts, then rows, in 80 columns or a little more."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tune_cli.token_text import TokenText, kind_of

if TYPE_CHECKING:
    from optune.data import Batches, Tokenizer
    from optune.data.preview import Unit

_WIDEST = 100
"""Longer lines are hard to read."""

_BAR = 24
GREY = "bright_black"


def show(tokenizer: Tokenizer, batches: Batches, units: Sequence[Unit], *, as_tables: bool) -> None:
    """Prints to stdout: the counts and `units`, or with `as_tables` these alone, a line for each token."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _WIDEST)
    tokens = TokenText(console)
    with console.capture() as captured:
        if as_tables:
            console.print(Group(*(_show_table(unit, batches, tokens) for unit in units)))
        else:
            _print_all(console, tokenizer, batches, units, tokens)
    # Tables fill their lines with spaces, which are in the way of what reads a pipe.
    lines = captured.get().removesuffix("\n").split("\n")
    sys.stdout.write("".join(f"{line if tokens.has_colour else line.rstrip()}\n" for line in lines))


def _print_all(
    console: Console, tokenizer: Tokenizer, batches: Batches, units: Sequence[Unit], tokens: TokenText
) -> None:
    console.print(_show_counts(batches, tokenizer, tokens))
    if units:
        console.print()
        console.print(tokens.legend(has_weights=any(unit.weights is not None for unit in units)))
    place = None
    for unit in units:
        console.print()
        if place != (unit.step, unit.microbatch):
            place = (unit.step, unit.microbatch)
            console.print(Text(f"step {unit.step:,}, microbatch {unit.microbatch}", style="bold"))
        console.print(_show_unit(unit, batches, tokens))


def _show_counts(batches: Batches, tokenizer: Tokenizer, tokens: TokenText) -> RenderableType:
    from optune.data import summary

    report = batches.rows.report
    share = report.targets / max(1, report.tokens)
    ends = ", ".join(
        f"{tokens.visible(tokenizer.decode([i]), breaks=False)} ({i})" for i in sorted(tokenizer.end_ids())
    )
    unit, mixture = batches.unit, batches.rows.mixture
    facts = {
        "trained": f"{report.targets:,} of {report.tokens:,} tokens ({share:.1%})",
        "template": shorten(tokenizer.template_name) if tokenizer.template_name else "none",
        "ends": f"{ends}, after an answer" if ends else "",
        "epoch": f"{mixture.size:,} rows, {batches.tokens():,} tokens, by the weights of the files"
        if mixture is not None and not mixture.is_plain
        else "",
        "steps": f"{batches.steps_per_epoch:,} an epoch, of {batches.units_per_step:,} {unit}s",
        "packs": "" if unit == "row" else f"{batches.units:,} of {batches.max_length} tokens, {batches.fill:.1%} full",
        "padding": f"{summary.padding_share(batches):.1%} of the positions that an epoch feeds",
        "too long": summary.describe_too_long(batches),
    }
    grid = _grid()
    for label, text in facts.items():
        if text:
            grid.add_row(label, Text(text))
    lost = [
        ("skipped" if number == 0 else "", f"{line}")
        for number, line in enumerate(map(shorten, report.skipped_lines()))
    ]
    said = [("note" if number == 0 else "", line) for number, line in enumerate(map(shorten, report.noted_lines()))]
    for label, line in [*lost, *said]:
        grid.add_row(label, Text(line, style="yellow"))
    return Group(_show_files(batches), Text(), grid, Text(), _show_lengths(batches, tokens))


def _show_files(batches: Batches) -> Table:
    report = batches.rows.report
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=GREY)
    table.add_column("file", overflow="fold")
    table.add_column("format")
    for name in ("rows", "kept", "tokens", "targets"):
        table.add_column(name, justify="right", no_wrap=True)
    for path, file in report.files.items():
        numbers = (file.rows, file.kept, file.tokens, file.targets)
        style = "yellow" if file.kept < file.rows else ""
        table.add_row(shorten(path), report.formats.get(path, ""), *(f"{number:,}" for number in numbers), style=style)
    return table


def _show_lengths(batches: Batches, tokens: TokenText) -> Table:
    from optune.data.summary import count_lengths

    lengths = count_lengths(batches.rows.lengths)
    grid = _grid()
    most = max(lengths.counts)
    for number, count in enumerate(lengths.counts):
        first, last = lengths.edges[number] + 1, lengths.edges[number + 1]
        bar = tokens.signs.bar * (-(-_BAR * count // most))
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        line = Text.assemble(f"{span:>15}  ", (bar, "green"), f" {count:,}")
        grid.add_row("lengths" if number == 0 else "", line)
    grid.add_row("", Text(f"{'median':>15}  {lengths.median:,} tokens, longest {lengths.longest:,}", GREY))
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=GREY, width=8)
    grid.add_column(overflow="fold")
    return grid


def _show_unit(unit: Unit, batches: Batches, tokens: TokenText) -> RenderableType:
    rank = f"rank {unit.rank}" if batches.world_size > 1 else ""
    if not unit.rows:
        return _head(tokens, rank, "no row: padding keeps it in step with the others")
    if batches.packs is None:
        return Group(
            _head(tokens, shorten(unit.rows[0]), *unit.halves, rank, *_counts(unit)), _indent(tokens.flow(unit))
        )
    lines = [
        _head(tokens, f"pack {unit.place}", rank, f"{len(unit.rows)} row{'s'[: len(unit.rows) > 1]}", *_counts(unit))
    ]
    for row in unit.split():
        span = f"positions 0 to {row.positions[-1]}"
        lines += [_head(tokens, shorten(row.rows[0]), *row.halves, span, *_counts(row)), _indent(tokens.flow(row))]
    return Group(*lines)


def _head(tokens: TokenText, name: str, *facts: str) -> Text:
    """A thin line that names a row and says how much of it is trained."""
    rule = f"{tokens.signs.rule * 2} "
    said = ", ".join(filter(None, facts))
    return Text.assemble((rule, GREY), name, (f", {said}" if name and said else said, GREY))


def _counts(unit: Unit) -> Iterator[str]:
    yield f"{unit.targets:,} of {unit.tokens:,} tokens trained"
    weights = sorted({unit.weight(index) for index in range(unit.tokens) if unit.trained[index]})
    if weights not in ([], [1.0]):
        yield f"weights {' and '.join(f'{weight:g}' for weight in weights)}"
    if any(unit.padding):
        yield f"{sum(unit.padding):,} padding"


def _indent(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2), expand=False)


def _show_table(unit: Unit, batches: Batches, tokens: TokenText) -> RenderableType:
    place = f"row {unit.numbers[0]:,} of {len(batches.rows):,}, in step {unit.step:,}, microbatch {unit.microbatch}"
    where = f"{place}, place {unit.place}" + (f", rank {unit.rank}" if batches.world_size > 1 else "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=GREY)
    for name in _columns(unit):
        table.add_column(name, justify="left" if name in ("token", "") else "right", overflow="fold")
    for index in range(len(unit.ids)):
        table.add_row(*_cells(unit, index, tokens))
    return Group(
        Text(", ".join([shorten(unit.rows[0]), *unit.halves, *_counts(unit)]), style="bold"),
        Text(where, style=GREY),
        Text(),
        tokens.legend(has_weights=unit.weights is not None),
        Text(),
        table,
    )


def _columns(unit: Unit) -> Iterator[str]:
    yield from ("position", "id", "token", "", "label")
    if unit.weights is not None:
        yield "weight"
    if unit.documents is not None:
        yield "document"


def _cells(unit: Unit, index: int, tokens: TokenText) -> Iterator[RenderableType]:
    """A line of the table. The label is what this position must predict, which is the token of the next line."""
    yield f"{unit.positions[index]}"
    yield f"{unit.ids[index]}"
    yield tokens.piece(unit, index)
    yield Text(
        tokens.signs.dot if unit.trained[index] else "", style="yellow" if _is_weighted(unit, index) else "green"
    )
    label = unit.labels[index]
    yield "" if label is None else f"{label}"
    if unit.weights is not None:
        yield "" if label is None else f"{unit.weights[index]:g}"
    if unit.documents is not None:
        yield f"{unit.documents[index]}"


def _is_weighted(unit: Unit, index: int) -> bool:
    return kind_of(unit, index) == "weighted"


def shorten(text: str) -> str:
    """`text` with the current directory taken off its paths."""
    return text.replace(f"{Path.cwd()}/", "")
