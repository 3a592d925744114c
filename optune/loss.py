"""Losses: sums over targets, never means, so that the training step alone decides what a step is divided by.

Shapes: B rows, T positions, D width, V vocabulary, N targets, C targets in one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from optune.types import IGNORE, Microbatch

Loss = Callable[[Any, Tensor, Microbatch], Tensor]
"""`loss(model, hidden_BTD, microbatch)` gives the fp32 sum over the targets of the microbatch; `hidden_BTD` is the
output of the final norm."""

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in fp32."""


def next_token_loss(model: Any, hidden_BTD: Tensor, microbatch: Microbatch) -> Tensor:
    """The cross-entropy of every target, each times its weight, summed in fp32 (float64 for a float64 model): a scalar.

    Positions without a target cost nothing: only the hidden states of targets meet the head, and never more than
    `CHUNK_ELEMENTS` logits are alive.
    """
    counted_BT = microbatch.labels_BT != IGNORE
    hidden_ND, labels_N = hidden_BTD[counted_BT], microbatch.labels_BT[counted_BT]
    weights_N = None if microbatch.weights_BT is None else microbatch.weights_BT[counted_BT]
    return linear_cross_entropy_sum(hidden_ND, model.lm_head, labels_N, weights_N)


def linear_cross_entropy_sum(hidden_ND: Tensor, head: nn.Module, labels_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """The sum over N of weight × (logsumexp(logits) − logits[label]), logits = head(hidden), in fp32.

    A plain bias-free linear head takes the fused path, which makes both gradients during the forward pass and so
    never sees a chunk of logits twice. Any other head (adapters, a bias), and any head watched by a
    `TorchFunctionMode`, which must see an ordinary linear layer, takes the open path.
    """
    if type(head) is nn.Linear and head.bias is None and not has_torch_function((head.weight,)):
        if weights_N is None:
            weights_N = torch.ones_like(labels_N, dtype=torch.float32)
        return _FusedLinearCrossEntropy.apply(hidden_ND, head.weight, labels_N, weights_N)  # type: ignore[no-any-return]
    logits_NV = head(hidden_ND)
    losses_N = F.cross_entropy(logits_NV.to(_accumulation_dtype(logits_NV)), labels_N, reduction="none")
    return losses_N.sum() if weights_N is None else (losses_N * weights_N).sum()


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in chunks of targets; gradients of sums over chunks are accumulated in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=_accumulation_dtype(hidden_ND), device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD: Tensor | None = None
        chunks = _chunk_slices(len(labels_N), weight_VD.shape[0])
        for chunk in chunks:
            logits_CV = hidden_ND[chunk] @ weight_VD.T
            loss, grad_logits_CV = _chunk_loss(
                logits_CV, labels_N[chunk], weights_N[chunk], needs_hidden or needs_weight
            )
            total += loss
            if grad_hidden_ND is not None:
                torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_ND[chunk])
            if needs_weight:
                part_VD = grad_logits_CV.T @ hidden_ND[chunk]
                if grad_weight_VD is None:
                    grad_weight_VD = part_VD if len(chunks) == 1 else part_VD.to(total.dtype)
                else:
                    grad_weight_VD += part_VD
        if grad_weight_VD is None and needs_weight:
            grad_weight_VD = torch.zeros_like(weight_VD)
        ctx.grads = (grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_total,) = grad_outputs
        if ctx.grads is None:
            raise RuntimeError("the gradients of linear_cross_entropy_sum are freed by its first backward")
        (grad_hidden_ND, grad_weight_VD), ctx.grads = ctx.grads, None
        if grad_hidden_ND is not None:
            grad_hidden_ND.mul_(grad_total)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.mul_(grad_total).to(ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunk_slices(num_targets: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_targets)) for start in range(0, num_targets, size)]


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """The weighted loss of a chunk and, in the logits' dtype, their gradient (softmax − one-hot) × weight."""
    dtype = logits_CV.dtype
    logits_CV = logits_CV.to(_accumulation_dtype(logits_CV))
    logsumexp_C = logits_CV.logsumexp(dim=1)
    picked_C = logits_CV.gather(1, labels_C[:, None])[:, 0]
    loss = ((logsumexp_C - picked_C) * weights_C).sum()
    if not needs_grad:
        return loss, logits_CV
    logits_CV.sub_(logsumexp_C[:, None]).exp_()
    logits_CV.scatter_add_(1, labels_C[:, None], torch.full_like(picked_C, -1.0)[:, None])
    return loss, logits_CV.mul_(weights_C[:, None]).to(dtype)
