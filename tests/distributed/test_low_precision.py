"""Stochastic rounding over processes, and low-bit optimizers where they are refused: one launch of two processes."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_ranks import join, run_ranks
from tests.recipes.running import Finished, assert_equal_runs, run, write_inputs
from tune_cli.main import main

pytestmark = pytest.mark.slow

SHARED = [
    "max_grad_norm=0.5", "model.dtype=bf16", "model.update_rounding=stochastic", "max_steps=3",
    "schedule.warmup_steps=0", "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.02", "+optimizer.momentum=0.9",
]  # fmt: skip
"""SGD shows no more of the gradients' rounding than they have; updates are smaller than bf16's spacing, so it is the
random bits that decide which weights change."""
IN_BACKWARD = ["optimizer_step=in_backward", "gradient_stash=hold"]
CELLS: dict[str, list[str]] = {
    "after": [],
    "in": IN_BACKWARD,
    "breadth": [*IN_BACKWARD, "gradient_accumulation_steps=2", "accumulation=breadth_first", "batch_size=1"],
    "replicate": ["parallel.replicate=2"],
    "tensor": ["parallel.tensor=2", "batch_size=4"],
    "immediate": ["optimizer_step=immediate", "max_grad_norm=null"],
}
LOW_BIT = ["optimizer._target_=torchao.optim.AdamW8bit", "optimizer.lr=1e-3", "max_steps=2"]


def run_all(commands: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    join()
    torch.compile = lambda function, **_: function  # torchao's step, without a minute of compiling
    seen = {}
    for name, words in commands.items():
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            seen[name] = main(words), errors.getvalue()
    return seen


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), rows=12, hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="module")
def two(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[int, str]]]]:
    folder = tmp_path_factory.mktemp("two")
    start = ["run", "full_finetune", "--config", str(config)]
    commands = {name: [*start, f"output_dir={folder / name}", *SHARED, *words] for name, words in CELLS.items()}
    run("full_finetune", config, folder / "going on", *SHARED, "batch_size=4", "max_steps=1")
    commands["going on"] = ["resume", str(folder / "going on"), "batch_size=2", "max_steps=3"]
    for name, words in {"8 bit": [], "8 bit immediate": ["optimizer_step=immediate", "max_grad_norm=null"]}.items():
        commands[name] = [*start, f"output_dir={folder / name}", *SHARED[:3], *LOW_BIT, *words]
    return folder, run_ranks(run_all, 2, commands, timeout_s=1200)


def other_share(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The share of elements that differ."""
    assert ours.keys() == theirs.keys()
    different = sum(int((tensor != theirs[name]).sum()) for name, tensor in ours.items())
    return different / sum(tensor.numel() for tensor in ours.values())


Two = tuple[Path, list[dict[str, Any]]]


def test_two_processes_round_as_one_does(config: Path, two: Two, tmp_path: Path) -> None:
    """But for elements whose values, summed in another order, fall to the other side; other bits change more."""
    folder, _ = two
    one = run("full_finetune", config, tmp_path / "one", *SHARED, "batch_size=4")
    immediate = run("full_finetune", config, tmp_path / "at once", *SHARED, *CELLS["immediate"], "batch_size=4")
    other = run("full_finetune", config, tmp_path / "seed", *SHARED, "batch_size=4", "seed=4", "data.shuffle=false")
    same_rows = run("full_finetune", config, tmp_path / "rows", *SHARED, "batch_size=4", "data.shuffle=false")
    by_chance = other_share(other.weights, same_rows.weights)
    shares = {
        name: other_share(Finished(folder / name).weights, (immediate if name == "immediate" else one).weights)
        for name in [*CELLS, "going on"]
    }
    assert by_chance > 0.02
    assert max(shares.values()) < 0.2 * by_chance, (shares, by_chance)


def test_on_the_same_layout_in_backward_is_bitwise_after_backward(two: Two) -> None:
    folder, _ = two
    assert_equal_runs(Finished(folder / "in"), Finished(folder / "after"))


def test_low_bit_state_of_shards_is_refused_and_whole_weights_take_it(two: Two) -> None:
    pytest.importorskip("torchao.optim")
    folder, ranks = two
    for seen in ranks:
        code, errors = seen["8 bit"]
        assert code == 2
        assert "AdamW8bit keeps low-bit state, which is not divided among processes" in " ".join(errors.split())
        assert "optimizer_step=immediate" in errors
        assert seen["8 bit immediate"][0] == 0
    assert not (folder / "8 bit").exists()
    state = Finished(folder / "8 bit immediate").optimizer_state
    assert any(name.endswith(".codes") for name in state)
