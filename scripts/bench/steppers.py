"""Step time and peak memory of every way to step, alternating in one process, so that a noisy machine is fair to all.

    python -m scripts.bench steppers models/SmolLM2-135M-Instruct --steps 15

Times: all variants hold a model of their own and take turns, step by step; medians and ratios to after_backward are
printed as a Markdown table. Memory: the peak of live tensor bytes within a step, counted by an allocation tracker in a
step of its own (never resident memory, which depends on the allocator). `--wide` takes the two-block model of width
4096 for which the factored stash is made; it has random weights and needs no folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optune import models, optim, products, train
from optune.loss import next_token_loss
from optune.models.families import read_config
from optune.types import Microbatch
from scripts.bench.live_bytes import LiveBytes

VARIANTS: dict[str, dict[str, Any]] = {
    "after_backward": {"when": "after_backward"},
    "after_backward, clipped": {"when": "after_backward", "max_grad_norm": 1.0},
    "in_backward": {"when": "in_backward"},
    "in_backward, hold": {"when": "in_backward", "max_grad_norm": 1.0, "stash": "hold"},
    "in_backward, factored": {"when": "in_backward", "max_grad_norm": 1.0, "stash": "factored"},
    "in_backward, two_pass": {"when": "in_backward", "max_grad_norm": 1.0, "stash": "two_pass"},
    "immediate": {"when": "immediate"},
}
BASELINES = {"in_backward": "after_backward", "immediate": "in_backward"}
"""What an unclipped variant is compared with; clipped ones are compared with the clipped standard step."""


@dataclass
class Contestant:
    name: str
    model: Any
    stepper: optim.Stepper
    times: list[float]
    peak_mib: float = 0.0

    def step(self, microbatch: Microbatch, number: int) -> None:
        train.train_step(self.model, next_token_loss, self.stepper, [microbatch], seed=0, step=number)


def wide_model() -> Any:
    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    config, problems = read_config(raw)
    assert config is not None, problems
    with torch.device("cpu"):
        return models.Decoder(config).to(torch.bfloat16)


def make(
    name: str,
    folder: Path | None,
    checkpointing: str,
    tokens: int,
    factory: type,
    dtype: torch.dtype = torch.bfloat16,
) -> Contestant:
    torch.manual_seed(0)
    model = wide_model() if folder is None else models.load(folder, dtype=dtype)
    model.activation_checkpointing = checkpointing
    optimizer = optim.build_optimizer(model.named_parameters(), factory=factory, settings={"lr": 1e-5})
    stepper = optim.build_stepper(model, optimizer, expected_tokens=tokens, **VARIANTS[name])
    return Contestant(name, model, stepper, [])


def measure(
    folder: Path | None, rows: int, length: int, checkpointing: str, options: argparse.Namespace
) -> list[Contestant]:
    generator = torch.Generator().manual_seed(0)
    factory = torch.optim.SGD if folder is None else torch.optim.AdamW
    vocabulary = 1000 if folder is None else models.check(folder).vocab_size
    tokens_BT = torch.randint(0, vocabulary, (rows, length), generator=generator)
    microbatch = Microbatch(
        tokens_BT, tokens_BT.roll(-1, 1), torch.arange(length).expand(rows, length), num_tokens=rows * length
    )
    contestants = [make(name, folder, checkpointing, rows * length, factory) for name in options.variants]
    for contestant in contestants:
        contestant.step(microbatch, 0)  # makes the optimizer's state
        gc.collect()
        with LiveBytes() as live:
            contestant.step(microbatch, 1)
        contestant.peak_mib = live.peak / 2**20
    for number in range(options.steps):
        # The order turns, so that nobody always follows the same neighbour.
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            start = time.perf_counter()
            contestant.step(microbatch, 2 + number)
            contestant.times.append(time.perf_counter() - start)
    return contestants


def report(title: str, contestants: list[Contestant]) -> dict[str, Any]:
    median = {contestant.name: statistics.median(contestant.times) for contestant in contestants}
    print(f"\n### {title}\n\n| variant | step s | ratio | peak of live tensors in the step MiB |\n|---|---|---|---|")
    for contestant in contestants:
        name = contestant.name
        reference = BASELINES.get(name, "after_backward, clipped" if "," in name else "after_backward")
        ratio = (
            f"{median[name] / median[reference]:.3f} × {reference}" if reference in median and reference != name else ""
        )
        print(f"| {name} | {median[name]:.3f} | {ratio} | {contestant.peak_mib:,.0f} |", flush=True)
    return {"title": title, "variants": {c.name: {"times_s": c.times, "peak_mib": c.peak_mib} for c in contestants}}


@products.native()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a model folder; left out with --wide")
    parser.add_argument("--wide", action="store_true", help="the two-block model of width 4096, 1 x 512 tokens, SGD")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=["1x512", "4x512"], metavar="ROWSxLENGTH")
    parser.add_argument("--checkpointing", nargs="+", default=["none", "block"])
    parser.add_argument("--variants", nargs="+", default=[name for name in VARIANTS if "factored" not in name])
    parser.add_argument("--out", type=Path, help="write all times as JSON")
    options = parser.parse_args()
    results = []
    if options.wide:
        options.variants = ["after_backward, clipped", "in_backward, hold", "in_backward, factored"]
        results.append(report("two blocks of width 4096, 1 x 512, SGD", measure(None, 1, 512, "none", options)))
    elif options.model is None:
        parser.error("name a model folder, or take --wide")
    for shape in [] if options.wide else options.shapes:
        rows, length = map(int, shape.split("x"))
        for checkpointing in options.checkpointing:
            title = f"{options.model.name}, bf16, {rows} x {length}, activation checkpointing {checkpointing}"
            results.append(report(title, measure(options.model, rows, length, checkpointing, options)))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
