"""Model families as data, and `config.json` read strictly against them.

To add a family: one entry in `FAMILIES`, and a row in `tests/models/test_parity.py`. A family that computes something
new also needs that in `decoder.py`. Every key of `config.json` is read, listed below as one that changes nothing, or
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optune.models.rope import Rope, read_rope


@dataclass(frozen=True)
class Family:
    """What an architecture fixes, and what transformers assumes where `config.json` is silent."""

    title: str
    architecture: str
    attention_bias: Literal["config", "qkv", "none"]
    """Biases of the attention's projections: all four as the key `attention_bias` says, on q, k and v, or none."""
    mlp_bias: bool = False
    """Whether the key `mlp_bias` is read; otherwise there are no biases."""
    query_key_norm: bool = False
    windows: Literal["none", "all", "by_layer"] = "none"
    """Which layers look back only `sliding_window` tokens."""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768


FAMILIES = {
    "llama": Family(
        "Llama 2, 3, 3.1, 3.2, SmolLM2", "LlamaForCausalLM", "config", mlp_bias=True, max_position_embeddings=2048
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", "none", windows="all", num_key_value_heads=8, max_position_embeddings=131072
    ),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2ForCausalLM", "qkv", windows="by_layer", num_key_value_heads=32),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", "config",
        query_key_norm=True, windows="by_layer", num_key_value_heads=32, head_dim=128,
    ),
}  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings pad_token_id attention_bias "
    "mlp_bias sliding_window use_sliding_window max_window_layers layer_types rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor original_max_position_embeddings"
)

# Keys that change nothing in the forward pass of these families: labels, defaults for generating text, notes of tools.
HARMLESS = _words(
    "transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash tokenizer_class "
    "bos_token_id eos_token_id sep_token_id unk_token_id forced_bos_token_id forced_eos_token_id "
    "decoder_start_token_id initializer_range use_cache use_bfloat16 torchscript tf_legacy_loss "
    "return_dict return_dict_in_generate output_attentions output_hidden_states output_scores output_logits "
    "is_decoder tie_last_hidden_states cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward "
    "keys_to_ignore_at_inference "
    "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "finetuning_task task_specific_params problem_type id2label label2id num_labels prefix "
    "max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version"
)

# Keys that would change the computation, with the values at which they do not. Null is always one of them.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "auto_map": (),
}
_HINTS = {
    "quantization_config": "the weights are quantised; take the model's original weights",
    "auto_map": "the model brings code of its own, which is not run",
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of one decoder. Names are those of `config.json`; `windows` holds one entry a layer, in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    windows: tuple[int | None, ...]
    rope: Rope
    pad_token_id: int | None = None
    """The embedding's row for this id gets no gradient from inputs, as in transformers (`padding_idx`)."""


def read_config(raw: Mapping[str, Any]) -> tuple[DecoderConfig | None, list[str]]:
    """The decoder that a `config.json` describes, or None with every reason why it cannot be honoured."""
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = "; ".join(f"{name} ({entry.title})" for name, entry in FAMILIES.items())
        return None, [f"model_type is {model_type!r}; supported are {known}"]
    reader = _Reader(raw)
    reader.check_keys(family)
    heads = reader.whole("num_attention_heads")
    key_value_heads = heads if _is_null(raw, "num_key_value_heads") else reader.whole(
        "num_key_value_heads", family.num_key_value_heads or heads
    )  # fmt: skip
    if heads % key_value_heads:
        reader.say("num_attention_heads", f"it must be a multiple of num_key_value_heads, {key_value_heads}")
    layers, width = reader.whole("num_hidden_layers"), reader.whole("hidden_size")
    if raw.get("head_dim") is None and family.head_dim is None and width % heads:
        reader.say("hidden_size", f"it must be a multiple of num_attention_heads, {heads}, where head_dim is not given")
    head_dim = reader.whole("head_dim", family.head_dim or max(width // heads, 1))
    if head_dim % 2:
        reader.problems.append(f"head_dim is {head_dim}; it must be even, for rotary embeddings")
    max_length = reader.whole("max_position_embeddings", family.max_position_embeddings)
    rope, rope_problems = read_rope(raw, head_dim=head_dim, max_length=max_length)
    reader.problems += rope_problems
    bias = reader.flag("attention_bias", False)
    config = DecoderConfig(
        model_type=str(model_type),
        vocab_size=reader.whole("vocab_size"),
        hidden_size=width,
        intermediate_size=reader.whole("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_length,
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=family.attention_bias == "qkv" or (family.attention_bias == "config" and bias),
        output_bias=family.attention_bias == "config" and bias,
        mlp_bias=family.mlp_bias and reader.flag("mlp_bias", False),
        query_key_norm=family.query_key_norm,
        windows=reader.windows(family, layers),
        rope=rope or Rope(head_dim, 10000.0),
        pad_token_id=reader.pad(),
    )
    return (None, reader.problems) if reader.problems else (config, [])


class _Reader:
    """Reads keys of one `config.json` and collects what is wrong with them; a wrong value reads as a harmless one."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def say(self, key: str, rule: str) -> None:
        self.problems.append(f"{key} is {self.raw.get(key)!r}; {rule}")

    def check_keys(self, family: Family) -> None:
        architectures = self.raw.get("architectures")
        if architectures and family.architecture not in architectures:
            self.say("architectures", f"supported is {family.architecture}")
        for key, value in self.raw.items():
            if value is None or key in _READ or key in HARMLESS:
                continue
            if key not in _ONLY:
                self.problems.append(f"{key} = {value!r} is a key that the decoder does not know")
            elif not any(value == allowed and type(value) in (type(allowed), float) for allowed in _ONLY[key]):
                allowed = " or ".join(map(repr, _ONLY[key]))
                self.say(key, _HINTS.get(key) or f"the decoder can only do {allowed}")
        if family.attention_bias == "none" and self.raw.get("attention_bias"):
            self.say("attention_bias", f"{family.title} has no biases")
        if family.attention_bias == "qkv" and self.raw.get("attention_bias") is False:
            self.say("attention_bias", f"{family.title} always has biases on q, k and v")
        if not family.mlp_bias and self.raw.get("mlp_bias"):
            self.say("mlp_bias", f"{family.title} has none")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{key} is missing")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.say(key, "it must be a whole number from 1 up")
        else:
            return value
        return 1

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            self.say(key, "it must be a number from 0 to 1")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.say(key, "it must be true or false")
        return value if isinstance(value, bool) else default

    def pad(self) -> int | None:
        value = self.raw.get("pad_token_id")
        rows = self.raw.get("vocab_size")
        if value is None or not isinstance(rows, int):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not -rows <= value < rows:
            self.say("pad_token_id", f"it must be null or lie inside the vocabulary of {rows}")
            return None
        return value % rows

    def windows(self, family: Family, layers: int) -> tuple[int | None, ...]:
        """How far back each layer looks, from `sliding_window` and its companions."""
        given, types = self.raw.get("sliding_window"), self.raw.get("layer_types")
        window: int | None = None
        if family.windows == "none":
            if given is not None:
                self.say("sliding_window", f"{family.title} looks back without limit")
            if self.raw.get("use_sliding_window"):
                self.say("use_sliding_window", f"{family.title} looks back without limit")
        elif family.windows == "all" or self.flag("use_sliding_window", False):
            window = None if _is_null(self.raw, "sliding_window") else self.whole("sliding_window", 4096)
        first = self.raw.get("max_window_layers", 28) if family.windows == "by_layer" else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            self.say("max_window_layers", "it must be a whole number from 0 up")
            first = 0
        windows = tuple(window if index >= first else None for index in range(layers))
        return windows if types is None else self._windows_by_type(family, types, window, windows)

    def _windows_by_type(
        self, family: Family, types: Any, window: int | None, otherwise: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        meaning = {"full_attention": None, "sliding_attention": window}
        if not isinstance(types, list) or len(types) != len(otherwise) or not set(types) <= set(meaning):
            self.say("layer_types", f"it must name {' or '.join(meaning)} for each of the {len(otherwise)} layers")
            return otherwise
        if "sliding_attention" in types and window is None:
            self.say("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
            return otherwise
        windows = tuple(meaning[kind] for kind in types)
        if family.windows != "by_layer" and windows != otherwise:
            self.say("layer_types", f"{family.title} treats all layers alike")
        return windows


def _is_null(raw: Mapping[str, Any], key: str) -> bool:
    return key in raw and raw[key] is None
