"""Does it train faster when each weight is updated before the gradient flows on? The runs behind docs/immediate.md.

    python scripts/study_immediate.py run tiny                              # a small model from scratch
    python scripts/study_immediate.py run smollm2 --model DIR --rows chat.jsonl
    python scripts/study_immediate.py report                                # tables, JSON and PNG in docs/images

Every mode meets the same weights at the start, the same rows in the same order, the same warm-up and no clipping, for
every optimizer, learning rate and seed of the grid. A run is one file under `--results`; what is there is not run
again, so the study may be stopped and goes on. Modes take turns, so that a noisy machine is fair to all. Wall time
counts training steps alone: the median step of a mode, times the number of steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from study_report import write_report
from tiny_text import plain_text

from optune import data, models, optim, train
from optune.errors import TrainingError
from optune.loss import next_token_loss
from optune.models.families import read_config
from optune.types import Microbatch

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
MODES: dict[str, dict[str, str]] = {
    "standard": {"when": "after_backward"},
    "immediate": {"when": "immediate", "variant": "local"},
    "exact": {"when": "immediate", "variant": "exact"},
}
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Run:
    """One configuration; `name` is its file."""

    part: str
    mode: str
    optimizer: str
    lr: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.part}-{self.optimizer}-{self.lr:g}-{self.mode}-seed{self.seed}"


@dataclass(frozen=True)
class Part:
    """A model, its rows and its grid. `rates` by optimizer; `exact` takes the rates in `exact_rates` alone."""

    make_model: Callable[[int], Any]
    microbatch: Callable[[int, int], Microbatch]
    """`(seed, step)` gives the rows of a step."""
    validation: Callable[[], list[Microbatch]]
    steps: int
    validate_every: int
    rates: dict[str, list[float]]
    exact_rates: dict[str, list[float]] = field(default_factory=dict)
    master_weights: str = "none"
    modes: tuple[str, ...] = tuple(MODES)

    def runs(self, name: str, seeds: int) -> Iterator[Run]:
        for seed in range(seeds):
            for optimizer, rates in self.rates.items():
                for lr in rates:
                    for mode in self.modes:
                        if mode != "exact" or lr in self.exact_rates.get(optimizer, ()):
                            yield Run(name, mode, optimizer, lr, seed, self.steps)


def run_one(run: Run, part: Part, start_losses: dict[int, float]) -> dict[str, Any]:
    """Trains and returns losses, times and what ended the run. `start_losses`: validation before the first step."""
    model = part.make_model(run.seed)
    optimizer = optim.build_optimizer(
        model.named_parameters(),
        factory=OPTIMIZERS[run.optimizer],
        settings={"lr": run.lr, "weight_decay": 0.0},
        master_weights=part.master_weights,
    )
    stepper = optim.build_stepper(model, optimizer, max_skipped_steps=1, **MODES[run.mode])  # type: ignore[arg-type]
    losses: list[float] = []
    seconds: list[float] = []
    if run.seed not in start_losses:
        start_losses[run.seed] = train.evaluate(model, next_token_loss, part.validation())
    validation = [[0, start_losses[run.seed]]]
    diverged = None
    for step in range(run.steps):
        warmed = min(1.0, (step + 1) / WARMUP_STEPS)
        optim.set_learning_rate(optimizer, lambda _, factor=warmed: factor, step)
        microbatch = part.microbatch(run.seed, step)
        start = time.perf_counter()
        try:
            result = train.train_step(model, next_token_loss, stepper, [microbatch], seed=run.seed, step=step)
        except TrainingError:
            diverged = step + 1
            break
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
        if (step + 1) % part.validate_every == 0 or step + 1 == run.steps:
            validation.append([step + 1, train.evaluate(model, next_token_loss, part.validation())])
            if not math.isfinite(validation[-1][1]):
                diverged = step + 1
                break
    return {
        **asdict(run),
        "losses": losses,
        "validation": validation,
        "step_s": statistics.median(seconds) if seconds else None,
        "diverged": diverged,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def run_part(name: str, part: Part, seeds: int, results: Path) -> None:
    runs = list(part.runs(name, seeds))
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    todo = [run for run in runs if not (folder / f"{run.name}.json").exists()]
    print(f"{name}: {len(runs)} runs, {len(runs) - len(todo)} are there already", flush=True)
    started = time.monotonic()
    start_losses: dict[int, float] = {}
    for done, run in enumerate(todo, start=1):
        record = run_one(run, part, start_losses)
        partial = folder / f"{run.name}.json.part"
        partial.write_text(json.dumps(record))
        partial.rename(folder / f"{run.name}.json")
        elapsed = time.monotonic() - started
        loss = f"{record['validation'][-1][1]:.4f}"
        end = f"diverged at step {record['diverged']}" if record["diverged"] else f"validation loss {loss}"
        left = elapsed / done * (len(todo) - done)
        print(f"[{done}/{len(todo)}] {run.name}: {end}; {left / 60:.0f} min left", flush=True)


def tiny_part(tokenizer_folder: Path, rows: int = 8, length: int = 64) -> Part:
    """Two blocks of width 64 that read the generated text from which the shipped tiny model was made."""
    tokenizer = data.load_tokenizer(tokenizer_folder)
    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config, problems = read_config(raw)
    if config is None:
        raise SystemExit(f"the tiny config is refused: {problems}")

    def make_model(seed: int) -> models.Decoder:
        torch.manual_seed(seed)
        model = models.Decoder(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.04)
        return model

    @cache
    def tokens(seed: int) -> torch.Tensor:
        text = " ".join(islice(plain_text(seed), 3000))
        return torch.tensor(tokenizer.encode(text))

    def cut(seed: int, index: int) -> Microbatch:
        start = index * rows * length % (len(tokens(seed)) - rows * length - 1)
        block = tokens(seed)[start : start + rows * length + 1]
        positions_BT = torch.arange(length).expand(rows, length)
        return Microbatch(
            block[:-1].view(rows, length), block[1:].view(rows, length), positions_BT, num_tokens=rows * length
        )

    return Part(
        make_model=make_model,
        microbatch=lambda seed, step: cut(100 + seed, step),
        validation=lambda: [cut(99, index) for index in range(8)],
        steps=250,
        validate_every=25,
        rates={"SGD": [0.01, 0.03, 0.1, 0.3, 1.0], "AdamW": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]},
        exact_rates={"SGD": [0.03, 0.1], "AdamW": [2e-3, 4e-3]},
    )


def smollm2_part(folder: Path, rows_file: Path, work: Path, rows: int = 4) -> Part:
    """A finetune of all weights in bf16 with fp32 masters, on chats of at most 64 tokens; 32 of them are held out."""
    tokenizer = data.load_tokenizer(folder)
    lines = sorted(set(rows_file.read_text(encoding="utf-8").splitlines()) - {""})
    random.Random(0).shuffle(lines)
    short = [line for line in lines if len(line) < 300]
    work.mkdir(parents=True, exist_ok=True)
    # By length, so that validation pads little.
    for name, chosen in (("validation", sorted(short[:32], key=len)), ("train", short[32:])):
        (work / f"{name}.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    train_rows, validation_rows = (
        data.load_rows(work / f"{name}.jsonl", tokenizer, max_length=64) for name in ("train", "validation")
    )
    validation = data.build_validation_batches(validation_rows, 8, pad_id=tokenizer.pad_id)

    @cache
    def batches(seed: int) -> data.Batches:
        return data.build_batches(train_rows, batch_size=rows, pad_id=tokenizer.pad_id, seed=seed)

    return Part(
        make_model=lambda seed: models.load(folder, dtype=torch.bfloat16),
        microbatch=lambda seed, step: batches(seed).microbatches(step)[0],
        validation=lambda: validation,
        steps=40,
        validate_every=10,
        rates={"SGD": [1e-3, 3e-3, 1e-2], "AdamW": [1e-5, 3e-5, 1e-4]},
        master_weights="fp32",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "study-immediate")
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="train what is missing")
    runner.add_argument("part", choices=["tiny", "smollm2"])
    runner.add_argument("--model", type=Path, help="a folder with SmolLM2-135M; for tiny, one with a tokenizer")
    runner.add_argument("--rows", type=Path, help="a JSONL file of chats, for smollm2")
    runner.add_argument("--seeds", type=int, default=3)
    runner.add_argument("--steps", type=int, help="instead of the part's own number")
    runner.add_argument("--rates", type=float, nargs="+", help="instead of the part's own, for the one --optimizer")
    runner.add_argument("--optimizer", choices=OPTIMIZERS, help="only this one")
    runner.add_argument("--modes", choices=MODES, nargs="+", help="only these")
    runner.add_argument("--threads", type=int, default=torch.get_num_threads())
    reporter = commands.add_parser("report", help="tables, JSON and PNG from the runs that are there")
    reporter.add_argument("--destination", type=Path, default=ROOT / "docs" / "images")
    reporter.add_argument("--page", type=Path, default=ROOT / "docs" / "immediate.md", help="gets the tables")
    options = parser.parse_args()
    if options.command == "report":
        write_report(options.results, options.destination, options.page)
        return
    torch.set_num_threads(options.threads)
    if options.part == "tiny":
        part = tiny_part(options.model or ROOT / "assets" / "tiny" / "model")
    elif options.model is None or options.rows is None:
        parser.error("smollm2 needs --model and --rows")
    else:
        part = smollm2_part(options.model, options.rows, options.results / "rows")
    if options.steps:
        part = replace(part, steps=options.steps, validate_every=min(part.validate_every, options.steps))
    if options.modes:
        part = replace(part, modes=tuple(options.modes))
    if options.optimizer:
        chosen = options.rates or part.rates[options.optimizer]
        part = replace(part, rates={options.optimizer: chosen})
    run_part(options.part, part, options.seeds, options.results)


if __name__ == "__main__":
    main()
