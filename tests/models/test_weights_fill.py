"""A model that is there already, or only as an outline, gets the weights of a folder. Judge: `load`, and the files.

What many processes do with it stands in tests/checkpoint/test_shards.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optune import lora, models
from optune.errors import ModelError
from tests import fixtures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_an_outline_filled_from_a_folder_is_the_model_that_load_gives(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    base = fixtures.write_model(tmp_path, tie_word_embeddings=tied)
    expected = models.load(base, dtype=dtype)
    model = models.outline(models.check(base)).to(dtype)
    model.register_buffer("numbers", torch.arange(3.0))
    models.fill(model, base, device="cpu")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
        assert model.get_parameter(name).dtype == dtype
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.get_buffer("numbers"), torch.arange(3.0))
    tokens_BT = torch.tensor([[0, 7, 8, 30]])
    assert torch.equal(model(tokens_BT), expected(tokens_BT))


def test_a_model_with_memory_is_filled_in_place(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path / "one", seed=1), dtype=torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    other = fixtures.write_model(tmp_path / "other", seed=2)
    models.fill(model, other, device="cpu")
    stored = load_file(other / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name]
        assert torch.equal(parameter, stored[name]), name


def test_adapters_of_an_outline_are_nan_until_they_start_as_apply_starts_them(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path)
    expected = models.load(base, dtype=torch.bfloat16)
    torch.manual_seed(3)
    lora.apply(expected, rank=4, alpha=8, targets=["q_proj", "down_proj"])
    model = models.outline(models.check(base)).to(torch.bfloat16)
    lora.apply(model, rank=4, alpha=8, targets=["q_proj", "down_proj"])
    models.fill(model, base, device="cpu")
    assert all(tensor.isnan().all() for tensor in lora.state(model).values())
    torch.manual_seed(3)
    lora.start(model)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
        assert model.get_parameter(name).requires_grad == parameter.requires_grad


def test_the_folder_of_another_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path / "own"), dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    other = fixtures.write_model(tmp_path / "other", intermediate_size=48, num_hidden_layers=3)
    with pytest.raises(ModelError) as caught:
        models.fill(model, other, device="cpu")
    assert "the folder holds another model" in str(caught.value)
    assert "misshapen tensor model.layers.0.mlp.up_proj.weight: the file has [48, 32]" in str(caught.value)
    assert "unexpected tensor model.layers.2.input_layernorm.weight" in str(caught.value)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_head_stored_beside_a_tied_embedding_is_compared_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optune.shards.stored._PIECE", 100)
    base = fixtures.write_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, base / "model.safetensors")
    models.check(base)
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, base / "model.safetensors")
    with pytest.raises(ModelError, match="both stored and differ"):
        models.check(base)
