"""Low-bit optimizers, masters and stochastic rounding through the command line: one run, whenever the optimizer steps,
and whether or not it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recipes.running import Finished, assert_equal_runs, run, write_inputs
from tests.recipes.test_resume import comparable, cut, resume
from tune_cli.main import main

STOCHASTIC = ["model.dtype=bf16", "model.update_rounding=stochastic"]
MASTERS = ["model.dtype=bf16", "model.master_weights=fp32"]


def low_bit(name: str) -> list[str]:
    return [f"optimizer._target_=torchao.optim.{name}", "optimizer.lr=1e-2", "+optimizer.block_size=128"]


CELLS = {
    "stochastic": ("full_finetune", STOCHASTIC),
    "8 bit stochastic": ("full_finetune", [*STOCHASTIC, *low_bit("AdamW8bit")]),
    "4 bit, torchao's key": (
        "full_finetune",
        ["model.dtype=bf16", *low_bit("AdamW4bit"), "+optimizer.bf16_stochastic_round=true"],
    ),
    "fp8 with masters": ("full_finetune", [*MASTERS, *low_bit("AdamWFp8")]),
    "8 bit for adapters": ("lora_finetune", [*low_bit("AdamW8bit"), "lora.rank=128", "lora.dropout=0.3"]),
}
IN_BACKWARD = [
    ["optimizer_step=in_backward", "gradient_stash=hold"],
    ["optimizer_step=in_backward", "gradient_stash=cpu"],
    ["optimizer_step=in_backward", "gradient_stash=two_pass"],
]
SAVE_ALL = ["checkpoint={save_every_steps: 1, keep_last: null}", "max_steps=4"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of 4,096 elements and more, which low-bit optimizers quantise."""
    return write_inputs(
        tmp_path_factory.mktemp("inputs"), rows=8, hidden_size=64, intermediate_size=128, head_dim=16,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arithmetic without a minute of compiling."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def is_low_bit(cell: str) -> bool:
    return any("torchao" in word for word in CELLS[cell][1])


def check_state(finished: Finished, cell: str) -> None:
    state = finished.optimizer_state
    if is_low_bit(cell):
        codes = [name for name in state if name.endswith(".codes")]
        assert codes and all(state[name].element_size() == 1 for name in codes)
        assert {name.removesuffix("codes") + "scale" for name in codes} <= state.keys()
    moments = [name for name in state if name.endswith(("exp_avg", "exp_avg_sq", "momentum_buffer"))]
    assert (moments or is_low_bit(cell)) and all(state[name].dtype is torch.float32 for name in moments)
    assert any(name.endswith(".master") for name in state) == (cell == "fp8 with masters")


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_run_interrupted_and_resumed_in_backward_is_the_run_after_backward(
    cell: str, config: Path, tmp_path: Path
) -> None:
    recipe, words = CELLS[cell]
    if is_low_bit(cell):
        pytest.importorskip("torchao.optim")
    straight = run(recipe, config, tmp_path / "straight", *SAVE_ALL, *words)
    check_state(straight, cell)
    for step, mode in enumerate(IN_BACKWARD, 1):
        resumed = resume(cut(straight, step, tmp_path / f"cut-{step}"), *mode)
        assert_equal_runs(resumed, straight)
        assert comparable(resumed) == comparable(straight), step


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["8 bit stochastic", "fp8 with masters"])
def test_without_clipping_in_backward_is_after_backward_and_immediate_goes_on_exactly(
    cell: str, config: Path, tmp_path: Path
) -> None:
    recipe, words = CELLS[cell]
    if is_low_bit(cell):
        pytest.importorskip("torchao.optim")
    words = [*words, "max_grad_norm=null", *SAVE_ALL]
    after = run(recipe, config, tmp_path / "after", *words)
    assert_equal_runs(run(recipe, config, tmp_path / "in", *words, "optimizer_step=in_backward"), after)
    immediate = run(recipe, config, tmp_path / "immediate", *words, "optimizer_step=immediate")
    check_state(immediate, cell)
    assert immediate.losses[0] == after.losses[0] and immediate.losses[-1] != after.losses[-1]
    assert_equal_runs(resume(cut(immediate, 2, tmp_path / "cut")), immediate)


def said(finished: Finished) -> str:
    """The log as one line, without its clock."""
    return " ".join(line[20:].strip() for line in (finished.folder / "log.txt").read_text().splitlines())


def test_lost_updates_are_told_once_with_the_ways_out_and_not_where_none_is_lost(config: Path, tmp_path: Path) -> None:
    words = ["optimizer.lr=1e-5", "max_steps=2", "model.dtype=bf16"]
    lossy = said(run("full_finetune", config, tmp_path / "nearest", *words))
    assert lossy.count("rounds away") == 1
    for way_out in ("model.master_weights=fp32", "model.update_rounding=stochastic", "model.dtype=fp32"):
        assert way_out in lossy
    kept = said(run("full_finetune", config, tmp_path / "stochastic", *words, "model.update_rounding=stochastic"))
    assert "rounds away" not in kept
    assert "bfloat16 on cpu, updates rounded stochastically" in kept


@pytest.mark.parametrize(
    "words", [["model.dtype=bf16"], ["model.dtype=bf16", *low_bit("AdamW8bit")]], ids=["torch", "torchao"]
)
def test_rounding_of_adapters_which_are_fp32_is_refused(
    words: list[str], config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "model.update_rounding=stochastic" if len(words) == 1 else "+optimizer.bf16_stochastic_round=true"
    command = ["run", "lora_finetune", "--config", str(config), f"output_dir={tmp_path / 'run'}", *words, key]
    assert main(command) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert (
        "error: model.update_rounding: stochastic rounds bf16 weights, and every weight that is trained here is"
        in error
    )
    assert "hint: leave model.update_rounding and bf16_stochastic_round out" in error
    assert not (tmp_path / "run").exists()
