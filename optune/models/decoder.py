"""The one decoder for the whole Llama line. What differs between families stands in `DecoderConfig`, as data.

Parameter names are those of Hugging Face files. The numbers are those of transformers, in float32 and in bf16: norms
in float32 inside, rotary tables rounded to the working dtype, `is_causal` attention where no mask is needed.

Shapes: B rows, T positions, D hidden_size, N query heads, K key/value heads, H head_dim, V vocabulary, S keys that
can be seen (T, or the cache's).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from optune import kernels
from optune.models import compiling, lookup, recomputing, varlen
from optune.models.attention import causal_attention
from optune.models.cache import Cache
from optune.models.families import DecoderConfig
from optune.models.fused import remaking, rms_norm, swiglu
from optune.models.masks import lengths_of, make_mask
from optune.models.offloading import CudaCopies, Offloading, check_offloading
from optune.models.rope import rotate, tables
from optune.models.varlen import Sequences, varlen_attention
from optune.shards import input_device


@dataclass(frozen=True)
class BlockContext:
    """What all blocks share in one forward pass; made by `Decoder.context`.

    `masks` gives for each window of the model the pairs that see each other, bool (B or 1, 1, T, S), or None where
    plain causal attention does; it is empty where attention goes by `tiled` (see `models.attention`), which reads the
    documents themselves, or by `sequences` (`models.varlen`). `cos` and `sin` are (B or 1, T, 1, H).
    """

    cos: Tensor
    sin: Tensor
    masks: dict[int | None, Tensor | None]
    causal: bool = True
    """False for a single new token, which sees every key. Decided here, because a compiled block cannot."""
    cache: Cache | None = None
    slots: Tensor | None = None
    tiled: bool = False
    documents_BT: Tensor | None = None
    sequences: Sequences | None = None
    keeps_little: bool = False
    """What a block keeps for backward is a matter of its own: nobody else packs what autograd saves."""


def attend(
    query_BNTH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, context: BlockContext, window: int | None
) -> Tensor:
    """Attention of N query heads over K key heads, which are never repeated in memory."""
    if context.tiled:
        return causal_attention(query_BNTH, key_BKSH, value_BKSH, context.documents_BT, window)
    if context.sequences is not None:
        return varlen_attention(query_BNTH, key_BKSH, value_BKSH, context.sequences, window)
    mask = context.masks[window]
    return F.scaled_dot_product_attention(
        query_BNTH, key_BKSH, value_BKSH, attn_mask=mask, is_causal=context.causal and mask is None, enable_gqa=True
    )


class RMSNorm(nn.Module):
    """Root mean square norm, see `rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)

    def remaking(self, normed: Tensor, hidden: Tensor) -> AbstractContextManager[Any]:
        """Layers that run in this context and keep `normed` keep `hidden`, which this norm keeps anyway."""
        return remaking(normed, partial(rms_norm, eps=self.eps), hidden, self.weight)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        width, self.head_dim, self.index = config.hidden_size, config.head_dim, index
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, width, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.query_key_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.query_key_norm else None
        self.window = config.windows[index]

    def forward(self, hidden_BTD: Tensor, context: BlockContext) -> Tensor:
        heads = (*hidden_BTD.shape[:2], -1, self.head_dim)
        query_BTNH = self.q_proj(hidden_BTD).view(heads)
        key_BTKH = self.k_proj(hidden_BTD).view(heads)
        value_BKTH = self.v_proj(hidden_BTD).view(heads).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query_BTNH, key_BTKH = self.q_norm(query_BTNH), self.k_norm(key_BTKH)
        query_BNTH = rotate(query_BTNH, context.cos, context.sin).transpose(1, 2)
        key_BKTH = rotate(key_BTKH, context.cos, context.sin).transpose(1, 2)
        if context.cache is not None and context.slots is not None:
            key_BKTH, value_BKTH = context.cache.update(self.index, key_BKTH, value_BKTH, context.slots)
        out_BNTH = attend(query_BNTH, key_BKTH, value_BKTH, context, self.window)
        return self.o_proj(out_BNTH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, hidden_BTD: Tensor, context: BlockContext) -> Tensor:
        gate_BTF, up_BTF = self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)
        inner_BTF = swiglu(gate_BTF, up_BTF, owned=True)
        with remaking(inner_BTF, swiglu, gate_BTF, up_BTF) if context.keeps_little else nullcontext():
            return self.down_proj(inner_BTF)


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_BTD: Tensor, context: BlockContext) -> Tensor:
        normed_BTD = self.input_layernorm(hidden_BTD)
        with self.input_layernorm.remaking(normed_BTD, hidden_BTD) if context.keeps_little else nullcontext():
            hidden_BTD = hidden_BTD + self.self_attn(normed_BTD, context)
        normed_BTD = self.post_attention_layernorm(hidden_BTD)
        with self.post_attention_layernorm.remaking(normed_BTD, hidden_BTD) if context.keeps_little else nullcontext():
            return hidden_BTD + self.mlp(normed_BTD, context)


class _Body(nn.Module):
    """Exists for the prefix `model.` of the parameter names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model: `embed`, a plain list of `blocks`, `final_norm`, `lm_head`.

    The parts may be called one by one (that is how the memory-saving schedules work) or all at once by `hidden` and
    `forward`. Rows are padded on the right, so padding needs no mask. Weights come from `optune.models.load`; a new
    Decoder holds whatever `nn.Linear` and `nn.Embedding` start with.
    """

    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    offloading: Offloading | None = None
    compilation: str | None = None
    """What came of `compile_blocks`, for a person, where no block was compiled."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cached_heads = config.num_key_value_heads
        """Key heads that this process has: fewer where the model is split over several."""
        self.tie()

    def tie(self) -> None:
        """Makes the head share the embedding's Parameter, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where inputs belong; offloaded weights lie in host memory."""
        return input_device(self.model.embed_tokens.weight)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """hidden_BTD before the first block."""
        return lookup.look_up(self.model.embed_tokens, tokens_BT, self.lm_head)

    def final_norm(self, hidden_BTD: Tensor) -> Tensor:
        """What `lm_head` reads."""
        return self.model.norm(hidden_BTD)

    def context(
        self,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> BlockContext:
        """Rotary tables and masks, once a forward pass; `dtype` is that of the hidden states.

        `documents_BT` numbers the rows of a pack: positions with different numbers never see each other. Where the
        RoPE scaling depends on length (dynamic, longrope), that is the largest position of the same row, or document,
        plus 1; so positions of padding must not go beyond their row's. A document's positions stand together.
        """
        if cache is not None and documents_BT is not None:
            raise ValueError("a cache holds single rows; documents cannot be given with it")
        lengths = lengths_of(positions_BT, documents_BT) if self.config.rope.needs_lengths else None
        device, dtype = positions_BT.device, dtype or self.dtype
        cos, sin = tables(self.config.rope, positions_BT, lengths, dtype)
        slots = None if cache is None else cache.slots(positions_BT.shape[1])
        tiled = cache is None and _is_tiled(device)
        sequences = None
        if documents_BT is not None and varlen.fits(device, dtype, self.config.head_dim):
            sequences = varlen.find_sequences(documents_BT)
        masks = {
            window: make_mask(positions_BT.shape[1], device, window, documents_BT, cache, slots)
            for window in dict.fromkeys(() if tiled or sequences is not None else self.config.windows)
        }
        keeps_little = self.activation_checkpointing == "none" and self.offloading is None
        return BlockContext(
            cos,
            sin,
            masks,
            causal=positions_BT.shape[1] > 1,
            cache=cache,
            slots=slots,
            tiled=tiled,
            documents_BT=documents_BT if tiled else None,
            sequences=sequences,
            keeps_little=keeps_little,
        )

    def run_block(self, block: nn.Module, hidden_BTD: Tensor, context: BlockContext) -> Tensor:
        """One block; with activation checkpointing its inside, or the cheap part of it, is computed again in backward,
        with the same dropout."""
        if context.cache is not None:
            # Without compiled code, which would be made anew for each layer's place in the cache.
            return block._call_impl(hidden_BTD, context)  # pyright: ignore[reportReturnType]
        if not torch.is_grad_enabled():
            return block(hidden_BTD, context)
        if self.offloading is None:
            return recomputing.run(block, hidden_BTD, context, self.activation_checkpointing)
        with self.offloading.block(block, context, is_first=block is self.blocks[0], is_last=block is self.blocks[-1]):
            return recomputing.run(block, hidden_BTD, context, self.activation_checkpointing)

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """hidden_BTD after the final norm. Without positions, they count from 0, or go on where the cache stands.

        Of a trained model whose head is its embedding, hidden_BTD leads the loss to the head's weight (see `lookup`).
        """
        if positions_BT is None:
            count = tokens_BT.shape[1]
            positions_BT = torch.arange(count, device=tokens_BT.device)[None] if cache is None else cache.slots(count)
        embedded_BTD = hidden_BTD = self.embed(tokens_BT)
        context = self.context(positions_BT, documents_BT, cache, dtype=hidden_BTD.dtype)
        for block in self.blocks:
            hidden_BTD = self.run_block(block, hidden_BTD, context)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        return lookup.hand_on(embedded_BTD, self.final_norm(hidden_BTD))

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """logits_BTV."""
        return self.lm_head(self.hidden(tokens_BT, positions_BT, documents_BT, cache))

    def new_cache(self, rows: int, length: int) -> Cache:
        """An empty cache for `rows` rows of at most `length` tokens."""
        return Cache(
            layers=len(self.blocks), rows=rows, heads=self.cached_heads, length=length,
            head_dim=self.config.head_dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def offload_activations(self) -> None:
        """What blocks keep for backward waits in host memory from now on. Raises ConfigError off CUDA."""
        check_offloading(self.device)
        self.offloading = Offloading(CudaCopies(self.device))

    def compile_blocks(self, **options: Any) -> None:
        """Compiles each block in place (names stay). The whole model in one graph would free nothing early.

        Without `options` for `torch.compile` blocks stay as they are where native kernels leave nothing to gain.
        """
        weight = self.model.norm.weight
        if kernels.are_all_there_is(weight) and not options:
            self.compilation = kernels.NOTHING_TO_COMPILE
            return
        compiling.get_ready(weight)
        for block in self.blocks:
            if self.activation_checkpointing == "selective":
                recomputing.select_inside(block)
            block.compile(**options)


class _WithoutInit(TorchFunctionMode):
    """Leaves parameters as they are allocated. On the meta device, filling them imports 800 modules, in a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def outline(config: DecoderConfig) -> Decoder:
    """A Decoder on the meta device: names and shapes, no memory and no values."""
    with torch.device("meta"), _WithoutInit():
        return Decoder(config)


def _is_tiled(device: torch.device) -> bool:
    """Whether attention goes by tiles there."""
    return device.type == "cpu"
