"""`optune plan RECIPE --config CONFIG [key=value …]`: how much memory a run will take, before anything is loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING

from tune_cli.arguments import Parser, whole_number
from tune_cli.run import make_parser, read_request

if TYPE_CHECKING:
    from tune_cli.plan_result import Result

USAGE = "RECIPE --config CONFIG [--memory SIZE] [--length N | --data] [--processes N] [--json] [key=value …]"
DESCRIPTION = """\
Predicts the peak memory of a run, part by part and moment by moment, from the config and the model's config.json:
no weight is read and no GPU is needed. The step is that of the run itself, taken on tensors without values.
It is assumed that every row is data.max_length tokens long and trained throughout; --length and --data say better.
With --memory, what does not fit gets a list of settings that train the same and do, cheapest in time first."""

UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}}
UNITS |= {f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)}


def run(words: list[str]) -> int:
    """Prints the forecast for people, or with `--json` as one document. 0 also where it does not fit: it was asked."""
    parser = make_parser("plan", USAGE, DESCRIPTION)
    _add_options(parser)
    options, others = parser.split(words)
    if options.data and options.length is not None:
        parser.error("--length and --data exclude each other")
    from optune.garbage import uncollected

    # A plan makes many objects that stay: what is imported, and what is remembered of operations. Rows may be millions.
    with contextlib.nullcontext() if options.data else uncollected():
        result = _plan(parser, options, others)
    if options.json:
        json.dump(result.as_json(), sys.stdout, ensure_ascii=False)
        print()
    else:
        from tune_cli.plan_view import show

        show(result)
    return 0


def _plan(parser: Parser, options: argparse.Namespace, others: list[str]) -> Result:
    from optune import idle_modules

    idle_modules.leave_out_compiler()
    request = read_request(parser, options, others)

    from tune_cli.planner import Planner

    planner = Planner(request, memory=options.memory, length=options.length, reads_data=options.data)
    return planner.plan(options.processes)


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "--memory", metavar="SIZE", type=read_size, help="what there is, such as 24GiB, 24GB or 24000MiB"
    )
    parser.add_argument("--length", metavar="N", type=whole_number(2, 2**24), help="tokens of the rows of a microbatch")
    parser.add_argument("--data", action="store_true", help="prepare the rows, as a run does, and take the longest")
    parser.add_argument(
        "--processes", metavar="N", type=whole_number(1, 2**20), help="as each of N processes would train"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead; see docs/memory.md")


def read_size(text: str) -> int:
    """Bytes: `24GiB` (1024³ each), `24GB` (1000³ each), `24000MiB`, `1.5TB`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory")
    if not found[2] and float(found[1]) < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is so many bytes: write {text}GiB for gibibytes")
    return int(float(found[1]) * units[found[2].lower()])
