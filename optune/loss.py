"""Losses: sums over targets, never means, so that the training step alone decides what a step is divided by.

Where the head is split over the vocabulary (`distributed.tensor_parallel`), each rank meets its own words and never a
logit of another's: three numbers a target go over the wire (its largest logit, its sum of exponentials, its own logit).

Shapes: B rows, T positions, D width, V vocabulary (a rank's part of it, where it is split), N targets, C targets in
one chunk, P in a part of it.
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

from optune import kernels
from optune.shards import is_sharded
from optune.types import IGNORE, Microbatch

Loss = Callable[[Any, Tensor, Microbatch], Tensor]
"""`loss(model, hidden_BTD, microbatch)` gives the fp32 sum over the targets of the microbatch; `hidden_BTD` is the
output of the final norm."""

CHUNK_BYTES = 2**26
"""Of the logits held at once, 64 MiB, in the head's dtype."""
ROWS = 64
"""A CPU's products of so many rows, or a multiple, are the fastest: 682 of them take longer than 768."""
PART_ON_CPU = 2**19
"""Logits worked on in fp32 at a time, so that they stay in a CPU's second-level cache."""


def next_token_loss(model: Any, hidden_BTD: Tensor, microbatch: Microbatch) -> Tensor:
    """The cross-entropy of every target, each times its weight, summed in fp32 (float64 for a float64 model): a scalar.

    Positions without a target cost nothing: only the hidden states of targets meet the head, and never more than
    `CHUNK_BYTES` of logits are alive.
    """
    counted_BT = microbatch.labels_BT != IGNORE
    hidden_ND, labels_N = hidden_BTD[counted_BT], microbatch.labels_BT[counted_BT]
    weights_N = None if microbatch.weights_BT is None else microbatch.weights_BT[counted_BT]
    shared_VD = getattr(hidden_BTD, "head_weight_VD", None)
    return linear_cross_entropy_sum(hidden_ND, model.lm_head, labels_N, weights_N, shared_VD)


def linear_cross_entropy_sum(
    hidden_ND: Tensor, head: nn.Module, labels_N: Tensor, weights_N: Tensor | None, shared_VD: Tensor | None = None
) -> Tensor:
    """The sum over N of weight × (logsumexp(logits) − logits[label]), logits = head(hidden), in fp32.

    A plain bias-free linear head takes the fused path, which makes both gradients during the forward pass and so
    never sees a chunk of logits twice. Any other head (adapters, a bias), and any head watched by a
    `TorchFunctionMode`, which must see an ordinary linear layer, takes the open path. Of a head that is split over
    ranks, all of them have the same targets, hold the sum, and have a summand of the gradient for `hidden_ND`.

    `shared_VD` is the head's weight as the embedding hands it on that shares it (`models.lookup`): the fused path sends
    its gradient there, and the other one to the head itself.
    """
    words = _Words.of(head.weight)
    if type(head) is nn.Linear and head.bias is None and not has_torch_function((head.weight,)):
        if weights_N is None:
            weights_N = torch.ones_like(labels_N, dtype=torch.float32)
        whole_VD = head.weight if shared_VD is None else shared_VD
        weight_VD = whole_VD if words is None else head.weight.to_local()  # pyright: ignore
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
        hidden_ND = _pad_rows(hidden_ND)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        chunks = _chunk_slices(len(hidden_ND), weight_VD.shape[0] if words is None else words.largest, hidden_ND.dtype)
        needs_grad = needs_hidden or needs_weight
        grad_weight_VD: Tensor | None = None
        if needs_weight:
            dtype = weight_VD.dtype if len(chunks) <= 1 else total.dtype
            grad_weight_VD = (torch.empty_like if chunks else torch.zeros_like)(weight_VD, dtype=dtype)
        # One buffer for all chunks: a new one would be made before the last one is freed. It is made last, so that it
        # is the end of what is used, where the rounded gradient will find room.
        buffer_CV = hidden_ND.new_empty(chunks[0].stop if chunks else 0, len(weight_VD))
        for chunk in chunks:
            logits_CV = torch.mm(hidden_ND[chunk], weight_VD.T, out=buffer_CV[: chunk.stop - chunk.start])
            labels_C, weights_C = labels_N[chunk], weights_N[chunk]
            total += _chunk_loss_(logits_CV[: len(labels_C)], labels_C, weights_C, needs_grad, words)
            if grad_hidden_ND is not None:
                torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[chunk])
            if grad_weight_VD is not None:
                _add_product_(grad_weight_VD, logits_CV, hidden_ND[chunk], is_first=chunk.start == 0)
        ctx.grads = (None if grad_hidden_ND is None else grad_hidden_ND[: len(labels_N)], grad_weight_VD)
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
        grad_logits_NV = logits_NV.clone()
        loss = _chunk_loss_(grad_logits_NV, labels_N, weights_N, ctx.needs_input_grad[0], words)
        ctx.save_for_backward(grad_logits_NV)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_total,), (grad_logits_NV,) = grad_outputs, ctx.saved_tensors
        return grad_logits_NV * grad_total, None, None, None


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunk_slices(num_targets: int, vocabulary: int, dtype: torch.dtype) -> list[slice]:
    """Of about the same size, which is a multiple of `ROWS` where a chunk has room for so many."""
    most = max(1, CHUNK_BYTES // (vocabulary * dtype.itemsize))
    most -= most % ROWS if most > ROWS else 0
    size = math.ceil(num_targets / max(1, math.ceil(num_targets / most)))
    return _slices(num_targets, min(most, math.ceil(size / ROWS) * ROWS))


def _pad_rows(hidden_ND: Tensor) -> Tensor:
    """On a CPU with zeros to a multiple of `ROWS`: their logits, left as they are, are 0 and so are their gradients."""
    missing = -len(hidden_ND) % ROWS
    if hidden_ND.device.type != "cpu" or len(hidden_ND) < ROWS or not missing:
        return hidden_ND
    return F.pad(hidden_ND, (0, 0, 0, missing))


def _slices(count: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _add_product_(sum_VD: Tensor, grad_logits_CV: Tensor, hidden_CD: Tensor, is_first: bool) -> None:
    """Adds grad_logitsᵀ · hidden to `sum_VD`, or begins it. A native kernel makes the product in the wider sum itself;
    torch's is rounded first, and made in parts: whole, it and its wider copy would be read from main memory."""
    if sum_VD.dtype == hidden_CD.dtype:
        sum_VD.addmm_(grad_logits_CV.T, hidden_CD, beta=0 if is_first else 1)
        return
    rows, width = hidden_CD.shape
    native = kernels.find(grad_logits_CV, hidden_CD)
    if native is not None and native.has("add_outer_products") and width % 16 == 0:
        packed = torch.empty((rows + 1) // 2, width, dtype=torch.int32)
        native.add_outer_products(sum_VD, grad_logits_CV, hidden_CD, packed, rows, *sum_VD.shape, int(is_first))
        return
    size = PART_ON_CPU // width if sum_VD.device.type == "cpu" else len(sum_VD)
    for part in _slices(len(sum_VD), size):
        product_PD = grad_logits_CV[:, part].T @ hidden_CD
        if is_first:
            sum_VD[part] = product_PD
        else:
            sum_VD[part] += product_PD


def _chunk_loss_(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, needs_grad: bool, words: _Words | None
) -> Tensor:
    """The weighted loss of a chunk; with `needs_grad` the logits become their gradient, (softmax − one-hot) × weight,
    in place."""
    if words is not None:
        return _split_loss_(logits_CV, labels_C, weights_C, needs_grad, words)
    if native := kernels.find(logits_CV):
        logits_CV.gather(1, labels_C[:, None])  # Raises where a label is no word: a kernel would read past the row.
        losses_C = torch.empty(len(labels_C))
        inputs = labels_C.contiguous(), weights_C.to(losses_C.dtype).contiguous()
        native.cross_entropy(logits_CV, *inputs, losses_C, *logits_CV.shape, int(needs_grad))
        return losses_C.sum()
    total = torch.zeros((), dtype=_accumulation_dtype(logits_CV), device=logits_CV.device)
    size = PART_ON_CPU // logits_CV.shape[1] if logits_CV.device.type == "cpu" else len(labels_C)
    for part in _slices(len(labels_C), size):
        # In fp32 this is the chunk itself, in place; otherwise a small copy.
        wide_PV, labels_P1 = logits_CV[part].to(total.dtype), labels_C[part, None]
        picked_P = wide_PV.gather(1, labels_P1)[:, 0]
        largest_P1 = wide_PV.amax(dim=1, keepdim=True)
        sums_P1 = (wide_PV.sub_(largest_P1) if needs_grad else wide_PV - largest_P1).exp_().sum(dim=1, keepdim=True)
        total += (((sums_P1.log() + largest_P1)[:, 0] - picked_P) * weights_C[part]).sum()
        if needs_grad:
            weights_P1 = weights_C[part, None].to(total.dtype)
            wide_PV.mul_(weights_P1 / sums_P1).scatter_add_(1, labels_P1, -weights_P1)
            if wide_PV.dtype != logits_CV.dtype:
                logits_CV[part] = wide_PV
    return total


def _split_loss_(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, needs_grad: bool, words: _Words) -> Tensor:
    """`_chunk_loss_` where this rank has its own words only."""
    wide_CV = logits_CV.to(_accumulation_dtype(logits_CV))
    labels_C = labels_C - words.start
    has_label_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
    labels_C = labels_C.where(has_label_C, 0)
    logsumexp_C, picked_C = _split_logsumexp(wide_CV, labels_C, has_label_C, words)
    if needs_grad:
        wide_CV.sub_(logsumexp_C[:, None]).exp_()
        wide_CV.scatter_add_(1, labels_C[:, None], -has_label_C[:, None].to(wide_CV.dtype))
        wide_CV.mul_(weights_C[:, None])
        if wide_CV.dtype != logits_CV.dtype:
            logits_CV.copy_(wide_CV)
    return ((logsumexp_C - picked_C) * weights_C).sum()


def _split_logsumexp(logits_CV: Tensor, labels_C: Tensor, has_label_C: Tensor, words: _Words) -> tuple[Tensor, Tensor]:
    """logsumexp over the words of all ranks, and the logit of each target, which one of them has."""
    largest_C = words.reduce(logits_CV.amax(dim=1), "MAX")
    picked_C = logits_CV.gather(1, labels_C[:, None])[:, 0].where(has_label_C, 0)
    sums_C = (logits_CV - largest_C[:, None]).exp_().sum(dim=1)
    sums_C, picked_C = words.reduce(torch.stack((sums_C, picked_C)))
    return sums_C.log() + largest_C, picked_C
