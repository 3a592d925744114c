"""Writes the tables between the marks in docs/benchmarks.md, and the plots, from the results.

    python -m scripts.bench report --from ~/.cache/optune-bench/results    take what was measured, then write
    python -m scripts.bench report                                         write again from docs/images/bench_*.json

What was measured lies beside the plots, so every table can be made again without measuring; a test holds the page to
it. Prints what the results say about each goal.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench import goals, plots, tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = {
    "peers": "![tokens per second and peak memory of every contestant](images/bench_peers.png)",
    "scaling": "![time of a step, tokens per second and memory against tokens](images/bench_scaling.png)",
    "roofline": "![rates of the products of each layer, and of the steps](images/bench_roofline.png)",
}


def take_results(source: Path, images: Path) -> None:
    """Copies what is in the results folder to the page's own files: `peers.jsonl`, `scaling.json`, `roofline.json`."""
    peers = source / "peers.jsonl"
    if peers.exists():
        runs = [json.loads(line) for line in peers.read_text().splitlines()]
        machines = {json.dumps(run.pop("machine")) for run in runs}
        if len(machines) > 1:
            raise SystemExit(f"{peers} has runs of {len(machines)} machines: {'; '.join(sorted(machines))}")
        _write(images / "bench_peers.json", {"machine": json.loads(machines.pop()), "runs": runs})
    for name in ("scaling", "roofline"):
        if (source / f"{name}.json").exists():
            _write(images / f"bench_{name}.json", json.loads((source / f"{name}.json").read_text()))


def _write(path: Path, value: Any) -> None:
    """Indented, but with a list of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\[[\d\s.,eE+-]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n")


def peers_parts(result: Mapping[str, Any]) -> dict[str, str]:
    runs = result["runs"]
    return {
        "peers": f"{tables.peers_table(runs)}\n\n{PICTURES['peers']}",
        "sizes": tables.sizes_table(runs),
        "peers machine": _machine(result),
    }


def scaling_parts(result: Mapping[str, Any]) -> dict[str, str]:
    settings = result["settings"]
    compiled = "compiled" if settings["compile"] else "eager"
    said = (
        f"{settings['model']}, {settings['dtype']}, {compiled}, {settings['optimizer_step']}, activation checkpointing "
    )
    return {
        "scaling": tables.scaling_table(result)
        + f" {said}{settings['activation_checkpointing']}.\n\n{PICTURES['scaling']}",
        "lines": tables.lines_table(result),
        "loss": tables.loss_table(result),
        "scaling machine": _machine(result),
    }


def roofline_parts(result: Mapping[str, Any]) -> dict[str, str]:
    return {
        "products": tables.products_table(result),
        "shares": f"{tables.shares_table(result)}\n\n{PICTURES['roofline']}",
        "roofline machine": _machine(result),
    }


def _machine(result: Mapping[str, Any]) -> str:
    return tables.machine_words(result["machine"])


PARTS: dict[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {
    "peers": peers_parts,
    "scaling": scaling_parts,
    "roofline": roofline_parts,
}
PLOTS: dict[str, Callable[[Any, Path], None]] = {
    "peers": lambda result, path: plots.draw_peers(result["runs"], path),
    "scaling": plots.draw_scaling,
    "roofline": plots.draw_roofline,
}
GOALS: dict[str, Callable[[Any], list[goals.Goal]]] = {
    "peers": lambda result: goals.peer_goals(result["runs"]),
    "scaling": goals.scaling_goals,
    "roofline": goals.roofline_goals,
}


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with what stands between `<!-- bench: NAME -->` and `<!-- end -->` replaced.

    Raises SystemExit where the page lacks the marks of a part.
    """
    for name, text in parts.items():
        marked = re.compile(rf"(<!-- bench: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(page):
            raise SystemExit(f"docs/benchmarks.md lacks <!-- bench: {name} --> … <!-- end -->")
        page = marked.sub(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
    return page


def read_results(images: Path) -> dict[str, Any]:
    """What lies beside the plots, by benchmark."""
    paths = {name: images / f"bench_{name}.json" for name in PARTS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="a folder of results to take first")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    images, page = options.docs / "images", options.docs / "benchmarks.md"
    if options.source:
        take_results(options.source, images)
    results = read_results(images)
    if not results:
        raise SystemExit(f"{images} has no bench_*.json: run a benchmark, then `report --from RESULTS`")
    for name, result in results.items():
        page.write_text(fill(page.read_text(encoding="utf-8"), PARTS[name](result)), encoding="utf-8")
        PLOTS[name](result, images / f"bench_{name}.png")
        for goal in GOALS[name](result):
            print(goal.line)


if __name__ == "__main__":
    main()
