"""What is saved opens elsewhere and here again: one file or shards, tied or not, with all that stood beside it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from optune import models
from optune.errors import ModelError
from tests import fixtures

TOKENS_BT = torch.tensor([[0, 7, 8, 30, 31, 44]])
WHOLE, IN_TWO = 5_000_000_000, 60_000


def train_one_step(model: models.Decoder) -> models.Decoder:
    model(TOKENS_BT).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= parameter.grad
    return model


@pytest.mark.parametrize("max_shard_bytes", [WHOLE, IN_TWO])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_opens_in_transformers_with_nothing_missing_and_here_again(
    tmp_path: Path, tied: bool, max_shard_bytes: int
) -> None:
    """Case A40, below the command line."""
    base = fixtures.write_model(tmp_path / "base", tie_word_embeddings=tied)
    model = train_one_step(models.load(base, dtype=torch.float32))
    out = tmp_path / "out"
    models.save(model, out, source=base, max_shard_bytes=max_shard_bytes)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == (
        ["model.safetensors"] if max_shard_bytes == WHOLE else [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    )
    judge, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(judge(TOKENS_BT).logits, model(TOKENS_BT), rtol=0, atol=1e-5)
    again = models.load(out, dtype=torch.float32)
    assert all(torch.equal(parameter, again.get_parameter(name)) for name, parameter in model.named_parameters())
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "w1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s><turn>user\nw1<end>\n"


def test_the_index_lists_exactly_the_tensors_of_the_shards(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", tie_word_embeddings=True)
    models.save(models.load(base, dtype=torch.float32), tmp_path / "out", source=base, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            stored |= dict.fromkeys(tensors.keys(), file.name)
        assert file.stat().st_size < 20_000 + 2_000
    assert index["weight_map"] == stored
    assert "lm_head.weight" not in stored
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in fixtures.model_tensors(
        fixtures.model_config(tie_word_embeddings=True)).values())  # fmt: skip


def test_files_beside_the_weights_are_kept_as_they_are(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (base / "special_tokens_map.json").write_text('{"eos_token": "<end>"}')
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / "model.safetensors").chmod(0o600)
    models.save(models.load(base, dtype=torch.float32), tmp_path / "out", source=base)
    kept = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "special_tokens_map.json", "additional_chat_templates/tool_use.jinja")  # fmt: skip
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert len(modes) == 1, "weights are as readable as everything beside them"


@pytest.mark.parametrize("keys", [["torch_dtype"], ["dtype"], ["torch_dtype", "dtype"]])
def test_the_config_names_the_dtype_that_was_saved_and_keeps_the_rest(tmp_path: Path, keys: list[str]) -> None:
    base = fixtures.write_model(tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    del raw["torch_dtype"]
    (base / "config.json").write_text(json.dumps(raw | dict.fromkeys(keys, "float32")))
    model = models.load(base, dtype=torch.float32)
    models.save(model, tmp_path / "out", source=base, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | dict.fromkeys(keys, "bfloat16")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, model.get_parameter(name).to(torch.bfloat16))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_config_without_a_dtype_is_given_one(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    del raw["torch_dtype"]
    (base / "config.json").write_text(json.dumps(raw))
    models.save(models.load(base, dtype=torch.bfloat16), tmp_path / "out", source=base)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"torch_dtype": "bfloat16"}


def test_a_mapping_of_tensors_is_saved_as_a_model_is(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", tie_word_embeddings=True)
    model = models.load(base, dtype=torch.float32)
    models.save(model, tmp_path / "model", source=base)
    models.save(model.state_dict(), tmp_path / "mapping", source=base)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "mapping" / "model.safetensors"
    ).read_bytes()


def test_tensors_that_do_not_belong_to_the_config_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", tie_word_embeddings=True)
    tensors = dict(models.load(base, dtype=torch.float32).state_dict())
    del tensors["model.norm.weight"]
    tensors |= {
        "lm_head.weight": tensors["lm_head.weight"] + 1,
        "model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1),
    }
    with pytest.raises(ModelError) as caught:
        models.save(tensors, tmp_path / "out", source=base)
    for part in ("lm_head.weight and model.embed_tokens.weight differ", "missing tensor model.norm.weight", "lora_A"):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_old_weights_are_never_left_beside_new_ones(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    model = models.load(base, dtype=torch.float32)
    models.save(model, tmp_path / "out", source=base)
    with pytest.raises(ModelError, match=r"already holds weights: model\.safetensors"):
        models.save(model, tmp_path / "out", source=base, max_shard_bytes=IN_TWO)
    assert models.load(tmp_path / "out", dtype=torch.float32)
