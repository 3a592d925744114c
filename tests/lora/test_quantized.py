"""Adapters over a base in NF4 (QLoRA): values, gradients, memory, files, and what is refused.

Judge of the values: the plain model whose weights are what the quantized ones stand for, made by torchao where shapes
allow it and by `unpack` elsewhere (`test_nf4.py` holds that the two agree).
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils import flop_counter

from optune import lora, models, optim
from optune.errors import ConfigError, ModelError
from optune.lora import nf4, operations
from tests import fixtures
from tests.lora import judges

TARGETS = ["q_proj", "v_proj", "down_proj"]


def quantized(base: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> models.Decoder:
    """The model of `base` in NF4, filled from the files, with random adapters."""
    model = models.outline(models.check(base)).to(dtype)
    lora.apply(model, **({"rank": 4, "alpha": 8, "targets": TARGETS, "quantize_base": "nf4"} | settings))
    models.fill(model, base, device="cpu")
    torch.manual_seed(0)
    lora.start(model)
    judges.randomise(model)
    return model


def unquantized(model: models.Decoder, base: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A plain model with the values that `model` stands for, and its adapters."""
    plain = models.load(base, dtype=dtype)
    with torch.no_grad():
        for name, weight in packed_weights(model).items():
            plain.get_parameter(name).copy_(weight.unpack())
    lora.apply(plain, **({"rank": 4, "alpha": 8, "targets": TARGETS} | settings))
    for name, tensor in lora.state(model).items():
        plain.get_parameter(name).data.copy_(tensor)
    return plain


def packed_weights(model: nn.Module) -> dict[str, lora.Nf4Weight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, lora.Nf4Weight)}


def gradients(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model.train()(judges.tokens()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_outputs_and_gradients_are_those_of_the_plain_model_with_the_same_values(
    tmp_path: Path, bias: bool, dropout: float
) -> None:
    base = write_base(tmp_path, bias)
    model = quantized(base, dropout=dropout)
    plain = unquantized(model, base, dropout=dropout)
    found, wanted = gradients(model), gradients(plain)
    assert found.keys() == wanted.keys() == lora.state(model).keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert torch.equal(judges.logits(model), judges.logits(plain))


def write_base(folder: Path, bias: bool = False) -> Path:
    """M0, or with biases on q, k and v a Qwen2 of its shape."""
    if not bias:
        return fixtures.write_model(folder)
    config = fixtures.model_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=True)
    tensors = fixtures.model_tensors(config)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = tensors[name].sum(1)
    base = fixtures.write_model(folder, model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=True)
    from safetensors.torch import save_file

    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


def test_the_linear_weights_of_the_blocks_are_quantized_and_nothing_else(tmp_path: Path) -> None:
    model = quantized(fixtures.write_model(tmp_path))
    names = {name.removesuffix(".weight") for name in packed_weights(model)}
    assert len(names) == 14 and all(name.startswith("model.layers.") and "_proj" in name for name in names)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        if name.removesuffix(".weight") not in names:
            assert torch.equal(model.get_parameter(name), tensor), name
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".lora_" not in name)


def test_codes_come_from_the_stored_values_whatever_the_models_dtype(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path)
    stored = load_file(base / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        for name, weight in packed_weights(quantized(base, dtype)).items():
            wanted = nf4.quantize(stored[name])
            assert all(torch.equal(a, b) for a, b in zip(weight.packed, wanted, strict=True)), name
            assert weight.unpack().dtype == dtype


def test_a_model_with_values_is_quantized_as_one_that_is_filled(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path)
    loaded = models.load(base, dtype=torch.float32)
    lora.apply(loaded, rank=4, alpha=8, targets=TARGETS, quantize_base="nf4")
    for name, weight in packed_weights(quantized(base)).items():
        others = packed_weights(loaded)[name].packed
        assert all(torch.equal(a, b) for a, b in zip(weight.packed, others, strict=True))


def test_moving_and_rounding_a_model_leaves_codes_and_scales_alone(tmp_path: Path) -> None:
    model = quantized(fixtures.write_model(tmp_path))
    before = {name: [part.clone() for part in weight.packed] for name, weight in packed_weights(model).items()}
    model.to(torch.bfloat16)
    for name, weight in packed_weights(model).items():
        assert all(torch.equal(a, b) for a, b in zip(weight.packed, before[name], strict=True))
        assert weight.unpack().dtype == torch.bfloat16
    assert model(judges.tokens()).dtype == torch.bfloat16


def test_one_dequantized_matrix_is_alive_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward, with and without checkpointing: counted by weak references."""
    model = quantized(fixtures.write_model(tmp_path, num_hidden_layers=4))
    alive: dict[int, int] = {}
    most = made = 0

    def watch(*arguments: Any) -> torch.Tensor:
        nonlocal most, made
        matrix = nf4.dequantize(*arguments)
        made += 1
        alive[made] = 1
        weakref.finalize(matrix.untyped_storage(), alive.pop, made, None)
        most = max(most, len(alive))
        return matrix

    monkeypatch.setattr(operations, "dequantize", watch)
    for kind, runs in (("none", 1), ("selective", 1), ("block", 2)):
        model.activation_checkpointing = kind  # type: ignore[assignment]
        made = 0
        model(judges.tokens()).square().mean().backward()
        gc.collect()
        assert most == 1 and not alive
        # A backward product each, but for q, k and v of the first block, whose input needs no gradient.
        assert made == 28 * runs + 28 - 3


def test_filling_never_holds_a_second_whole_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is given up before the next is read, so the model's weights never stand in memory as stored."""
    from optune.models import weights

    base = fixtures.write_model(tmp_path, num_hidden_layers=4)
    alive: dict[int, int] = {}
    count = most = 0

    def watch(stored: Any, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count, most
        tensor = read_tensor(stored, dtype)
        count += 1
        alive[count] = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), alive.pop, count, None)
        most = max(most, sum(alive.values()))
        return tensor

    read_tensor = weights.read_tensor
    monkeypatch.setattr(weights, "read_tensor", watch)
    quantized(base)
    assert count == 28
    assert most <= 2 * 64 * 32 * 4 and not alive


def test_frozen_products_make_no_weight_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = lora.Nf4Linear(nn.Linear(32, 48, bias=False))
    x = torch.randn(5, 32, requires_grad=True)
    with flop_counter.FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * 32 * 48
    assert torch.equal(x.grad, torch.ones(5, 48) @ layer.weight.unpack())  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["in_backward", "immediate", "exact"])
def test_every_way_to_step_trains_as_over_the_plain_base_with_the_same_values(tmp_path: Path, when: str) -> None:
    base = fixtures.write_model(tmp_path)
    model = quantized(base, dropout=0.2)
    plain = unquantized(model, base, dropout=0.2)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(lora.trainable(each).values(), lr=1e-2)
        more: dict[str, Any] = {"variant": "exact"} if when == "exact" else {}
        more |= {"when": "immediate"} if when != "in_backward" else {"when": when, "max_grad_norm": 0.1}
        stepper = optim.build_stepper(each, optimizer, **more)
        for step in range(3):
            for pass_index in range(stepper.passes):
                torch.manual_seed(step)
                with stepper.microbatch(True, pass_index):
                    each.train()(judges.tokens()).square().mean().backward()
            stepper.finish()
    for name, tensor in lora.state(model).items():
        torch.testing.assert_close(tensor, lora.state(plain)[name], rtol=1e-6, atol=1e-7)


def test_the_adapter_opens_in_peft_and_says_in_its_file_what_its_base_was(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    model = quantized(base)
    lora.save(model, tmp_path / "adapter", base=str(base))
    theirs = judges.open_in_peft(base, tmp_path / "adapter")
    plain = models.load(base, dtype=torch.float32)
    lora.load(plain, tmp_path / "adapter")
    torch.testing.assert_close(judges.logits(theirs), judges.logits(plain), rtol=1e-5, atol=1e-5)
    with safe_open(tmp_path / "adapter" / lora.WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "base_quantization": "nf4"}
    assert lora.read_quantization(tmp_path / "adapter") == "nf4"
    lora.save(plain, tmp_path / "plain", base=str(base))
    assert lora.read_quantization(tmp_path / "plain") is None

    again = models.outline(models.check(base))
    lora.quantize(again.requires_grad_(False))
    models.fill(again, base, device="cpu")
    lora.load(again, tmp_path / "adapter")
    assert torch.equal(judges.logits(again), judges.logits(model))


def test_an_unknown_format_of_the_base_is_refused(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    lora.save(quantized(base), tmp_path / "adapter", base=str(base))
    tensors = lora.read_tensors(tmp_path / "adapter")
    lora.write_tensors(tensors, tmp_path / "adapter", {"format": "pt", "base_quantization": "int3"})
    with pytest.raises(ModelError, match="base_quantization is 'int3', and known is nf4"):
        lora.read_quantization(tmp_path / "adapter")


def test_merging_makes_plain_layers_of_what_the_quantized_ones_stand_for(tmp_path: Path) -> None:
    model = quantized(fixtures.write_model(tmp_path))
    wanted = judges.logits(model)
    assert len(lora.merge(model)) == 6
    assert not lora.is_quantized(model) and not lora.layers(model)
    torch.testing.assert_close(judges.logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"lora.quantize_base: 'int8' is not one of null, nf4"):
        lora.apply(model, rank=4, alpha=8, targets=TARGETS, quantize_base="int8")
    with pytest.raises(ValueError, match="is trained"):
        lora.quantize(model)
    assert not lora.is_quantized(model)
