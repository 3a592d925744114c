"""The machine's matmul rate for each of the model's shapes, and which share of it the step reaches.

    python -m scripts.bench roofline models/SmolLM2-135M-Instruct

Runs roofline_recipe.py by `optune run`, so that products and steps have the same threads and the same allocator. What
a step is counted as stands in flops.py; the rate that it is compared with is that of all its linear products in a row,
each at the rate measured for its shape. Attention's operations are counted as if they could run at that rate too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from scripts.bench.setup import default_folder
from scripts.bench.workload import run_recipe

Result = dict[str, Any]


def machine_rate(result: Result, dtype: str) -> float:
    """GFLOP/s of all linear products of a step one after another: operations over the sum of their times.

    The head's product is made in chunks of rows, so its time is that of a chunk times their number.
    """
    tokens = result["rows"] * result["length"]
    flops = seconds = 0.0
    for product in result["products"]:
        if product["dtype"] == dtype:
            count = 2 * tokens * product["k"] * product["n"] * product["times"]
            for rate in product["gflops_per_s"].values():
                flops += count
                seconds += count / (rate * 1e9)
    return flops / seconds / 1e9


def step_shares(result: Result) -> list[dict[str, Any]]:
    """Of each measured step: seconds, GFLOP/s of what it needs (and of what it does, with recomputation), shares."""
    shares = []
    for step in result["steps"]:
        seconds = statistics.median(step["seconds"])
        flops = step["flops"]
        needed = flops["linear"] + flops["attention"]
        rate = machine_rate(result, {"bf16": "bfloat16", "fp32": "float32"}[step["dtype"]])
        rates = {"needed": needed / seconds / 1e9, "done": (needed + flops["recomputed"]) / seconds / 1e9}
        shares.append(
            {"mode": step["mode"], "dtype": step["dtype"], "seconds": seconds, "machine": rate}
            | rates
            | {f"{name}_share": value / rate for name, value in rates.items()}
        )
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--modes", nargs="+", default=["compiled"], choices=["eager", "checkpointed", "compiled"])
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the steps; products have both")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=default_folder() / "results/roofline.json")
    options = parser.parse_args()
    # Compiling cannot be taken back, so it comes last.
    modes = sorted(options.modes, key=["eager", "checkpointed", "compiled"].index)
    overrides = [
        f"modes=[{','.join(modes)}]",
        f"model.dtype={options.dtype}",
        f"steps={options.steps}",
        f"result={options.out.absolute()}",
    ]
    run_recipe("roofline_recipe", options.model, overrides, options.threads)
    result = json.loads(options.out.read_text())
    for dtype in ("bfloat16", "float32"):
        print(f"{dtype}: {machine_rate(result, dtype):.0f} GFLOP/s for the model's products")
    for share in step_shares(result):
        print(
            f"{share['mode']} {share['dtype']}: {share['seconds']:.3f} s, {share['needed']:.0f} GFLOP/s, "
            f"{share['needed_share']:.0%} of the machine's rate ({share['done_share']:.0%} with recomputation)"
        )


if __name__ == "__main__":
    main()
