"""Adapter folders cross over to PEFT and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optune import lora
from optune.errors import ConfigError, ModelError
from tests import fixtures
from tests.lora import judges
from tests.lora.judges import ATTENTION

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def ours(base: Path, **settings: Any) -> Any:
    model = judges.base_model(base)
    lora.apply(model, **({"rank": 4, "alpha": 8, "targets": ATTENTION} | settings))
    judges.randomise(model)
    return model


def written_by_peft(tmp_path: Path, **settings: Any) -> tuple[Path, torch.Tensor]:
    """An adapter folder from PEFT, and the logits of PEFT's model."""
    model = judges.peft_model(tmp_path / "base", **settings)
    with judges.quiet():
        model.save_pretrained(str(tmp_path / "theirs"))
    return tmp_path / "theirs", judges.logits(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"targets": "all-linear", "use_rslora": True, "rank": 3, "alpha": 5.5},
        {"targets": ["layers.1.*", "q_proj"], "dropout": 0.25},
        {"targets": ["lm_head", "down_proj"]},
    ],
    ids=str,
)
def test_peft_opens_our_adapter_with_every_tensor_and_the_same_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = ours(tmp_path / "base", **settings)
    lora.save(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = judges.open_in_peft(tmp_path / "base", tmp_path / "adapter")
    assert len([name for name, _ in theirs.named_parameters() if "lora_A.default" in name]) == len(lora.layers(model))
    torch.testing.assert_close(judges.logits(model), judges.logits(theirs), rtol=1e-5, atol=1e-5)
    config = theirs.peft_config["default"]
    assert config.base_model_name_or_path == str(tmp_path / "base")
    assert config.lora_dropout == settings.get("dropout", 0.0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 9},
        {"lora_dropout": 0.3},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.layers\.1\..*(q|v)_proj"},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.k_proj": 7}, "alpha_pattern": {"^model.layers.0.*": 32}},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_we_open_pefts_adapter_with_the_same_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder, wanted = written_by_peft(tmp_path, **settings)
    model = judges.base_model(tmp_path / "base")
    names = lora.load(model, folder)
    assert list(lora.layers(model)) == names
    assert len(names) == len(load_file(folder / lora.WEIGHTS_FILE)) // 2
    assert all(layer.dropout == settings.get("lora_dropout", 0.0) for layer in lora.layers(model).values())
    torch.testing.assert_close(judges.logits(model), wanted, rtol=1e-5, atol=1e-5)
    lora.save(model, tmp_path / "again", base="x")
    theirs = judges.logits(judges.open_in_peft(tmp_path / "base", tmp_path / "again"))
    torch.testing.assert_close(theirs, wanted, rtol=1e-5, atol=1e-5)


def test_saved_adapter_loads_bit_equal_into_a_new_and_an_adapted_model(tmp_path: Path) -> None:
    model = ours(tmp_path / "base", dropout=0.5)
    lora.save(model, tmp_path / "adapter", base="x")
    fresh, adapted = judges.base_model(tmp_path / "base"), judges.base_model(tmp_path / "base")
    lora.load(fresh, tmp_path / "adapter")
    lora.apply(adapted, rank=4, alpha=8, targets=ATTENTION, dropout=0.1)
    lora.load(adapted, tmp_path / "adapter")
    for other, dropout in ((fresh, 0.5), (adapted, 0.1)):
        assert all(torch.equal(tensor, lora.state(other)[name]) for name, tensor in lora.state(model).items())
        assert {layer.dropout for layer in lora.layers(other).values()} == {dropout}
        assert set(lora.trainable(other)) == set(lora.state(model))


def test_a_snapshot_is_written_in_place_of_what_training_has_changed_since(tmp_path: Path) -> None:
    model = ours(tmp_path / "base")
    snapshot = {name: tensor.clone() for name, tensor in lora.state(model).items()}
    for parameter in lora.trainable(model).values():
        parameter.data += 1
    lora.save(model, tmp_path / "adapter", base="x", tensors=snapshot)
    written = load_file(tmp_path / "adapter" / lora.WEIGHTS_FILE)
    assert set(written) == {f"base_model.model.{name}" for name in snapshot}
    assert all(torch.equal(written[f"base_model.model.{name}"], tensor) for name, tensor in snapshot.items())


def test_bf16_adapter_becomes_fp32_unless_asked(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path)
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(folder / lora.WEIGHTS_FILE).items()}
    save_file(tensors, folder / lora.WEIGHTS_FILE)
    for dtype in (torch.float32, torch.bfloat16):
        model = judges.base_model(tmp_path / "base", torch.bfloat16)
        lora.load(model, folder, dtype=dtype)
        assert {tensor.dtype for tensor in lora.state(model).values()} == {dtype}
        assert torch.equal(lora.state(model)[Q0.removeprefix("base_model.model.") + ".lora_A.weight"],
                           tensors[f"{Q0}.lora_A.weight"].to(dtype))  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora is True: cannot be honoured"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type is 'SEQ_2_SEQ_LM'"),
    ],
    ids=str,
)
def test_what_peft_says_and_we_cannot_honour_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    from peft import LoraConfig

    LoraConfig(**settings).save_pretrained(str(tmp_path / "theirs"))
    judges.edit_json(tmp_path / "theirs" / lora.CONFIG_FILE, lambda config: config.update(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match=re.escape(said)) as caught:
        lora.load(judges.base_model(tmp_path / "base"), tmp_path / "theirs")
    assert caught.value.where == str(tmp_path / "theirs" / lora.CONFIG_FILE)


def test_every_objection_to_a_config_is_in_one_error(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path)
    wrong = {"peft_type": "IA3", "r": 0, "lora_alpha": "x", "target_modules": "(", "use_dora": True, "not_known": 3}
    judges.edit_json(folder / lora.CONFIG_FILE, lambda config: config.update(wrong))
    with pytest.raises(ModelError) as caught:
        lora.read_config(folder)
    assert all(f"{key} is {value!r}" in str(caught.value) for key, value in wrong.items())


@pytest.mark.parametrize("text", ["", "{", "[]", None], ids=str)
def test_an_unreadable_config_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / lora.CONFIG_FILE).write_text(text)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        lora.read_config(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path)
    tensors = load_file(folder / lora.WEIGHTS_FILE)
    del tensors[f"{Q0}.lora_A.weight"]
    tensors[f"{Q0}.lora_B.weight"] = torch.zeros(32, 5)
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    save_file(tensors, folder / lora.WEIGHTS_FILE)
    model = judges.base_model(tmp_path / "base")
    with pytest.raises(ModelError) as caught:
        lora.load(model, folder)
    assert f"{Q0}.lora_A.weight is missing, [4, 32] wanted" in str(caught.value)
    assert f"{Q0}.lora_B.weight is [32, 5], [32, 4] wanted" in str(caught.value)
    assert "layers.7.self_attn.q_proj.lora_A.weight is unexpected" in str(caught.value)
    assert not lora.layers(model)


@pytest.mark.parametrize("damage", ["absent", "pickled", "cut"])
def test_a_missing_or_damaged_weights_file_is_named(tmp_path: Path, damage: str) -> None:
    folder, _ = written_by_peft(tmp_path)
    weights = folder / lora.WEIGHTS_FILE
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "pickled":
        weights.rename(folder / "adapter_model.bin")
    else:
        weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors") as caught:
        lora.load(judges.base_model(tmp_path / "base"), folder)
    assert (caught.value.hint is not None) == (damage == "pickled")


def test_an_adapter_for_layers_that_are_not_there_is_refused(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path)
    judges.edit_json(folder / lora.CONFIG_FILE, lambda config: config.update(target_modules=["c_attn"]))
    with pytest.raises(ModelError, match=r"\['c_attn'\] match no linear layer"):
        lora.load(judges.base_model(tmp_path / "base"), folder)


def test_an_adapter_on_a_tied_head_is_refused(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path, target_modules=["lm_head"])
    tied = judges.base_model(fixtures.write_model(tmp_path / "tied", tie_word_embeddings=True))
    tensors = load_file(folder / lora.WEIGHTS_FILE)
    save_file({k: v for k, v in tensors.items() if "lora_" in k}, folder / lora.WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"lm_head shares its weight with model\.embed_tokens"):
        lora.load(tied, folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targets": ["q_proj"]}, "unexpected|file only"),
        ({"targets": [*ATTENTION, "up_proj"]}, "up_proj has an adapter in the model only"),
        ({"alpha": 9}, "has rank 4, alpha 9, use_rslora False in the model and rank 4, alpha 8"),
        ({"use_rslora": True}, "use_rslora True in the model"),
        ({"rank": 5}, "has rank 5, alpha 8, use_rslora False in the model and rank 4"),
    ],
    ids=str,
)
def test_values_for_other_adapters_than_the_models_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    folder, _ = written_by_peft(tmp_path)
    model = ours(tmp_path / "base", **settings)
    before = {name: tensor.clone() for name, tensor in lora.state(model).items()}
    with pytest.raises(ModelError, match=said):
        lora.load(model, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in lora.state(model).items())


def test_a_grown_vocabulary_beside_the_adapter_says_resize_first(tmp_path: Path) -> None:
    """PEFT saves embedding and head with an adapter whose model was resized."""
    fixtures.write_model(tmp_path / "base")
    from peft import LoraConfig, get_peft_model

    base = judges.base_model(tmp_path / "base")
    base.resize_token_embeddings(len(fixtures.VOCABULARY) + 1)
    with judges.quiet():
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=True)
    with pytest.raises(ModelError, match="resize the base model first") as caught:
        lora.load(judges.base_model(tmp_path / "base"), tmp_path / "theirs")
    size = len(fixtures.VOCABULARY)
    assert f"embed_tokens.weight is [{size + 1}, 32] but the base's is [{size}, 32]" in str(caught.value)


def test_changed_base_weights_beside_an_adapter_are_refused_not_lost(tmp_path: Path) -> None:
    folder, _ = written_by_peft(tmp_path, target_modules=["lm_head"])
    tensors = load_file(folder / lora.WEIGHTS_FILE)
    key = "base_model.model.lm_head.base_layer.weight"
    assert key in tensors  # as PEFT writes it; equal to the base's, it is accepted (see above)
    save_file(tensors | {key: tensors[key] + 1}, folder / lora.WEIGHTS_FILE)
    with pytest.raises(ModelError, match=re.escape(f"{key} differs from the base's")):
        lora.load(judges.base_model(tmp_path / "base"), folder)
