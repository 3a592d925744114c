"""`optune data RECIPE --config CONFIG [key=value …]`: shows what is trained, as the trainer sees it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from optune.errors import ConfigError
from tune_cli.arguments import whole_number
from tune_cli.run import Request, make_parser, read_request

if TYPE_CHECKING:
    from optune.data import Batches, Tokenizer
    from optune.data.preview import Unit

USAGE = "RECIPE --config CONFIG [--rows N | --row I | --step S] [--split validation] [--json] [key=value …]"
DESCRIPTION = """\
Shows what is trained, token by token, and counts what is not: rows by file, skipped rows and why, what max_length
takes, lengths, padding. The rows come from the batches that `optune run` would train; no weights are loaded.
Rows and steps count from 1, as in metrics.jsonl."""


def run(words: list[str]) -> int:
    """Prints the counts and some rows for people, or with `--json` everything as one document."""
    parser = make_parser("data", USAGE, DESCRIPTION)
    _add_options(parser)
    options, others = parser.split(words)
    if sum(option is not None for option in (options.rows, options.row, options.step)) > 1:
        parser.error("--rows, --row and --step exclude each other")
    request = read_request(parser, options, others)
    tokenizer, batches, steps = _load(request, options)
    if options.step is not None and options.step > steps:
        raise ConfigError(f"there is no step {options.step} to show: there are {steps:,}", where="--step")
    units = _choose(options, tokenizer, batches)

    if options.json:
        from optune.data.description import describe

        json.dump(describe(batches, tokenizer, options.split, units), sys.stdout, ensure_ascii=False)
        print()
    else:
        from tune_cli.data_view import show

        show(tokenizer, batches, units, as_tables=options.row is not None)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    count = whole_number(1)
    parser.add_argument("--rows", metavar="N", type=whole_number(0), help="show the first N rows or packs (3)")
    parser.add_argument("--row", metavar="I", help="show kept row I, or the one at FILE:LINE, in full as a table")
    parser.add_argument("--step", metavar="S", type=count, help="show all that step S trains")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="which rows (train)")
    parser.add_argument("--processes", metavar="N", type=count, default=1, help="as N processes would train (1)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead; see docs/data.md")


def _load(request: Request, options: argparse.Namespace) -> tuple[Tokenizer, Batches, int]:
    """What the recipe's own `make_batches` makes of the split that is asked for, and how many steps can be shown."""
    make_batches = request.recipe.make_batches
    if not callable(make_batches):
        raise ConfigError(
            "has no function make_batches(cfg, source, config, world_size), so its rows cannot be shown",
            where=request.recipe.reference,
            hint="`optune cat full_finetune` has one: move what your recipe does about data there",
        )
    cfg: Any = request.load()
    if options.split == "validation" and cfg.data.validation is None:
        raise ConfigError("is null, so there are no validation rows to show", where="data.validation")

    from optune import models, train
    from optune.data.streams.batches import StreamedBatches
    from optune.data.streams.preview import hold_window

    source = models.resolve(cfg.model.path, weights=False)
    made = make_batches(cfg, source, models.check(source, weights=False), options.processes)
    if not isinstance(made, tuple) or len(made) != 3:
        raise ConfigError(
            "make_batches does not return (tokenizer, batches, validation)",
            where=request.recipe.reference,
            hint="`optune cat full_finetune` shows one that does",
        )
    tokenizer, batches, validation = made
    steps = train.count_steps(batches.steps_per_epoch, cfg.epochs, cfg.max_steps)
    if options.split == "validation":
        return tokenizer, validation.batches, len(validation)
    if isinstance(batches, StreamedBatches):
        window = hold_window(batches)
        # The last step may take rows of the next window too.
        return tokenizer, window, min(steps, max(1, window.units // window.units_per_step))
    return tokenizer, batches, steps


def _choose(options: argparse.Namespace, tokenizer: Tokenizer, batches: Batches) -> list[Unit]:
    """The rows or packs that the options ask for."""
    from optune.data import preview

    if options.step is not None:
        return list(preview.show_step(batches, tokenizer, options.step))
    if options.row is not None:
        index = _find_row(options.row, batches)
        both = (index - index % 2, index - index % 2 + 1)  # a pair is looked at as one
        try:
            return [preview.show_row(batches, tokenizer, i) for i in (both if preview.are_pairs(batches) else (index,))]
        except IndexError:
            raise ConfigError(
                f"row {options.row} is not in the first epoch: its file's weight is below 1", where="--row"
            ) from None
    return preview.show_first(batches, tokenizer, 3 if options.rows is None else options.rows)


def _find_row(asked: str, batches: Batches) -> int:
    """The number, from 0, of the kept row that is asked for by its number from 1 or as `file:line`."""
    rows = batches.rows
    if asked.isdecimal():
        if 1 <= int(asked) <= len(rows):
            return int(asked) - 1
        raise ConfigError(f"there is no row {asked}: {len(rows):,} rows are kept", where="--row")
    for index in range(len(rows)):
        if rows[index].where == asked or rows[index].where.endswith(f"/{asked}"):
            return index
    for reason, tally in rows.report.skipped.items():
        if any(where.endswith(asked) for where in tally.where):
            raise ConfigError(f"{asked} is skipped: {reason}", where="--row")
    raise ConfigError(
        f"no row that is kept stands at {asked!r}",
        where="--row",
        hint="a number from 1 counts the kept rows; FILE:LINE names one, where it is not skipped",
    )
