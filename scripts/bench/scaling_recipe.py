"""Times and memory of steps of many shapes in one process; started by `python -m scripts.bench scaling`.

A cell is ROWSxLENGTHxACCUMULATION. First each shape has a step that is not timed, in which live tensors are counted;
then all cells take turns, up one round and down the next, until the time is over. One whole round is always made.
"""

import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optune.config import RunConfig, option
from scripts.bench.machine import describe_machine
from scripts.bench.workload import Workload


@dataclass
class Config(RunConfig):
    """The keys of every recipe, and what is measured."""

    cells: list[str] = option(["1x512x1"], not_empty=True)
    minutes: float = option(4.0, above=0)
    loss_memory: bool = True
    result: str = option("scaling.json", is_path=True, not_empty=True)


def main(cfg: Config, validate_only: bool = False) -> int:
    ends = time.monotonic() + 60 * cfg.minutes
    cells: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in cfg.cells}
    result: dict[str, Any] = {"machine": describe_machine(), "settings": _settings(cfg), "cells": cells}
    if cfg.loss_memory:
        result["loss_memory"] = measure_loss_memory()
    workload = Workload(cfg)
    workload.step(workload.make_microbatches(1, 64, 1))  # makes the optimizer's state
    order = sorted(cells, key=lambda name: (_in_flight(name), _shape(name)[2]))
    for name in order:
        rows, length, count = _shape(name)
        if count <= 2:  # what two microbatches hold, more do as well
            cells[name] |= _count_memory(workload, rows, length, count)
    is_first = True
    while is_first or time.monotonic() < ends:
        for name in order:
            seconds = cells[name]["seconds"]
            if not is_first and time.monotonic() + statistics.median(seconds) > ends:
                continue
            seconds.append(workload.step(workload.make_microbatches(*_shape(name))))
        _write(Path(cfg.result), result)
        if not is_first and time.monotonic() + min(cells[name]["seconds"][0] for name in order) > ends:
            break
        is_first, order = False, order[::-1]
    _write(Path(cfg.result), result)
    return 0


def _count_memory(workload: Workload, rows: int, length: int, count: int) -> dict[str, float]:
    """MiB: `live_mib` of tensors that the step makes, `resident_mib` of the whole process at its largest."""
    from optune import memory
    from scripts.bench.live_bytes import LiveBytes

    microbatches = workload.make_microbatches(rows, length, count)
    gc.collect()
    memory.give_back()
    resettable = _reset_largest_resident()
    with LiveBytes() as live:
        workload.step(microbatches)
    found = {"live_mib": round(live.peak / 2**20, 1)}
    if resettable:
        found["resident_mib"] = round(_largest_resident_mib(), 1)
    return found


def measure_loss_memory() -> list[dict[str, float]]:
    """MiB that the loss holds at its peak, for several vocabularies and numbers of tokens (bf16, width 64)."""
    import torch

    from optune import models
    from optune.loss import next_token_loss
    from optune.models.families import read_config
    from optune.types import Microbatch
    from scripts.bench.live_bytes import LiveBytes

    found = []
    for vocabulary in (8192, 32768, 131072):
        raw = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": 64,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        }  # fmt: skip
        config, problems = read_config(raw)
        if config is None:
            raise ValueError(problems)
        model = models.Decoder(config).to(torch.bfloat16)
        for tokens in (512, 2048, 8192):
            hidden_BTD = torch.randn(1, tokens, 64, dtype=torch.bfloat16).requires_grad_()
            labels_BT = torch.randint(0, vocabulary, (1, tokens))
            microbatch = Microbatch(labels_BT, labels_BT, torch.arange(tokens)[None], num_tokens=tokens)
            model.zero_grad(set_to_none=True)
            with LiveBytes() as live:
                next_token_loss(model, hidden_BTD, microbatch).backward()
            gradients = 2 * 64 * (tokens + vocabulary)
            found.append(
                {
                    "vocabulary": vocabulary,
                    "tokens": tokens,
                    "logits_mib": 4 * vocabulary * tokens / 2**20,
                    "peak_mib": round(live.peak / 2**20, 1),
                    "gradients_mib": round(gradients / 2**20, 1),
                }
            )
    return found


def _shape(name: str) -> tuple[int, int, int]:
    rows, length, count = map(int, name.split("x"))
    return rows, length, count


def _in_flight(name: str) -> int:
    rows, length, _ = _shape(name)
    return rows * length


def _settings(cfg: Config) -> dict[str, Any]:
    return {
        "model": Path(cfg.model.path).name,
        "dtype": cfg.model.dtype,
        "compile": cfg.compile,
        "activation_checkpointing": cfg.activation_checkpointing,
        "optimizer_step": cfg.optimizer_step,
    }


def _reset_largest_resident() -> bool:
    """The kernel's high-water mark of this process starts anew; False where it may not be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _largest_resident_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _write(path: Path, result: dict[str, Any]) -> None:
    import torch

    result["machine"]["threads"] = torch.get_num_threads()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
