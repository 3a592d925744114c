"""Losses: sums over targets, never means, so that the training step alone decides what a step is divided by.

Where the head is split over the vocabulary (`distributed.tensor_parallel`), each rank meets its own words and never a
logit of another's: three numbers a target go over the wire (its largest logit, its sum of exponentials, its own logit).

Shapes: B rows, T positions, D width, V vocabulary (a rank's part of it, where it is split), N targets, C targets in
one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from optune.shards import is_sharded
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
    `TorchFunctionMode`, which must see an ordinary linear layer, takes the open path. Of a head that is split over
    ranks, all of them have the same targets, hold the sum, and have a summand of the gradient for `hidden_ND`.
    """
    words = _Words.of(head.weight)
    if type(head) is nn.Linear and head.bias is None and not has_torch_function((head.weight,)):
        if weights_N is None:
            weights_N = torch.ones_like(labels_N, dtype=torch.float32)
        weight_VD = head.weight if words is None else head.weight.to_local()  # pyright: ignore
        return _FusedLinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, weights_N, words)  # type: ignore[no-any-return]
    logits_NV = head(hidden_ND)
    if words is not None:
        weights_N = torch.ones_like(labels_N, dtype=torch.float32) if weights_N is None else weights_N
        return _SplitCrossEntropy.apply(logits_NV.to_local(), labels_N, weights_N, words)  # type: ignore[no-any-return]
    losses_N = F.cross_entropy(logits_NV.to(_accumulation_dtype(logits_NV)), labels_N, reduction="none")
    return losses_N.sum() if weights_N is None else (losses_N * weights_N).sum()


@dataclass(frozen=True)
class _Words:
    """The part of the vocabulary that this rank of `group` has: word `start` is its first."""

    group: Any
    start: int
    largest: int
    """The most words that a rank has: all ranks cut the targets into the same chunks."""

    @staticmethod
    def of(weight_VD: Any) -> _Words | None:
        """None where the head is whole."""
        if not is_sharded(weight_VD):
            return None
        mesh = weight_VD.device_mesh
        if "tensor" not in (mesh.mesh_dim_names or ("tensor",)):
            raise RuntimeError("the head is a shard, not a part of the vocabulary: it must be gathered for the loss")
        largest = math.ceil(weight_VD.shape[0] / mesh.size())
        return _Words(mesh.get_group(), mesh.get_local_rank() * largest, largest)

    def reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """The sum (or MAX) over the group, in place."""
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=self.group)
        return tensor


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in chunks of targets; gradients of sums over chunks are accumulated in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, weights_N: Tensor, words: _Words | None
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=_accumulation_dtype(hidden_ND), device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD: Tensor | None = None
        chunks = _chunk_slices(len(labels_N), weight_VD.shape[0] if words is None else words.largest)
        for chunk in chunks:
            logits_CV = hidden_ND[chunk] @ weight_VD.T
            loss, grad_logits_CV = _chunk_loss(
                logits_CV, labels_N[chunk], weights_N[chunk], needs_hidden or needs_weight, words
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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad_total,) = grad_outputs
        if ctx.grads is None:
            raise RuntimeError("the gradients of linear_cross_entropy_sum are freed by its first backward")
        (grad_hidden_ND, grad_weight_VD), ctx.grads = ctx.grads, None
        if grad_hidden_ND is not None:
            grad_hidden_ND.mul_(grad_total)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.mul_(grad_total).to(ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None


class _SplitCrossEntropy(torch.autograd.Function):
    """The weighted loss of logits of which each rank has its own words."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, words: _Words) -> Tensor:
        loss, grad_logits_NV = _chunk_loss(logits_NV.clone(), labels_N, weights_N, ctx.needs_input_grad[0], words)
        ctx.save_for_backward(grad_logits_NV)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_total,), (grad_logits_NV,) = grad_outputs, ctx.saved_tensors
        return grad_logits_NV * grad_total, None, None, None


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunk_slices(num_targets: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_targets)) for start in range(0, num_targets, size)]


def _chunk_loss(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, needs_grad: bool, words: _Words | None
) -> tuple[Tensor, Tensor]:
    """The weighted loss of a chunk and, in the logits' dtype, their gradient (softmax − one-hot) × weight."""
    dtype = logits_CV.dtype
    logits_CV = logits_CV.to(_accumulation_dtype(logits_CV))
    if words is None:
        logsumexp_C = logits_CV.logsumexp(dim=1)
        picked_C = logits_CV.gather(1, labels_C[:, None])[:, 0]
        minus_one_C = torch.full_like(picked_C, -1.0)
    else:
        labels_C = labels_C - words.start
        has_label_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
        labels_C = labels_C.where(has_label_C, 0)
        logsumexp_C, picked_C = _split_logsumexp(logits_CV, labels_C, has_label_C, words)
        minus_one_C = -has_label_C.to(logits_CV.dtype)
    loss = ((logsumexp_C - picked_C) * weights_C).sum()
    if not needs_grad:
        return loss, logits_CV
    logits_CV.sub_(logsumexp_C[:, None]).exp_()
    logits_CV.scatter_add_(1, labels_C[:, None], minus_one_C[:, None])
    return loss, logits_CV.mul_(weights_C[:, None]).to(dtype)


def _split_logsumexp(logits_CV: Tensor, labels_C: Tensor, has_label_C: Tensor, words: _Words) -> tuple[Tensor, Tensor]:
    """logsumexp over the words of all ranks, and the logit of each target, which one of them has."""
    largest_C = words.reduce(logits_CV.amax(dim=1), "MAX")
    picked_C = logits_CV.gather(1, labels_C[:, None])[:, 0].where(has_label_C, 0)
    sums_C = (logits_CV - largest_C[:, None]).exp_().sum(dim=1)
    sums_C, picked_C = words.reduce(torch.stack((sums_C, picked_C)))
    return sums_C.log() + largest_C, picked_C
