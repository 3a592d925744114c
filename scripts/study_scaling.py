"""What a process holds and sends, for models of 1B to 70B on 8 to 1,024 GPUs. The figures behind docs/scaling.md.

    python scripts/study_scaling.py check     # torch's own count of shards, collectives and kept tensors: a JSON file
    python scripts/study_scaling.py report    # tables into docs/scaling.md, plots into docs/images

Formulas: `optune.plan`. The check runs one rank of a process group that does not exist (`scaling_check.py`). Speeds are
assumptions, given below and on the page; they decide between layouts that fit, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from optune.distributed.layout import Layout
from optune.models.families import DecoderConfig, read_config
from optune.plan import Memory, Work, bytes_on_the_wire, count_parameters, flops_per_token, memory, traffic

ROOT = Path(__file__).resolve().parent.parent
PAGE, IMAGES = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images"
CHECKED = IMAGES / "scaling_check.json"
GIB, GB = 2**30, 1e9

NODE = 8
"""GPUs that fast links join."""
FLOPS_PER_S = 400e12
"""What a GPU does of bf16 work in training: 40 % of an H100's peak."""
NODE_BYTES_PER_S, NETWORK_BYTES_PER_S = 300e9, 40e9
"""What a GPU sends a second inside a node (NVLink), and between nodes (a 400 Gbit/s card each), after losses."""
USABLE = 0.9
"""The part of a GPU's memory that a plan may fill; the rest is for the driver, buffers and fragments."""

WORK = Work(rows=1, length=4096)
ROWS = (1, 2, 4, 8, 16)
"""Rows a microbatch among which the choice is made."""
GPUS = (8, 64, 256, 1024)
MEMORIES_GIB = (24, 80, 141)


def _model(model_type: str, architecture: str, **sizes: Any) -> DecoderConfig:
    config, problems = read_config({"model_type": model_type, "architectures": [architecture], **sizes})
    assert config is not None, problems
    return config


def _llama(width: int, inner: int, layers: int, heads: int, head_dim: int, tied: bool) -> DecoderConfig:
    return _model(
        "llama", "LlamaForCausalLM",
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=head_dim, vocab_size=128256, tie_word_embeddings=tied,
    )  # fmt: skip


@cache
def models() -> dict[str, DecoderConfig]:
    """Shapes as their publishers' `config.json` give them."""
    return {
        "1B (Llama 3.2)": _llama(2048, 8192, 16, 32, 64, tied=True),
        "8B (Llama 3.1)": _llama(4096, 14336, 32, 32, 128, tied=False),
        "32B (Qwen3)": _model(
            "qwen3", "Qwen3ForCausalLM",
            hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        ),
        "70B (Llama 3.1)": _llama(8192, 28672, 80, 64, 128, tied=False),
    }  # fmt: skip


def layouts(world_size: int) -> Iterator[Layout]:
    """Every way to divide `world_size` GPUs by powers of two; parts of layers stay inside a node."""
    for tensor in (1, 2, 4, 8):
        shard = world_size // tensor
        while shard >= 1:
            yield Layout(world_size // tensor // shard, shard, tensor)
            shard //= 2


def seconds(config: DecoderConfig, layout: Layout, work: Work) -> tuple[float, float]:
    """(computing, waiting) of one microbatch. Parts wait for what they send; shards and replicas send meanwhile, and
    wait for what takes longer than computing."""
    computing = flops_per_token(config, work.length, checkpointing=work.checkpointing) * work.tokens
    computing /= layout.tensor * FLOPS_PER_S
    sent = bytes_on_the_wire(config, layout, work)
    beside = sum(sent[over] / _speed(layout, over) for over in ("shard", "replicate"))
    return computing, sent["tensor"] / _speed(layout, "tensor") + max(0.0, beside - computing)


def _speed(layout: Layout, over: str) -> float:
    spans = {"tensor": layout.tensor, "shard": layout.tensor * layout.shard}.get(over, layout.data_size * layout.tensor)
    return NODE_BYTES_PER_S if spans <= NODE else NETWORK_BYTES_PER_S


def choose(config: DecoderConfig, world_size: int, memory_gib: float) -> tuple[Layout, Work] | None:
    """The layout and the rows a microbatch that fit and do most work a second. Of those within 2 % of the best: fewest
    parts, then a group of shards that is nearest to a machine, then fewest rows."""
    room = memory_gib * GIB * USABLE
    works = [replace(WORK, rows=rows) for rows in ROWS]
    pairs = [(layout, work) for layout in layouts(world_size) for work in works]
    costs = {
        pair: sum(seconds(config, *pair)) * pair[0].tensor / pair[1].tokens
        for pair in pairs
        if memory(config, *pair).total <= room
    }
    best = [pair for pair, cost in costs.items() if cost <= 1.02 * min(costs.values())]

    def simplicity(pair: tuple[Layout, Work]) -> tuple[float, ...]:
        layout, work = pair
        return layout.tensor, abs(math.log2(layout.shard * layout.tensor / NODE)), work.rows

    return min(best, key=simplicity, default=None)


def name(layout: Layout) -> str:
    sizes = {"replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor}
    return " × ".join(f"{word} {number}" for word, number in sizes.items() if number > 1) or "one"


def memory_table() -> list[list[str]]:
    """Memory of one process, sharded over all."""
    head = ["model", "GPUs", "weights", "gradients", "optimizer", "gathered", "activations", "loss", "together"]
    rows = [head]
    for title, config in models().items():
        for world_size in GPUS:
            part = memory(config, Layout(shard=world_size), WORK)
            rows.append([title, f"{world_size:,}", *(_gib(value) for value in (*asdict(part).values(), part.total))])
    return rows


def wire_table() -> list[list[str]]:
    """Bytes that one process sends in a step, by layout."""
    rows = [["model", "GPUs", "layout", "shard", "replicate", "tensor", "together", "tokens a step"]]
    for title, config in models().items():
        for world_size in (8, 64, 1024):
            candidates = (Layout(1, world_size, 1), Layout(world_size // 8, 8, 1), Layout(1, world_size // 8, 8))
            for layout in dict.fromkeys(candidates):
                sent = bytes_on_the_wire(config, layout, WORK)
                figures = [_gb(value) for value in (*sent.values(), sum(sent.values()))]
                tokens = f"{layout.data_size * WORK.tokens:,}"
                rows.append([title, f"{world_size:,}", name(layout), *figures, tokens])
    return rows


def choice_table() -> list[list[str]]:
    """The layout and rows to take, by model, GPUs and memory of a GPU."""
    rows = [["model", "GPUs", *(f"{size} GiB" for size in MEMORIES_GIB)]]
    for title, config in models().items():
        for world_size in GPUS:
            cells = []
            for size in MEMORIES_GIB:
                chosen = choose(config, world_size, size)
                if chosen is None:
                    least = min(memory(config, other, WORK).total for other in layouts(world_size))
                    cells.append(f"does not fit ({least / GIB:.0f} GiB)")
                    continue
                computing, waiting = seconds(config, *chosen)
                need, rows_each = memory(config, *chosen).total / GIB, chosen[1].rows
                share = f"{waiting / (computing + waiting):.0%} waiting"
                cells.append(f"{name(chosen[0])}; {rows_each} row{'s' * (rows_each > 1)}: {need:.0f} GiB, {share}")
            rows.append([title, f"{world_size:,}", *cells])
    return rows


CASES = [Layout(1, 8, 1), Layout(1, 1, 8), Layout(1, 64, 1), Layout(1, 8, 8), Layout(1, 1024, 1), Layout(128, 8, 1),
         Layout(16, 8, 8)]  # fmt: skip
CHECKED_MODELS = ("1B (Llama 3.2)", "32B (Qwen3)", "70B (Llama 3.1)")
LAYERS = 2
"""Blocks of the models that are checked: every further block costs the same, in the formulas and in torch."""


def check() -> list[dict[str, Any]]:
    """What torch counts beside what the formulas say, for every layout and model."""
    records = []
    for layout in CASES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            records += pool.submit(check_layout, layout).result()
        print(name(layout), f"{records[-1]['build_s']:.2f} + {records[-1]['step_s']:.2f} s", flush=True)
    return records


def check_layout(layout: Layout) -> list[dict[str, Any]]:
    """The records of one layout: pairs of what was counted and what the formulas say."""
    from scaling_check import count

    cases = [
        (replace(config, num_hidden_layers=LAYERS, windows=config.windows[:LAYERS]),
         replace(WORK, masters=False, checkpointing=layout.data_size > 1))
        for config in (models()[title] for title in CHECKED_MODELS)
    ]  # fmt: skip
    records = []
    for title, (config, work), counted in zip(CHECKED_MODELS, cases, count(cases, layout), strict=True):
        said = memory(config, layout, work)
        record: dict[str, Any] = {"model": title, "layout": [layout.replicate, layout.shard, layout.tensor]}
        record |= {part: [getattr(counted, part), getattr(said, part)] for part in PARTS}
        if layout.data_size == 1:  # FSDP's gathered weights are among what autograd keeps
            record["activations"] = [counted.kept, said.activations]
        for sent in traffic(config, layout, work):
            record[f"{sent.kind} over {sent.over}"] = [counted.sent.pop((sent.kind, sent.over), 0), sent.bytes]
        record |= {f"{kind} over {over}": [size, 0] for (kind, over), size in counted.sent.items()}
        records.append(record | {"build_s": counted.build_s, "step_s": counted.step_s})
    return records


PARTS = ("weights", "gradients", "optimizer")


def check_table(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per layout: how far torch's counts and the formulas are apart at most, over all models; and the time it took."""
    rows = [["GPUs", "layout", "shards", "activations", "on the wire", "build", "step"]]
    for layout in dict.fromkeys(tuple(record["layout"]) for record in records):
        group = [record for record in records if tuple(record["layout"]) == layout]
        wire = [key for record in group for key in record if " over " in key]
        times = [group[-1][key] for key in ("build_s", "step_s")]  # of the last model: the first one also warms up
        cells = [_apart(group, keys) for keys in (PARTS, ("activations",), wire)]
        ranks = f"{layout[0] * layout[1] * layout[2]:,}"
        rows.append([ranks, name(Layout(*layout)), *cells, *(f"{value:.2f} s" for value in times)])
    return rows


def _apart(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    pairs = [record[key] for record in records for key in keys if key in record]
    if not pairs:
        return "–"
    worst = max(abs(counted - said) / max(counted, said) for counted, said in pairs)
    return "equal" if worst == 0 else f"{worst:.1e}"


def plot(path: Path) -> None:
    """Memory of one process against the number of GPUs, and the waiting of four layouts against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    counts = [8 * 2**power for power in range(8)]
    for title, config in models().items():
        parts: list[Memory] = [memory(config, Layout(shard=count), WORK) for count in counts]
        left.plot(counts, [part.total / GIB for part in parts], "o-", label=title)
    for size in MEMORIES_GIB:
        left.axhline(size * USABLE, color="grey", linewidth=0.8)
        left.text(counts[-1], size * USABLE * 1.04, f"90 % of {size} GiB", ha="right", fontsize=8, color="grey")
    left.set(
        xscale="log",
        title="memory of one process, sharded over all",
        xlabel="GPUs",
        ylabel="GiB",
        yscale="log",
        ylim=(0.8, 250),
    )
    left.set_xticks(counts, [f"{count:,}" for count in counts])
    left.legend(fontsize=8, loc="lower left", ncols=2)

    config, works = models()["70B (Llama 3.1)"], [replace(WORK, rows=rows) for rows in ROWS]
    styles = {Layout(1, 64, 1): "o-", Layout(4, 16, 1): "x--", Layout(1, 16, 4): "o-", Layout(1, 8, 8): "o-"}
    for layout, style in styles.items():
        pairs = [seconds(config, layout, work) for work in works]
        shares = [100 * waiting / (computing + waiting) for computing, waiting in pairs]
        right.plot([work.tokens for work in works], shares, style, label=name(layout))
    right.set(
        xscale="log",
        title="estimated waiting, 70B on 64 GPUs",
        xlabel="tokens a microbatch and data rank",
        ylabel="% of a step",
    )
    right.set_xticks([work.tokens for work in works], [f"{work.tokens:,}" for work in works])
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def fill(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """`page` with its tables made anew: each stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    counts = {title: count_parameters(config) / 1e9 for title, config in models().items()}
    tables = {
        "parameters": [["model", "parameters"], *([title, f"{count:.2f} billion"] for title, count in counts.items())],
        "memory": memory_table(),
        "wire": wire_table(),
        "choice": choice_table(),
        "check": check_table(records),
    }

    def table(match: re.Match[str]) -> str:
        head, *rows = tables[match[1]]
        lines = [head, ["---"] * len(head), *rows]
        return f"<!-- table: {match[1]} -->\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, page, flags=re.S)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if size else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("check", "report"))
    if parser.parse_args().part == "check":
        CHECKED.write_text(json.dumps(check(), indent=1) + "\n")
        return 0
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), json.loads(CHECKED.read_text())), encoding="utf-8")
    plot(IMAGES / "scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
