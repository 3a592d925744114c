"""QLoRA through the recipe: resumed bit for bit, checkpoints of adapters alone, generated from, merged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optune import lora, models
from optune.export import export
from tests.lora import judges
from tests.recipes.running import Finished, assert_equal_runs, run, write_inputs
from tests.recipes.test_resume import STEPPERS, cut, resume
from tune_cli.main import main

QLORA = ("lora.quantize_base=nf4", "lora.targets=[q_proj,v_proj,down_proj]", "lora.dropout=0.3", "model.dtype=bf16")
SAVED = ("checkpoint.save_every_steps=1", "checkpoint.keep_last=null", "max_steps=5")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), rows=12)


@pytest.mark.slow
@pytest.mark.parametrize(("stepper", "cuts"), [("after_backward", (1, 4)), ("two_pass", (2,)), ("immediate", (3,))])
def test_a_resumed_run_ends_as_the_straight_one_bit_for_bit(
    config: Path, tmp_path: Path, stepper: str, cuts: tuple[int, ...]
) -> None:
    straight = run("lora_finetune", config, tmp_path / "straight", *QLORA, *SAVED, *STEPPERS[stepper])
    assert all(".lora_" in name for name in straight.weights)
    for step in cuts:
        resumed = resume(cut(straight, step, tmp_path / f"cut-{step}"))
        assert_equal_runs(resumed, straight)


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run("lora_finetune", config, tmp_path_factory.mktemp("trained") / "run", *QLORA, "optimizer.lr=0.02")


def test_the_loss_follows_that_of_the_plain_base(config: Path, trained: Finished, tmp_path: Path) -> None:
    plain = run("lora_finetune", config, tmp_path / "plain", *QLORA, "lora.quantize_base=null", "optimizer.lr=0.02")
    assert trained.losses != plain.losses
    assert trained.losses == pytest.approx(plain.losses, rel=0.05)
    assert trained.losses[-1] < trained.losses[0]


def test_the_summary_counts_weights_not_codes(config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path / 'run'}", *QLORA]
    assert main(["validate", "lora_finetune", "--config", str(config), *words]) == 0
    said = capfd.readouterr().err
    base = sum(tensor.numel() for tensor in load_file(config.parent / "m0" / "model.safetensors").values())
    adapters = 2 * 8 * (2 * 32 + 2 * 32 - 16 + 64 + 32)
    assert f"{adapters:,} trained of {base + adapters:,}" in said
    assert "bfloat16, float32, nf4 on cpu" in said


def test_generating_uses_the_base_as_it_was_in_training(config: Path, trained: Finished) -> None:
    from tune_cli import folders

    model = folders.load(folders.find(str(trained.folder)), "bf16", torch.device("cpu"))
    assert lora.is_quantized(model)
    wanted = models.outline(models.check(config.parent / "m0")).to(torch.bfloat16)
    lora.apply(wanted, rank=8, alpha=16, targets=["q_proj", "v_proj", "down_proj"], quantize_base="nf4")
    models.fill(wanted, config.parent / "m0", device="cpu")
    lora.load(wanted, trained.folder / "model")
    assert torch.equal(judges.logits(model), judges.logits(wanted))


@pytest.mark.parametrize("onto", ["stored", "trained"])
def test_merging_proves_itself_onto_either_base(config: Path, trained: Finished, tmp_path: Path, onto: str) -> None:
    base, adapter = config.parent / "m0", trained.folder / "model"
    report = export(adapter, tmp_path / "merged", merge=True, onto=onto)
    assert report.proof is not None and report.proof.layers == 6
    model = models.outline(models.check(base))
    if onto == "trained":
        lora.quantize(model.requires_grad_(False))
    models.fill(model, base, device="cpu")
    lora.load(model, adapter)
    merged = models.load(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(judges.logits(merged), judges.logits(model), rtol=1e-4, atol=1e-4)
    stored = load_file(base / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    written = load_file(tmp_path / "merged" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(written, stored) == (onto == "stored")
    assert any("nf4" in line for line in report.lines())


def test_an_adapter_of_a_plain_base_has_no_other_base_to_merge_onto(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = run("lora_finetune", config, tmp_path / "plain", "max_steps=2")
    code = main(["export", str(plain.folder), str(tmp_path / "merged"), "--merge", "--onto", "trained"])
    said = capfd.readouterr().err
    assert code == 2 and "--onto" in said and "was trained over its base as it is stored" in said
    assert not (tmp_path / "merged").exists()


def test_an_exported_adapter_still_says_what_its_base_was(trained: Finished, tmp_path: Path) -> None:
    export(trained.folder, tmp_path / "out")
    assert lora.read_quantization(tmp_path / "out") == "nf4"
    shutil.rmtree(tmp_path / "out")


def test_what_is_split_by_layers_cannot_be_quantized(config: Path) -> None:
    """The message of a layout with tensor > 1, before any weight is read."""
    from unittest import mock

    from optune.distributed import tensor_parallel
    from optune.errors import ConfigError

    model = models.outline(models.check(config.parent / "m0"))
    lora.quantize(model.requires_grad_(False))
    with pytest.raises(ConfigError, match=r"parallel.tensor: model.layers.0.self_attn.q_proj.weight is quantized"):
        tensor_parallel.apply(model, mock.Mock(size=lambda: 2))
