"""Measures matrix products of the model's shapes, and steps beside them; started by `python -m scripts.bench roofline`.

Rates are those of `torch.mm` into memory that is there already: no allocation, no cast, operands of the layout that the
step has (a weight is (out, in); dW reads both operands across their rows).
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optune.config import RunConfig, option
from scripts.bench.flops import Product, count_step, linear_products
from scripts.bench.machine import describe_machine
from scripts.bench.workload import Workload


@dataclass
class Config(RunConfig):
    """The keys of every recipe, and what is measured."""

    length: int = option(512, minimum=1)
    head_rows: int = option(512, minimum=1)
    steps: int = option(3, minimum=1)
    seconds: float = option(0.3, above=0)
    modes: list[str] = option(["compiled"])
    result: str = option("roofline.json", is_path=True, not_empty=True)


def main(cfg: Config, validate_only: bool = False) -> int:
    import torch

    raw = json.loads((Path(cfg.model.path) / "config.json").read_text())
    tokens = cfg.batch_size * cfg.length
    result: dict[str, Any] = {
        "machine": describe_machine() | {"threads": torch.get_num_threads()},
        "model": Path(cfg.model.path).name,
        "rows": cfg.batch_size,
        "length": cfg.length,
        "products": [],
        "attention": measure_attention(raw, cfg.batch_size, cfg.length, cfg.seconds),
        "steps": [],
    }
    for dtype in (torch.bfloat16, torch.float32):
        for product in linear_products(raw):
            rows = tokens if product.in_block else min(tokens, cfg.head_rows)
            rates = measure_product(product, rows, dtype, cfg.seconds)
            named = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "gflops_per_s": rates}
            result["products"].append(asdict(product) | named)
            _write(Path(cfg.result), result)
    workload = Workload(cfg)
    for mode in cfg.modes:
        if mode not in ("eager", "compiled", "checkpointed"):
            raise ValueError(f"{mode!r} is not eager, compiled or checkpointed")
        workload.model.activation_checkpointing = "block" if mode == "checkpointed" else "none"
        if mode == "compiled":
            workload.model.compile_blocks()
        workload.step(workload.make_microbatches(cfg.batch_size, cfg.length, 1))
        times = [workload.step(workload.make_microbatches(cfg.batch_size, cfg.length, 1)) for _ in range(cfg.steps + 1)]
        flops = count_step(raw, cfg.batch_size, cfg.length, checkpointed=mode == "checkpointed")
        result["steps"].append({"mode": mode, "dtype": cfg.model.dtype, "seconds": times[1:], "flops": asdict(flops)})
        _write(Path(cfg.result), result)
    return 0


def measure_product(product: Product, rows: int, dtype: Any, seconds: float) -> dict[str, float]:
    """GFLOP/s of the three products of a linear layer."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, product.k, generator=generator).to(dtype)
    weight = torch.randn(product.n, product.k, generator=generator).to(dtype)
    dy = torch.randn(rows, product.n, generator=generator).to(dtype)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: torch.mm(x, weight.t(), out=y),
        "dX": lambda: torch.mm(dy, weight, out=dx),
        "dW": lambda: torch.mm(dy.t(), x, out=dw),
    }
    return {name: round(product.flops(rows) / _time(call, seconds) / 1e9, 1) for name, call in calls.items()}


def measure_attention(raw: dict[str, Any], rows: int, length: int, seconds: float) -> dict[str, float]:
    """Seconds of one block's causal attention in bf16: forward alone, and forward and backward."""
    import torch
    from torch.nn import functional as F

    heads, keys = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    sizes = ((rows, heads, length, head_dim), (rows, keys, length, head_dim), (rows, keys, length, head_dim))
    inputs = [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in sizes]

    def forward() -> Any:
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    gradient = torch.randn(sizes[0], dtype=torch.bfloat16)
    with torch.no_grad():
        forward_s = _time(forward, seconds)
    return {"forward_s": forward_s, "both_s": _time(lambda: torch.autograd.grad(forward(), inputs, gradient), seconds)}


def _time(call: Callable[[], Any], seconds: float) -> float:
    """The median of as many calls as fit into `seconds`, after two that warm up."""
    call()
    call()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while not times or time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
