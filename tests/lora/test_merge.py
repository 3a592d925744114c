from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optune import lora, models
from tests import fixtures
from tests.lora import judges


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype != torch.float32 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.1, 1e-4])
def test_merged_weight_is_the_fp32_sum_rounded_once(tmp_path: Path, dtype: torch.dtype, size: float) -> None:
    """Bit for bit, also where a delta is smaller than a rounding step of the base."""
    model = judges.base_model(fixtures.write_model(tmp_path, dtype=dtype), dtype)
    lora.apply(model, rank=4, alpha=6, targets="all-linear", use_rslora=True)
    judges.randomise(model)
    for layer in lora.layers(model).values():
        layer.lora_B.weight.data *= size
    wanted = {
        name: (layer.weight.float() + 3.0 * (layer.lora_B.weight.float() @ layer.lora_A.weight.float())).to(dtype)
        for name, layer in lora.layers(model).items()
    }
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if "lora_" not in name}
    assert lora.merge(model) == list(wanted)
    after = dict(model.named_parameters())
    assert set(after) == set(before)
    for name, parameter in after.items():
        expected = wanted.get(name.removesuffix(".weight"), before[name])
        assert parameter.dtype == dtype
        assert torch.equal(bits(parameter.data), bits(expected)), name


def test_a_merge_in_low_precision_would_lose_what_this_one_keeps(tmp_path: Path) -> None:
    """B·A rounded to bf16 before it is added gives other bits: the merge does not do that."""
    model = judges.base_model(tmp_path, torch.bfloat16)
    lora.apply(model, rank=4, alpha=6, targets="q_proj")
    judges.randomise(model)
    layer = next(iter(lora.layers(model).values()))
    careless = layer.weight + ((layer.lora_B.weight @ layer.lora_A.weight) * layer.scale).bfloat16()
    assert not torch.equal(layer.merged_weight(), careless)


def test_merging_puts_plain_layers_back_with_the_same_logits(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    lora.apply(model, rank=4, alpha=8, dropout=0.5, targets=["all-linear", "lm_head"])
    judges.randomise(model)
    wanted = judges.logits(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if "lora_" not in name}
    lora.merge(model)
    assert not lora.layers(model)
    assert type(model.lm_head) is nn.Linear
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    torch.testing.assert_close(judges.logits(model), wanted, rtol=1e-5, atol=1e-5)


def test_merged_logits_are_those_of_pefts_merge(tmp_path: Path) -> None:
    theirs = judges.peft_model(tmp_path / "base")
    with judges.quiet():
        theirs.save_pretrained(str(tmp_path / "adapter"))
        judge = theirs.merge_and_unload()
    model = judges.base_model(tmp_path / "base")
    lora.load(model, tmp_path / "adapter")
    lora.merge(model)
    torch.testing.assert_close(judges.logits(model), judges.logits(judge), rtol=1e-5, atol=1e-5)
    assert lora.merge(model) == []


def test_biases_survive_the_swap_and_the_merge() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False)).eval()
    lora.apply(model, rank=2, alpha=4, targets="all-linear")
    judges.randomise(model)
    x = torch.randn(3, 8)
    wanted = model(x)
    bias = model[0].bias
    lora.merge(model)
    assert model[0].bias is bias
    assert model[1].bias is None
    assert not model[0].training
    torch.testing.assert_close(model(x), wanted)
