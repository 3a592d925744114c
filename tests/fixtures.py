"""Tiny models, tokenizers and rows that tests make on the spot. Nothing here imports the code under test.

M0, T0 and C0 are the fixtures that the cases speak of: a llama-style model of 2 layers and width 32, a word-level
tokenizer, and a chat template without generation tags.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<turn>", "<end>", "<unk>")
WORDS = ("\n", "system", "user", "assistant", "tool", "ok", "boom", "yes", "no", *(f"w{i}" for i in range(65)))
VOCABULARY = (*SPECIAL_TOKENS, *WORDS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<turn>' + message['role'] + '\n' + message['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)


def write_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = False, pad_token: str = "<pad>"
) -> Path:
    """T0 (and C0): `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<end>",
        "pad_token": pad_token,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def model_config(**overrides: Any) -> dict[str, Any]:
    """The `config.json` of M0; `overrides` replace or add entries."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 4,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | overrides


def model_tensors(config: dict[str, Any], seed: int = 0, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Random fp32 weights under their Hugging Face names; norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], width)}
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}"
        tensors |= {
            f"{block}.self_attn.q_proj.weight": matrix(queries, width),
            f"{block}.self_attn.k_proj.weight": matrix(keys, width),
            f"{block}.self_attn.v_proj.weight": matrix(keys, width),
            f"{block}.self_attn.o_proj.weight": matrix(width, queries),
            f"{block}.mlp.gate_proj.weight": matrix(inner, width),
            f"{block}.mlp.up_proj.weight": matrix(inner, width),
            f"{block}.mlp.down_proj.weight": matrix(width, inner),
            f"{block}.input_layernorm.weight": 1 + matrix(1, width)[0],
            f"{block}.post_attention_layernorm.weight": 1 + matrix(1, width)[0],
        }
    tensors["model.norm.weight"] = 1 + matrix(1, width)[0]
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], width)
    return tensors


def write_model(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **overrides: Any
) -> Path:
    """M0 with T0 and C0 as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(**overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 0, "eos_token_id": [1, 4], "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in model_tensors(config, seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def chat(*turns: str, roles: Sequence[str] = ("user", "assistant")) -> dict[str, Any]:
    """A messages row; `turns` go to `roles` in rotation."""
    return {
        "messages": [{"role": roles[index % len(roles)], "content": content} for index, content in enumerate(turns)]
    }


def numbered_rows(count: int) -> list[dict[str, Any]]:
    """`count` chats with distinct words and answers of 1 to 4 words."""
    words = [f"w{i}" for i in range(65)]
    return [
        chat(
            f"{words[index % 65]} {words[(index * 7 + 3) % 65]}",
            " ".join(words[(index * 11 + k) % 65] for k in range(1 + index % 4)),
        )
        for index in range(count)
    ]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """`rows` as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
