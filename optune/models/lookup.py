"""The embedding's rows, with a gradient that needs no table of its own where the head has made one.

torch's lookup gives a gradient of the whole table, zeros for all words that a microbatch lacks. Where head and
embedding are one weight, autograd keeps the head's gradient until the embedding's is there, and adds the two: at the
end of backward, when all other gradients are alive as well. Here the head's gradient comes by the lookup, which adds
its few rows to it. For autograd the weight has one use then, so its gradient is whole when it arrives.

Shapes: B rows, T positions, N tokens, W different words among them, V vocabulary, D width, C some
columns of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function

from optune.shards import is_sharded
from optune.types import Later, SharedHead

COLUMNS = 256
"""Features whose sums are made at a time: all of them would be the most that a step needs beside a large table."""


def look_up(embedding: Any, tokens_BT: Tensor, head: nn.Module) -> Tensor:
    """`embedding(tokens_BT)`. Where `head` shares the trained weight, the result has it as its `SharedHead`.

    Who takes the head's weight from there has to be the only one, and to give a gradient that nobody else holds: it
    is added to in place. Where nobody does, the gradient is that of a plain lookup.
    """
    if not _is_shared(embedding, head):
        return embedding(tokens_BT)
    later = Later()
    hidden_BTD, weight_VD = _Lookup.apply(tokens_BT, embedding.weight, embedding.padding_idx, later)  # pyright: ignore
    return SharedHead(weight_VD, later).go_with(hidden_BTD)


def hand_on(embedded_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
    """`hidden_BTD`, which was made from `embedded_BTD`, with the head's weight where the other has it."""
    shared = SharedHead.of(embedded_BTD)
    return hidden_BTD if shared is None else shared.go_with(hidden_BTD)


def _is_shared(embedding: nn.Module, head: nn.Module) -> bool:
    """Whether both are plain layers with one trained weight, of which this process has the whole."""
    weight_VD: Any = embedding.weight
    if head.weight is not weight_VD or not (torch.is_grad_enabled() and weight_VD.requires_grad):
        return False
    is_plain = type(embedding) is nn.Embedding and type(head) is nn.Linear and head.bias is None
    # Somebody else's forward or hook, or a mode that has to see each use of a parameter, does without.
    is_watched = "forward" in vars(embedding) or embedding._forward_hooks or embedding._forward_pre_hooks
    return is_plain and not is_watched and not has_torch_function((weight_VD,)) and not is_sharded(weight_VD)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_BT: Tensor, weight_VD: Tensor, padding_index: int | None, later: Later
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens_BT)
        ctx.later = later
        ctx.words, ctx.padding_index = len(weight_VD), -1 if padding_index is None else padding_index
        return F.embedding(tokens_BT, weight_VD), weight_VD.view_as(weight_VD)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_BTD: Tensor | None, grad_VD: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        if grad_VD is None:
            grad_VD = ctx.later.take()
        if grad_BTD is None:
            return None, grad_VD, None, None
        if grad_VD is None:
            made_VD = torch.ops.aten.embedding_dense_backward(grad_BTD, tokens_BT, ctx.words, ctx.padding_index, False)
            return None, made_VD, None, None
        add_rows_(grad_VD, tokens_BT, grad_BTD, ctx.padding_index)
        return None, grad_VD, None, None


def add_rows_(grad_VD: Tensor, tokens_BT: Tensor, grad_BTD: Tensor, padding_index: int = -1) -> None:
    """Adds to `grad_VD` what tokens bring, in place: rows of one word are summed in fp32 and rounded with the sum.

    `padding_index` is the word that gets nothing, or −1.
    """
    words_W, place_N = tokens_BT.flatten().unique(return_inverse=True)
    wide = torch.promote_types(grad_VD.dtype, torch.float32)
    grad_ND = grad_BTD.reshape(-1, grad_BTD.shape[-1])
    for start in range(0, grad_ND.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        sums_WC = torch.ops.aten.embedding_dense_backward(
            grad_ND[:, columns].to(wide), place_N, len(words_W), -1, False
        )
        if padding_index >= 0:
            sums_WC.masked_fill_((words_W == padding_index)[:, None], 0)
        part_VC = grad_VD[:, columns]
        part_VC.index_copy_(0, words_W, sums_WC.add_(part_VC.index_select(0, words_W)).to(grad_VD.dtype))
