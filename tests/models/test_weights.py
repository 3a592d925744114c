"""Reading weights: every wrong tensor is named at once, tied heads load as in transformers, memory holds one copy."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from optune import models
from optune.errors import ModelError
from tests import fixtures

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS_BT = torch.tensor([[0, 7, 8, 30, 31, 44]])
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder: Path, **overrides: Any) -> Path:
    fixtures.write_model(folder, **overrides)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        models.check(folder)
    with pytest.raises(ModelError) as again:
        models.load(folder, dtype=torch.float32)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def assert_like_transformers(folder: Path) -> models.Decoder:
    model = models.load(folder, dtype=torch.float32)
    judge = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(model(TOKENS_BT), judge(TOKENS_BT).logits, rtol=0, atol=1e-5)
    return model


def test_missing_unexpected_and_misshapen_tensors_are_listed_all_at_once(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(32, 31)
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(32)

    rewrite(folder, change)
    text = refusal(folder)
    for line in (
        "missing tensor model.layers.0.mlp.up_proj.weight, shape [64, 32]",
        "missing tensor model.norm.weight, shape [32]",
        "unexpected tensor model.layers.1.self_attn.q_proj.bias, shape [32]",
        "unexpected tensor model.layers.2.input_layernorm.weight, shape [32]",
        "misshapen tensor model.layers.1.self_attn.q_proj.weight: the file has [32, 31], the config says [32, 32]",
    ):
        assert f"\n  {line}" in text
    assert "5 things are wrong" in text


def test_leftovers_of_older_versions_are_ignored(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert_like_transformers(folder)


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_a_tied_model_loads_like_transformers_whichever_of_the_two_is_stored(tmp_path: Path, stored: str) -> None:
    folder = fixtures.write_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, Tensor]) -> None:
        if stored != "embedding":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        if stored == "head":
            del tensors[EMBEDDING]

    rewrite(folder, change)
    model = assert_like_transformers(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    """transformers 5 unties such a model with a warning, transformers 4 and vLLM drop the head."""
    folder = fixtures.write_model(tmp_path, tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING] + (torch.arange(80) == 79)[:, None]}))
    text = refusal(folder)
    assert "tie_word_embeddings is True, but lm_head.weight and model.embed_tokens.weight" in text
    with pytest.raises(ModelError) as caught:
        models.check(folder)
    assert caught.value.hint is not None and "tie_word_embeddings to false" in caught.value.hint


def test_an_untied_model_keeps_equal_tensors_apart(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    model = assert_like_transformers(folder)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_an_untied_model_without_a_head_is_refused_where_transformers_would_invent_one(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    rewrite(folder, lambda t: t.pop(HEAD))
    assert "missing tensor lm_head.weight, shape [80, 32]" in refusal(folder)
    with pytest.raises(ModelError) as caught:
        models.check(folder)
    assert caught.value.hint is not None and "tie_word_embeddings to true" in caught.value.hint


def test_shards_load_like_transformers(tmp_path: Path) -> None:
    assert_like_transformers(write_shards(tmp_path))


def test_a_missing_shard_and_a_damaged_one_are_both_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    (folder / FIRST).unlink()
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-7])
    text = refusal(folder)
    assert f"{FIRST}: the file is missing" in text
    assert f"{SECOND}: the file is damaged or cut short" in text


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard == SECOND)
    index["weight_map"][name] = FIRST
    file.write_text(json.dumps(index))
    assert f"tensor {name} is not in {FIRST}" in refusal(folder)
    index["weight_map"][name] = "../elsewhere.safetensors"
    file.write_text(json.dumps(index))
    assert "'../elsewhere.safetensors' is not the name of a file in the folder" in refusal(folder)
    file.write_text("{}")
    assert "weight_map is missing or empty" in refusal(folder)


def test_a_tensor_stored_twice_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    name = next(iter(first))
    save_file(second | {name: first[name]}, folder / SECOND)
    assert f"tensor {name} is stored twice, in {FIRST} and {SECOND}" in refusal(folder)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "longer", "offsets"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    file = fixtures.write_model(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    damaged = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "cut": content[:-100],
        "longer": content + b"xx",
        "offsets": content[:8] + content[8 : 8 + length].replace(b"[0,", b"[4,") + content[8 + length :],
    }
    file.write_bytes(damaged[damage])
    assert "model.safetensors: the file is damaged or cut short" in refusal(tmp_path)


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch boom'\ntR.")
    text = refusal(folder)
    assert "pytorch_model.bin: pickled weights are not read" in text


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "there is neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    assert "tensor model.norm.weight holds I8; known are F64, F32, F16, BF16" in refusal(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_once_to_the_wanted_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    folder = fixtures.write_model(tmp_path, dtype=stored)
    model = models.load(folder, dtype=wanted)
    for name, tensor in load_file(folder / "model.safetensors").items():
        loaded = model.get_parameter(name)
        assert loaded.dtype == wanted and loaded.requires_grad
        assert torch.equal(loaded, tensor.to(wanted)), name


def test_each_weight_has_memory_of_its_own_and_the_file_may_go(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    # Clones, because safetensors maps the file: cutting it short would be a bus error for the mapped tensors.
    expected = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = models.load(folder, dtype=torch.float32)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
    (folder / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in expected.items())
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_bad_model_is_refused_before_any_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fixtures.write_model(tmp_path)
    rewrite(folder, lambda t: t.pop("model.norm.weight"))

    def read_tensor(*args: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("optune.models.weights.read_tensor", read_tensor)
    assert "missing tensor model.norm.weight" in refusal(folder)
