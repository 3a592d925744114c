"""Activation checkpointing: what of a block is kept for its backward pass, and what is computed again.

`block` keeps what enters the block. `selective` also keeps the outputs of dear operations, matrix products and
attention, and runs the cheap ones again: what lies between (norms, rotation, the gate, sums) is a few operations a
number, and is most of what autograd keeps. torch's own checkpointing does the work
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`); here stands what is dear.
"""

from __future__ import annotations

import logging
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
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


def run(block: Any, hidden_BTD: Tensor, context: Any, kind: Kind) -> Tensor:
    """`block(hidden_BTD, context)`, with the same dropout where it is run again in backward."""
    if kind == "none" or (kind == "selective" and hasattr(block, "selected_products")):
        return block(hidden_BTD, context)
    contexts = partial(selective_contexts, count_products(block)) if kind == "selective" else noop_context_fn
    return checkpoint(block, hidden_BTD, context, use_reentrant=False, context_fn=contexts)  # pyright: ignore


def select_inside(block: Any) -> None:
    """Makes selective checkpointing a part of what `block` is compiled to: around compiled code it would see nothing of
    what runs inside, and run all of it again. For a block that is compiled afterwards."""
    block.selected_products = count_products(block)
    block.forward = MethodType(_forward_selecting, block)
    # Torch says once that in-place operations would be wrong here. There are none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())


def _forward_selecting(self: Any, hidden_BTD: Tensor, context: Any) -> Tensor:
    plain = type(self).forward
    if not torch.is_grad_enabled():
        return plain(self, hidden_BTD, context)
    # A number and no module: so all blocks share one piece of compiled code.
    contexts = partial(selective_contexts, self.selected_products)
    return checkpoint(plain, self, hidden_BTD, context, use_reentrant=False, context_fn=contexts)  # pyright: ignore


def count_products(block: nn.Module) -> int:
    """The linear layers of `block`."""
    return sum(hasattr(module, "out_features") for module in block.modules())


def selective_contexts(products: int) -> tuple[Any, Any]:
    """What `checkpoint(…, context_fn=…)` wants, for one run of a block of so many linear layers.

    The last product's output is not kept: nothing in the block reads it again, so it is not made again either.
    """
    seen = 0

    def choose(_: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        name = operation.name().partition(".")[0]
        seen += name in PRODUCTS or name in ADAPTED_PRODUCTS
        is_dear = name in ADAPTED_PRODUCTS or (name in PRODUCTS and seen != products)
        is_dear = is_dear or "attention" in name or "attn" in name
        return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
