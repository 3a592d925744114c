"""`config.json` is honoured or refused by name; nothing in it is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optune import models
from optune.errors import ModelError
from optune.models.families import read_config
from tests import fixtures


def objections(**overrides: Any) -> list[str]:
    return read_config(fixtures.model_config(**overrides))[1]


QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": None}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "gemma2"}, ["model_type is 'gemma2'", "llama", "mistral", "qwen2", "qwen3"]),
        ({"model_type": None}, ["model_type is None"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
        ({"pretraining_tp": 2}, ["pretraining_tp is 2"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "quantised"]),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, ["auto_map", "code of its own"]),
        ({"rope_interleaved": True}, ["rope_interleaved is True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0", "does not know"]),
        ({"logits_scaling": 8.0}, ["logits_scaling = 8.0"]),
        ({"no_rope_layers": [1, 0]}, ["no_rope_layers = [1, 0]"]),
        ({"pruned_heads": {"0": [1]}}, ["pruned_heads"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder is True"]),
        ({"sliding_window": 4096}, ["sliding_window is 4096", "Llama"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "each of the 2 layers"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["num_attention_heads is 6", "num_key_value_heads, 4"]),
        ({"head_dim": 7}, ["head_dim is 7", "even"]),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size is 32"]),
        ({"hidden_size": "32"}, ["hidden_size is '32'", "whole number"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps is True"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
        ({"pad_token_id": 80}, ["pad_token_id is 80", "vocabulary of 80"]),
        (MISTRAL | {"attention_bias": True}, ["attention_bias is True", "Mistral"]),
        (MISTRAL | {"sliding_window": 0}, ["sliding_window is 0"]),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "all layers alike"]),
        (QWEN2 | {"attention_bias": False}, ["attention_bias is False", "Qwen2"]),
        (QWEN2 | {"mlp_bias": True}, ["mlp_bias is True"]),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "use_sliding_window"]),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers is -1"]),
        ({"rope_scaling": {"rope_type": "mrope"}}, ["rope_type is 'mrope'", "llama3, yarn, longrope"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor is 0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, ["mrope_section = [1]"]),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, ["must agree"]),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, ["rope_theta is 5.0", "must agree"]),
        ({"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "mapping"]),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor is 1.0"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ["low_freq_factor is missing"]),
        ({"rope_scaling": LONG | {"long_factor": [1.0]}}, ["long_factor is [1.0]", "4 positive numbers"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, ["truncate is 'no'"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["factor is missing"]),
        ({"rope_theta": "10000"}, ["rope_theta is '10000'"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
    ],
)
def test_what_the_decoder_cannot_honour_is_refused_by_name(overrides: dict[str, Any], named: list[str]) -> None:
    found = objections(**overrides)
    assert len(found) == 1, found
    for part in named:
        assert part in found[0]


def test_all_objections_are_listed_at_once_and_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path, hidden_act="gelu", attention_dropout=0.1, rope_scaling={"rope_type": "su"})
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelError) as caught:
        models.check(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder}: the model cannot be loaded: 4 things are wrong\n")
    for part in (
        "hidden_act is 'gelu'",
        "attention_dropout is 0.1",
        "rope_type is 'su'",
        "model.safetensors: the file is",
    ):
        assert part in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_act": "swish", "pretraining_tp": 1, "attention_dropout": 0, "partial_rotary_factor": 1.0},
        {"quantization_config": None, "auto_map": None, "an_unknown_key": None, "rope_interleaved": False},
        {"temperature": 0.6, "id2label": {"0": "LABEL_0"}, "_name_or_path": "x", "unsloth_version": "2025.1"},
        {"layer_types": ["full_attention", "full_attention"], "use_sliding_window": False, "max_window_layers": 28},
        {"torch_dtype": None, "dtype": "bfloat16", "num_key_value_heads": None},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": {"rope_type": "default"}},
        {"architectures": None},
        {"pad_token_id": -1},
        MISTRAL | {"sliding_window": None},
        QWEN2 | {"attention_bias": True},
    ],
)
def test_keys_that_change_nothing_are_accepted(overrides: dict[str, Any]) -> None:
    assert objections(**overrides) == []


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({}, (None, None)),
        (MISTRAL | {"sliding_window": 7}, (7, 7)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL, (4096, 4096)),
        (QWEN2 | {"sliding_window": 7}, (None, None)),
        (QWEN2 | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        (QWEN2 | {"sliding_window": 7, "use_sliding_window": True}, (None, None)),
        (
            QWEN3
            | {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
                "max_window_layers": 0,
            },
            (7, None),
        ),
    ],
)
def test_windows_follow_the_rules_of_each_family(overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config, found = read_config(fixtures.model_config(**overrides))
    assert config is not None, found
    assert config.windows == windows


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model_type": "llama"'])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, content: str | None) -> None:
    folder = fixtures.write_model(tmp_path)
    file = folder / "config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ModelError) as caught:
        models.check(folder)
    assert str(caught.value).startswith(f"{file}: the file ")


def test_an_adapter_folder_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    with pytest.raises(ModelError, match="holds an adapter, not a model"):
        models.check(tmp_path)


# Excerpts of configs as published, to keep the reader from refusing real models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
        "use_cache": True, "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
        "use_cache": True, "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip

PARAMETERS = {
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-135M": 134_515_008,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_accepted_with_their_published_size(name: str) -> None:
    config, found = read_config(PUBLISHED[name])
    assert config is not None, found
    assert sum(parameter.numel() for parameter in models.outline(config).parameters()) == PARAMETERS[name]
