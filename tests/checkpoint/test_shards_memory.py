"""A rank takes the memory of its shard: loading a model and its optimizer's state, copying and saving them.

Counted is anonymous memory of the process (RssAnon), looked at all the time by a thread: weights, state and copies
are nothing else on a CPU. One process does the same, and is the measure.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from optune import checkpoint, models
from tests import fixtures
from tests.checkpoint import spread
from tests.distributed_ranks import join, run_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
"""16.7 million weights, 67 MB in fp32, 4.1 million of them in the embedding."""


def rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@contextmanager
def peak_over(figures: dict[str, float], name: str) -> Iterator[None]:
    """The largest memory inside, over that before, in MB; and what has stayed, as `name stays`."""
    gc.collect()
    before = highest = rss()
    over = threading.Event()

    def look() -> None:
        nonlocal highest
        while not over.wait(0.0005):
            highest = max(highest, rss())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        gc.collect()
        figures[name] = (max(highest, rss()) - before) / 1e6
        figures[f"{name} stays"] = (rss() - before) / 1e6


def measure(folder: str, base: str, sizes: tuple[int, int, int] | None) -> dict[str, float]:
    """Loads, saves in the background and resumes, as one process or as one of several."""
    figures: dict[str, float] = {}
    run_dir = Path(folder)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    rank, group = 0, None
    if sizes is not None:
        rank = join()
        group = torch.distributed.new_group(backend="gloo")
        spread.spread(spread.outline(Path(base), torch.float32), sizes)  # What torch imports and keeps for itself.
        group.barrier().wait()
    with peak_over(figures, "loading"):
        if sizes is None:
            model = models.load(base, dtype=torch.float32)
        else:
            model = spread.spread(spread.outline(Path(base), torch.float32), sizes)
            models.fill(model, base, device="cpu")
    optimizer = make_adam(model)
    with peak_over(figures, "saving"):
        saver = checkpoint.Saver(
            run_dir,
            write_model=lambda to, tensors: models.save(tensors, to, source=Path(base), rank=rank),
            model_tensors=model.state_dict(),
            optimizer=optimizer,
            named_parameters=model.named_parameters(),
            group=group,
        )
        saver.save(1, {})
        newest = saver.wait()
    assert newest is not None
    assert saver.reports[-1].copied_bytes
    # The first optimizer and the copies stay: what they left behind would be used again, and not be seen.
    fresh = torch.optim.AdamW(model.parameters(), foreach=False)
    with peak_over(figures, "resuming"):
        checkpoint.load_optimizer(fresh, model.named_parameters(), newest)
    del saver, optimizer
    return figures


def make_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        state = {key: torch.ones_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    return optimizer


@pytest.mark.slow
def test_a_rank_of_two_takes_little_more_than_half_the_memory_of_one_process(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", **SHAPE)
    size = (base / "model.safetensors").stat().st_size / 1e6
    assert 50 < size < 100
    (one,) = run_ranks(measure, 1, str(tmp_path / "one"), str(base), None)
    two = run_ranks(measure, 2, str(tmp_path / "two"), str(base), (1, 2, 1))
    assert one["loading"] >= 0.9 * size  # The measure measures.
    assert one["saving"] >= 0.9 * 3 * size
    assert one["resuming stays"] >= 0.9 * 2 * size
    assert not checkpoint.compare(*(tmp_path / runs / "checkpoints" / "step-000001" for runs in ("one", "two")))
    for figures in two:
        for name in ("loading", "saving", "saving stays", "resuming", "resuming stays"):
            assert figures[name] <= 0.6 * one[name], (name, one, two)
