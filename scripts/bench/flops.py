"""Counted floating-point operations of a training step: 2·m·k·n for each matrix product, and nothing else.

Each linear layer has three products: forward (Y = X Wᵀ), dX (dY W) and dW (dYᵀ X), all with the same count. Attention
has two forward (Q Kᵀ and P V) and four backward (dV, dP, dQ, dK), over the pairs of positions that see each other: with
a causal mask T(T + 1)/2 of a row's T². Not counted: embedding look-ups, norms, rotary tables, activations, softmax, the
optimizer, and what a fused attention or a chunked loss computes again in its backward. Activation checkpointing runs
each block's forward a second time, up to the input of its last product (torch stops where nothing more is asked for):
counted apart, as `recomputed`, because a step without it does not have that work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Product:
    """A linear layer, `times` in the model: (rows x `k`) by (`k` x `n`)."""

    name: str
    k: int
    n: int
    times: int
    in_block: bool = True

    def flops(self, rows: int) -> int:
        """Of one of its three products."""
        return 2 * rows * self.k * self.n


@dataclass(frozen=True)
class StepFlops:
    """`linear` and `attention` are what a step must do, forward and backward."""

    linear: int
    attention: int
    recomputed: int

    @property
    def needed(self) -> int:
        return self.linear + self.attention

    @property
    def done(self) -> int:
        return self.needed + self.recomputed


def linear_products(config: Mapping[str, Any]) -> list[Product]:
    """The linear layers of a decoder of the Llama line, from its config.json; equal shapes are one entry."""
    width, inner, blocks = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    return [
        Product("q_proj", width, queries, blocks),
        Product("k_proj, v_proj", width, keys, 2 * blocks),
        Product("o_proj", queries, width, blocks),
        Product("gate_proj, up_proj", width, inner, 2 * blocks),
        Product("down_proj", inner, width, blocks),
        Product("lm_head", width, config["vocab_size"], 1, in_block=False),
    ]


def attention_forward(config: Mapping[str, Any], rows: int, length: int, *, causal: bool = True) -> int:
    """Q Kᵀ and P V of all blocks."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    pairs = length * (length + 1) // 2 if causal else length * length
    return 2 * 2 * rows * pairs * heads * head_dim * config["num_hidden_layers"]


def count_step(
    config: Mapping[str, Any], rows: int, length: int, *, checkpointed: bool = False, causal: bool = True
) -> StepFlops:
    """A full finetune's step over `rows` x `length` tokens, every position a target."""
    tokens = rows * length
    forward = {product: product.times * product.flops(tokens) for product in linear_products(config)}
    attention = attention_forward(config, rows, length, causal=causal)
    again = sum(flops for product, flops in forward.items() if product.in_block and product.name != "down_proj")
    return StepFlops(3 * sum(forward.values()), 3 * attention, again + attention if checkpointed else 0)
