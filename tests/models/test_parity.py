"""The decoder computes what transformers computes: logits, gradients of every parameter, packs, long sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from optune import models

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0},
    "llama3.2_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "smollm2": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "rope_interleaved": False,
        "pad_token_id": 2,
    },
    "llama_with_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral_sliding": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_sliding": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_layer_types": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}

# Sequences in these tests have 20 tokens: longer than the windows above and than the original lengths below.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16},
    "llama3_scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn_all_settings": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
            "original_max_position_embeddings": 16,
        }
    },
    "longrope_by_lengths": {
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
        },
    },
    "new_spelling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
}


def write_judge(folder: Path, settings: dict[str, Any], seed: int = 0) -> tuple[nn.Module, Path]:
    """A transformers model with random weights (biases and norms included), and its folder."""
    raw = SHAPE | settings
    if "rope_parameters" in raw:
        raw.pop("rope_theta")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(folder)
    judge = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in judge.parameters():
            around = 1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0
            parameter.copy_(around + 0.15 * torch.randn(parameter.shape, generator=generator))
    save_file({n: p.detach().clone() for n, p in judge.named_parameters()}, folder / "model.safetensors")
    return judge, folder


def make_tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(ours: nn.Module, judge: nn.Module) -> None:
    theirs = dict(judge.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == set(theirs)
    for name, parameter in ours.named_parameters():
        wanted, got = theirs[name].grad, parameter.grad
        assert wanted is not None and got is not None, name
        error = (got - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", [*FAMILIES, *ROPES])
def test_logits_and_every_gradient_equal_transformers(tmp_path: Path, name: str) -> None:
    settings = FAMILIES.get(name) or {"model_type": "llama", **ROPES[name]}
    judge, folder = write_judge(tmp_path, settings)
    decoder = models.load(folder, dtype=torch.float32)
    tokens_BT = make_tokens(2, 20)
    ours, theirs = decoder(tokens_BT), judge(tokens_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for logits in (ours, theirs):
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    assert_same_gradients(decoder, judge)


@pytest.mark.parametrize("name", [*FAMILIES, *ROPES])
def test_a_config_that_transformers_writes_again_means_the_same(tmp_path: Path, name: str) -> None:
    judge, folder = write_judge(tmp_path / "before", FAMILIES.get(name) or {"model_type": "llama", **ROPES[name]})
    judge.save_pretrained(tmp_path / "after")
    before, after = models.check(folder), models.check(tmp_path / "after")
    assert after == before


@pytest.mark.parametrize("name", ["dynamic", "longrope", "longrope_by_lengths", "yarn"])
def test_sequences_within_the_original_length_equal_transformers(tmp_path: Path, name: str) -> None:
    judge, folder = write_judge(tmp_path, {"model_type": "qwen2", **ROPES[name]})
    tokens_BT = make_tokens(2, 9)
    ours = models.load(folder, dtype=torch.float32)(tokens_BT)
    torch.testing.assert_close(ours, judge(tokens_BT).logits, rtol=0, atol=1e-5)


def test_far_positions_equal_transformers(tmp_path: Path) -> None:
    """Rotary tables must not lose precision with the position."""
    for name in ("llama3_scaling", "yarn", "longrope", "linear"):
        settings = {"model_type": "llama", **ROPES[name], "max_position_embeddings": 131072}
        judge, folder = write_judge(tmp_path / name, settings)
        tokens_BT, positions_BT = make_tokens(1, 12), torch.arange(100_000, 100_012)[None]
        ours = models.load(folder, dtype=torch.float32)(tokens_BT, positions_BT)
        theirs = judge(tokens_BT, position_ids=positions_BT).logits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3.2_tied", "mistral_sliding", "qwen2_sliding", "qwen3"])
def test_bf16_logits_equal_transformers_within_rounding(tmp_path: Path, name: str) -> None:
    _, folder = write_judge(tmp_path, FAMILIES[name])
    tokens_BT = make_tokens(2, 20)
    ours = models.load(folder, dtype=torch.bfloat16)(tokens_BT)
    judge = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs, exact = judge(tokens_BT).logits, judge.float()(tokens_BT).logits
    assert ours.dtype == torch.bfloat16
    # Attention of another order of sums rounds differently, and no worse than transformers'.
    assert (ours.float() - exact).norm() <= 1.1 * (theirs.float() - exact).norm()
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.06)


@pytest.mark.parametrize("name", [*FAMILIES, *ROPES])
def test_a_pack_gives_each_row_the_logits_and_gradients_it_has_alone(tmp_path: Path, name: str) -> None:
    """Rows of 18, 3 and 9 tokens: some scalings treat the first as long and the others as short."""
    settings = FAMILIES.get(name) or {"model_type": "llama", **ROPES[name]}
    judge, folder = write_judge(tmp_path, settings)
    decoder = models.load(folder, dtype=torch.float32)
    rows = [make_tokens(1, length, seed=length)[0] for length in (18, 3, 9)]
    judge_logits = []
    for row in rows:
        fresh = type(judge)(judge.config)  # Dynamic RoPE in transformers remembers the longest sequence it saw.
        fresh.load_state_dict(judge.state_dict())
        judge_logits.append(fresh(row[None]).logits[0])
    pack_BT = torch.cat([*rows, torch.zeros(2, dtype=torch.long)])[None]
    positions_BT = torch.cat([*(torch.arange(len(row)) for row in rows), torch.zeros(2, dtype=torch.long)])[None]
    documents_BT = torch.tensor([0] * 18 + [1] * 3 + [2] * 9 + [3] * 2)[None]
    packed = decoder(pack_BT, positions_BT, documents_BT)[0]
    torch.testing.assert_close(packed[:30], torch.cat(judge_logits), rtol=0, atol=1e-5)
    weights = torch.randn(30, VOCABULARY, generator=torch.Generator().manual_seed(3))
    (packed[:30] * weights).sum().backward()
    packed_gradients = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    alone = torch.cat([decoder(row[None])[0] for row in rows])
    (alone * weights).sum().backward()
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        error = (packed_gradients[parameter_name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6)
        assert error <= 1e-5, f"{parameter_name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", ["llama3", "llama3_scaling", "mistral_sliding", "dynamic", "longrope"])
def test_padding_on_the_right_changes_nothing(tmp_path: Path, name: str) -> None:
    settings = FAMILIES.get(name) or {"model_type": "llama", **ROPES[name]}
    _, folder = write_judge(tmp_path, settings)
    decoder = models.load(folder, dtype=torch.float32)
    short, long = make_tokens(1, 7), make_tokens(1, 20)
    both_BT = torch.cat([torch.nn.functional.pad(short, (0, 13)), long])
    positions_BT = torch.stack([torch.arange(20).clamp(max=6), torch.arange(20)])
    together = decoder(both_BT, positions_BT)
    torch.testing.assert_close(together[:1, :7], decoder(short), rtol=0, atol=1e-5)
    torch.testing.assert_close(together[1:], decoder(long), rtol=0, atol=1e-5)
