"""A step and its parts, with the native kernels and without, alternating in one process.

    python -m scripts.bench kernels models/SmolLM2-135M-Instruct

Each operation has the sizes of a block of SmolLM2-135M at 4 x 512 tokens. Medians are printed as Markdown tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optune import kernels, products
from optune.loss import linear_cross_entropy_sum
from optune.models import fused, rope
from optune.models.attention import causal_attention
from optune.types import Microbatch
from scripts.bench.steppers import make

ROWS, LENGTH, WIDTH, INNER, HEADS, KEY_HEADS, HEAD_DIM, WORDS = 4, 512, 576, 1536, 9, 3, 64, 49152


def take_turns(call: Callable[[], Any], times: int) -> tuple[float, float]:
    """Median seconds with the kernels, and without."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * times + 2):
        is_native = turn % 2 == 0
        with nullcontext() if is_native else kernels.turned_off():
            start = time.perf_counter()
            call()
            found[is_native].append(time.perf_counter() - start)
    return statistics.median(found[True][1:]), statistics.median(found[False][1:])


def operations(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each."""

    def make_input(*size: int) -> Tensor:
        return torch.randn(size).to(dtype).requires_grad_()

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
        grad = torch.randn(function(*inputs).shape).to(dtype)
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad)

    hidden, inner = (ROWS * LENGTH, WIDTH), (ROWS * LENGTH, INNER)
    tables = [torch.randn(1, LENGTH, 1, HEAD_DIM).to(dtype) for _ in range(2)]
    heads = [make_input(ROWS, LENGTH, count, HEAD_DIM) for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    head = torch.nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)
    labels = torch.randint(0, WORDS, (ROWS * LENGTH,))
    return {
        f"linear layer, {WIDTH} to {INNER}": both(F.linear, make_input(*hidden), make_input(INNER, WIDTH)),
        f"linear layer, {INNER} to {WIDTH}": both(F.linear, make_input(*inner), make_input(WIDTH, INNER)),
        "RMSNorm": both(lambda x, w: fused.rms_norm(x, w, 1e-5), make_input(*hidden), make_input(WIDTH)),
        "SwiGLU": both(fused.swiglu, make_input(*inner), make_input(*inner)),
        "rotary embedding": both(lambda x: rope.rotate(x, *tables), make_input(ROWS, LENGTH, HEADS, HEAD_DIM)),
        "attention": both(
            lambda q, k, v: causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None),
            *heads,
        ),
        "loss, with the head's products": lambda: linear_cross_entropy_sum(make_input(*hidden), head, labels, None),
    }


@products.native()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    options = parser.parse_args()
    if not kernels.is_ready():
        raise SystemExit(f"this machine has {kernels.describe()}")
    print(f"{kernels.describe()}; {torch.get_num_threads()} threads\n")
    print("| dtype | forward and backward | native ms | torch's operations ms | |")
    print("|---|---|---|---|---|")
    for name in options.dtypes:
        dtype = getattr(torch, name)
        calls = operations(dtype)
        contestant = make("after_backward", options.model, "none", ROWS * LENGTH, torch.optim.AdamW, dtype)
        tokens_BT = torch.randint(0, WORDS, (ROWS, LENGTH))
        positions_BT = torch.arange(LENGTH).expand(ROWS, LENGTH)
        row = Microbatch(tokens_BT, tokens_BT.roll(-1, 1), positions_BT, num_tokens=ROWS * LENGTH)
        calls["whole step, 4 x 512"] = lambda contestant=contestant, row=row: contestant.step(row, 0)
        for what, call in calls.items():
            native, torchs = take_turns(call, options.steps)
            print(
                f"| {name} | {what} | {1e3 * native:,.1f} | {1e3 * torchs:,.1f} | {torchs / native:.2f} × |", flush=True
            )


if __name__ == "__main__":
    main()
