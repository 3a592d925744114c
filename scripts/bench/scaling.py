"""optune's step over batch, length and accumulation: tokens a second and memory, and how straight the line is.

    python -m scripts.bench scaling models/SmolLM2-135M-Instruct

Runs scaling_recipe.py by `optune run`; all cells take turns in one process. Also measured: what the loss holds, for
vocabularies and numbers of tokens whose logits would differ by a factor of 256. `report` makes table and plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.setup import default_folder
from scripts.bench.workload import run_recipe

LENGTH = 512
BATCHES = (1, 2, 4, 8)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
ACCUMULATIONS = (1, 2, 4, 8, 16)

Cell = dict[str, Any]


def cell_names() -> list[str]:
    names = [f"{rows}x{LENGTH}x1" for rows in BATCHES]
    names += [f"1x{length}x1" for length in LENGTHS]
    names += [f"1x{LENGTH}x{count}" for count in ACCUMULATIONS]
    return list(dict.fromkeys(names))


def curves() -> dict[str, list[str]]:
    """The three ways to more tokens in a step, each as its cells."""
    return {
        f"rows of {LENGTH}": [f"{rows}x{LENGTH}x1" for rows in BATCHES],
        "longer rows": [f"1x{length}x1" for length in LENGTHS],
        f"microbatches of 1 x {LENGTH}": [f"1x{LENGTH}x{count}" for count in ACCUMULATIONS],
    }


def count_tokens(name: str) -> int:
    rows, length, count = map(int, name.split("x"))
    return rows * length * count


def line_through(times: Mapping[int, float]) -> tuple[float, float, dict[int, float]]:
    """(seconds at no tokens, seconds a token, how far each time is off the line, as a share of the line).

    Least squares of the relative distances, so that the short steps count as much as the long ones.
    """
    weights = {tokens: 1 / seconds**2 for tokens, seconds in times.items()}
    total = sum(weights.values())
    mean_x = sum(weights[tokens] * tokens for tokens in times) / total
    mean_y = sum(weights[tokens] * seconds for tokens, seconds in times.items()) / total
    spread = sum(weights[tokens] * (tokens - mean_x) ** 2 for tokens in times)
    slope = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in times.items()) / spread
    start = mean_y - slope * mean_x
    return start, slope, {x: y / (start + slope * x) - 1 for x, y in times.items()}


def median_times(cells: Mapping[str, Cell], names: list[str]) -> dict[int, float]:
    return {count_tokens(name): statistics.median(cells[name]["seconds"]) for name in names if name in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=4, help="rounds are made until then, and one at least")
    parser.add_argument("--cells", nargs="+", default=cell_names(), metavar="ROWSxLENGTHxACCUMULATION")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=default_folder() / "results/scaling.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the config: compile=true")
    options = parser.parse_intermixed_args()
    overrides = [f"cells=[{','.join(options.cells)}]", f"minutes={options.minutes}", f"result={options.out.absolute()}"]
    run_recipe("scaling_recipe", options.model, [*overrides, *options.overrides], options.threads)
    result = json.loads(options.out.read_text())
    for name, cell in result["cells"].items():
        seconds = statistics.median(cell["seconds"])
        print(f"{name:12} {seconds:8.3f} s {count_tokens(name) / seconds:7.0f} tokens/s {cell.get('live_mib', '')}")
    for title, names in curves().items():
        times = median_times(result["cells"], names)
        if len(times) > 2:
            start, slope, off = line_through(times)
            largest = max(off.values(), key=abs)
            print(f"{title}: {start:.3f} s + {1000 * slope:.3f} ms a token, at most {largest:+.1%} off")


if __name__ == "__main__":
    main()
