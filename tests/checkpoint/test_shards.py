"""Several processes write the very files that one process writes, and read them again in any other layout.

Judges: the files that one process has written, and torch's own cutting and putting together of DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optune import checkpoint, files, lora, models
from tests import fixtures
from tests.checkpoint import spread
from tests.distributed_ranks import join, run_ranks

OWN_TO_EACH_SAVE = {"optune/progress.json", "optune/manifest.json"}
"""They hold the time of the save."""

SEED = 5
SHAPE: dict[str, Any] = {"vocab_size": 74, "num_hidden_layers": 2}
"""74 words: no even number of rows for 4 processes."""


def save(run_dir: Path, base: Path, model: models.Decoder, *, rank: int = 0, group: Any = None) -> Path:
    """A checkpoint of all weights in several files, and of filled optimizer state."""

    def write_model(folder: Path) -> None:
        models.save(model.state_dict(), folder, source=base, max_shard_bytes=30_000, rank=rank)  # pyright: ignore

    optimizer = spread.make_optimizer(model, filled=True)
    return checkpoint.save(
        run_dir, step=7, write_model=write_model, optimizer=optimizer, named_parameters=model.named_parameters(),
        progress={}, group=group,
    )  # fmt: skip


def save_adapters(run_dir: Path, base: Path, model: models.Decoder, *, rank: int = 0, group: Any = None) -> Path:
    def write_model(folder: Path) -> None:
        lora.save(model, folder, base=str(base), rank=rank)

    optimizer = spread.make_optimizer(model, filled=True)
    return checkpoint.save(
        run_dir, step=7, write_model=write_model, optimizer=optimizer, named_parameters=model.named_parameters(),
        progress={}, group=group,
    )  # fmt: skip


def sums(folder: Path) -> dict[str, str]:
    found = {path.relative_to(folder).as_posix(): files.hash_file(path) for path in files.walk(folder)}
    return {name: found[name] for name in found.keys() - OWN_TO_EACH_SAVE}


def make_case(folder: Path, *, tied: bool, dtype: torch.dtype) -> Path:
    """A base model, and what one process saves of it: all weights, and adapters."""
    base = fixtures.write_model(folder / "base", tie_word_embeddings=tied, **SHAPE)
    save(folder / "one", base, models.load(base, dtype=dtype))
    adapted = models.load(base, dtype=dtype)
    torch.manual_seed(SEED)
    lora.apply(adapted, **spread.ADAPTERS)
    save_adapters(folder / "one_adapted", base, adapted)
    return folder


CASES = [("fp32", layout) for layout in spread.LAYOUTS] + [("bf16", "shard"), ("bf16", "shard x tensor")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIED = {"fp32": False, "bf16": True}
"""bf16 weights have fp32 masters in the optimizer, and here a head that is the embedding."""


def try_layouts(folder: str) -> list[str]:
    """In each of four processes: everything that is wrong."""
    rank = join()
    group = torch.distributed.new_group(backend="gloo")
    faults = []
    for name, layout in CASES:
        case, sizes = Path(folder) / name, spread.LAYOUTS[layout]
        found = _faults_of_model(case, sizes, DTYPES[name], TIED[name], rank, group, layout)
        faults += [f"{layout}, {name}: {fault}" for fault in found]
        if name == "fp32" and layout != "tensor":
            found = _faults_of_adapters(case, sizes, rank, group, layout)
            faults += [f"{layout}, adapters: {fault}" for fault in found]
    return faults


def _faults_of_model(
    case: Path, sizes: tuple[int, int, int], dtype: torch.dtype, tied: bool, rank: int, group: Any, layout: str
) -> Iterator[str]:
    base, one = case / "base", models.load(case / "base", dtype=dtype)
    model = spread.spread(spread.outline(base, dtype), sizes)
    models.fill(model, base, device="cpu")
    for name, parameter in model.named_parameters():
        if not torch.equal(spread.bits(spread.whole(parameter)), spread.bits(one.get_parameter(name))):
            yield f"{name} is not what is stored"
    if (model.lm_head.weight is model.model.embed_tokens.weight) != tied:
        yield "head and embedding are tied otherwise"
    written = save(case / layout, base, model, rank=rank, group=group)
    if sums(written) != sums(case / "one" / "checkpoints" / "step-000007"):
        yield f"{written} is not what one process writes"
    if rank == 0:
        yield from checkpoint.check(written)
    optimizer = spread.make_optimizer(model, filled=False)
    checkpoint.load_optimizer(optimizer, model.named_parameters(), case / "one" / "checkpoints" / "step-000007")
    yield from spread.wrong_state(model, optimizer)


def _faults_of_adapters(case: Path, sizes: tuple[int, int, int], rank: int, group: Any, layout: str) -> Iterator[str]:
    base, one = case / "base", case / "one_adapted" / "checkpoints" / "step-000007"
    model = spread.spread(spread.outline(base, torch.float32, adapted=True), sizes)
    models.fill(model, base, device="cpu")
    torch.manual_seed(SEED)
    lora.start(model)
    written = save_adapters(case / f"{layout} adapted", base, model, rank=rank, group=group)
    if sums(written) != sums(one):
        yield f"{written} is not what one process writes"
    optimizer = spread.make_optimizer(model, filled=False)
    checkpoint.load_optimizer(optimizer, model.named_parameters(), one)
    yield from spread.wrong_state(model, optimizer)
    with torch.no_grad():
        for tensor in lora.state(model).values():
            tensor.zero_()
    lora.load(model, one)
    stored = lora.read_tensors(one)
    for name, tensor in lora.state(model).items():
        if not torch.equal(spread.whole(tensor), stored[f"base_model.model.{name}"]):
            yield f"{name} was not loaded"


@pytest.mark.slow
def test_every_layout_writes_what_one_process_writes_and_reads_it_bit_for_bit(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        make_case(tmp_path / name, tied=TIED[name], dtype=dtype)
    faults = run_ranks(try_layouts, 4, str(tmp_path))
    assert not any(faults), "\n".join(line for found in faults for line in found)
    # And back: what many have written is a checkpoint of one process.
    for name, layout in CASES:
        (written,) = (tmp_path / name / layout / "checkpoints").iterdir()
        model = models.load(written, dtype=DTYPES[name])
        optimizer = spread.make_optimizer(model, filled=False)
        checkpoint.load_optimizer(optimizer, model.named_parameters(), written)
        assert not list(spread.wrong_state(model, optimizer))
        assert not checkpoint.compare(written, tmp_path / name / "one" / "checkpoints" / "step-000007")
