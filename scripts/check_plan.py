"""Lays forecasts of `optune plan` beside steps with real tensors, and writes the table of docs/memory.md.

    python -m scripts.check_plan [--write]

Each row is a model of a few million parameters with random weights, built and stepped as its recipe does; the second
step is counted by its storages, the third by torch's allocator (the profiler's record of what it gives out and takes
back). Takes about three minutes of one core.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from optune.plan import forecast
from tests.plan.real_steps import Case, make_task, measure

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BACKWARD = "optimizer_step=in_backward"
BLOCK = "activation_checkpointing=block"
SELECTIVE = "activation_checkpointing=selective"
BF16 = "model.dtype=bf16"
MASTERS = f"{BF16} model.master_weights=fp32"
SGD, ADAFACTOR = (f"optimizer._target_=torch.optim.{name}" for name in ("SGD", "Adafactor"))
FREE = "max_grad_norm=null"

CASES = [
    Case("small"),
    Case("small", share=0.3),
    Case("deep", BF16),
    Case("wide", f"{BF16} {BLOCK}", rows=4, length=256),
    Case("qwen3", SELECTIVE),
    Case("windows", BLOCK, length=192),
    Case("small", "data.packing=true", rows=4, length=256),
    Case("qwen3", f"data.packing=true {SELECTIVE} {BF16}"),
    Case("small", MASTERS),
    Case("deep", f"{BF16} model.update_rounding=stochastic"),
    Case("wide", SGD),
    Case("wide", f"{SGD} optimizer.momentum=0.9 {BACKWARD} {FREE}"),
    Case("small", f"{ADAFACTOR} {BLOCK}"),
    Case("small", f"{BACKWARD} {FREE} {BLOCK}"),
    Case("deep", f"{BACKWARD} {FREE}"),
    Case("wide", f"{BACKWARD} gradient_stash=hold {BLOCK}"),
    Case("wide", f"{BACKWARD} gradient_stash=cpu {BLOCK}"),
    Case("wide", f"{BACKWARD} gradient_stash=factored {BLOCK}", rows=1, length=64),
    Case("wide", f"{BACKWARD} gradient_stash=two_pass {BLOCK}"),
    Case("deep", f"{BACKWARD} gradient_stash=alias {MASTERS} {BLOCK}"),
    Case("qwen3", f"{BACKWARD} {BLOCK}", validates=True),
    Case("small", "gradient_accumulation_steps=4"),
    Case("wide", f"gradient_accumulation_steps=4 {BACKWARD} gradient_stash=hold {BLOCK}"),
    Case("qwen3", f"gradient_accumulation_steps=4 accumulation=breadth_first {BACKWARD} {FREE}"),
    Case("deep", f"gradient_accumulation_steps=6 accumulation=breadth_first {BF16}", rows=1),
    Case("small", f"optimizer_step=immediate {FREE}"),
    Case("small", "lora.rank=8", recipe="lora_finetune"),
    Case("wide", f"lora.rank=16 lora.dropout=0.1 {BF16} {BLOCK}", recipe="lora_finetune"),
    Case("wide", f"lora.rank=16 lora.quantize_base=nf4 {BF16}", recipe="lora_finetune"),
    Case("deep", f"lora.rank=4 {BACKWARD} {FREE} {BF16}", recipe="lora_finetune"),
]


def main() -> int:
    """Prints the table, or with `--write` puts it into the page; 1 where a forecast is more than 5 % off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    options = parser.parse_args()
    lines = ["| config | predicted | storages | off | allocator | off |", "| --- | --- | --- | --- | --- | --- |"]
    worst = seconds = 0.0
    for case in CASES:
        task = make_task(case)
        started = time.process_time()
        totals = forecast(task).totals
        seconds += time.process_time() - started
        predicted = max(total for moment, total in totals.items() if moment not in ("load", "save"))
        measured = measure(task, allocator=True)
        off = [predicted / real - 1 for real in (measured.storages, measured.allocator)]
        worst = max(worst, *map(abs, off))
        lines.append(
            f"| {describe(case)} | {mib(predicted)} | {mib(measured.storages)} | {off[0]:+.1%} "
            f"| {mib(measured.allocator)} | {off[1]:+.1%} |"
        )
    table = "\n".join(lines)
    print(table)
    print(f"{len(CASES)} configs, at most {worst:.1%} off; {seconds / len(CASES):.2f} s of CPU for a forecast")
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        page = re.sub(r"(<!-- table: check -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", page, flags=re.DOTALL)
        PAGE.write_text(page, encoding="utf-8")
    return int(worst > 0.05)


def describe(case: Case) -> str:
    """Such as `small, 2 × 128, optimizer_step=in_backward`."""
    words = [case.model + (" LoRA" if case.recipe == "lora_finetune" else ""), f"{case.rows} × {case.length}"]
    words += [word.replace("optimizer._target_=torch.optim.", "") for word in case.overrides.split()]
    words += [f"{case.share:.0%} targets"] if case.share < 1 else []
    return ", ".join([*words, *(["validation"] if case.validates else [])])


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    sys.exit(main())
