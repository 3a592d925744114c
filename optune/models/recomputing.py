"""Activation checkpointing: what of a block is kept for its backward pass, and what is computed again.

`block` keeps what enters the block. `selective` also keeps the outputs of dear operations, matrix products and
attention, and runs the cheap ones again: what lies between (norms, rotation, the gate, sums) is a few operations a
number, and is most of what autograd keeps. torch's own checkpointing does the work
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`); here stands what is dear.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

Kind = Literal["none", "selective", "block"]

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "optune::frozen_forward"})
ADAPTED_PRODUCTS = frozenset({"optune::lora_forward"})
"""Linear layers, plain and those of `optune.lora`, of which the adapted need a part of what they give in backward.

An operation is a whole attention if its name says so. Scores are never kept: `bmm` is not dear.
"""


def run(block: nn.Module, hidden_BTD: Tensor, context: Any, kind: Kind) -> Tensor:
    """`block(hidden_BTD, context)`, with the same dropout where it is run again in backward."""
    if kind == "none":
        return block(hidden_BTD, context)
    contexts = partial(selective_contexts, block) if kind == "selective" else noop_context_fn
    return checkpoint(block, hidden_BTD, context, use_reentrant=False, context_fn=contexts)  # pyright: ignore


def selective_contexts(block: nn.Module) -> tuple[Any, Any]:
    """What `checkpoint(…, context_fn=…)` wants, for one run of `block`.

    The last product's output is not kept: nothing in the block reads it again, so it is not made again either.
    """
    products = sum(hasattr(module, "out_features") for module in block.modules())
    seen = 0

    def choose(_: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        name = operation.name().partition(".")[0]
        seen += name in PRODUCTS or name in ADAPTED_PRODUCTS
        is_dear = name in ADAPTED_PRODUCTS or (name in PRODUCTS and seen != products)
        is_dear = is_dear or "attention" in name or "attn" in name
        return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
