"""The cross-entropy of logits that are there; in place of them their gradient, (softmax − one-hot) × weight.

Where the head is split over the vocabulary (`distributed.tensor_parallel`), each rank meets its own words and never a
logit of another's: three numbers a target go over the wire (its largest logit, its sum of exponentials, its own logit).

Shapes: V vocabulary (a rank's part of it, where it is split), C targets in one chunk, P in a part of it, S some words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optune import kernels
from optune.shards import is_sharded

PART_ON_CPU = 2**19
"""Logits worked on in fp32 at a time, so that they stay in a CPU's second-level cache."""


@dataclass(frozen=True)
class Words:
    """The part of the vocabulary that this rank of `group` has: word `start` is its first."""

    group: Any
    start: int
    largest: int
    """The most words that a rank has: all ranks cut the targets into the same chunks."""

    @staticmethod
    def of(weight_VD: Any) -> Words | None:
        """None where the head is whole."""
        if not is_sharded(weight_VD):
            return None
        mesh = weight_VD.device_mesh
        if "tensor" not in (mesh.mesh_dim_names or ("tensor",)):
            raise RuntimeError("the head is a shard, not a part of the vocabulary: it must be gathered for the loss")
        largest = math.ceil(weight_VD.shape[0] / mesh.size())
        return Words(mesh.get_group(), mesh.get_local_rank() * largest, largest)

    def reduce(self, tensor: Tensor, operation: str = "SUM") -> Tensor:
        """The sum (or MAX) over the group, in place."""
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=self.group)
        return tensor


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Of sums over `tensor`: fp32, or float64 where it is that."""
    return torch.promote_types(tensor.dtype, torch.float32)


def cut(count: int, size: int) -> list[slice]:
    """`count` in slices of `size`, the last one of what is left."""
    size = max(1, size)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def losses_(
    logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    needs_grad: bool,
    words: Words | None,
    softmax_C2: Tensor | None = None,
) -> Tensor:
    """The weighted loss of each target of a chunk; with `needs_grad` the logits become their gradient, in place.

    `softmax_C2` is filled, where it is given, with what `gradient_` makes the same gradient from: each target's largest
    logit, and its weight over its sum of exponentials.
    """
    if words is not None:
        return _split_losses_(logits_CV, labels_C, weights_C, needs_grad, words)
    if native := kernels.find(logits_CV):
        logits_CV.gather(1, labels_C[:, None])  # Raises where a label is no word: a kernel would read past the row.
        losses_C = torch.empty(len(labels_C))
        inputs = labels_C.contiguous(), weights_C.to(losses_C.dtype).contiguous()
        native.cross_entropy(logits_CV, *inputs, losses_C, softmax_C2, *logits_CV.shape, int(needs_grad))
        return losses_C
    losses_C = logits_CV.new_empty(len(labels_C), dtype=accumulation_dtype(logits_CV))
    for part in _parts_of(logits_CV):
        # In fp32 this is the chunk itself, in place; otherwise a small copy.
        wide_PV, labels_P1 = logits_CV[part].to(losses_C.dtype), labels_C[part, None]
        picked_P = wide_PV.gather(1, labels_P1)[:, 0]
        largest_P1 = wide_PV.amax(dim=1, keepdim=True)
        sums_P1 = (wide_PV.sub_(largest_P1) if needs_grad else wide_PV - largest_P1).exp_().sum(dim=1, keepdim=True)
        weights_P1 = weights_C[part, None].to(losses_C.dtype)
        losses_C[part] = ((sums_P1.log() + largest_P1)[:, 0] - picked_P) * weights_P1[:, 0]
        scales_P1 = weights_P1 / sums_P1
        if softmax_C2 is not None:
            softmax_C2[part] = torch.cat((largest_P1, scales_P1), 1)
        if needs_grad:
            wide_PV.mul_(scales_P1).scatter_add_(1, labels_P1, -weights_P1)
            if wide_PV.dtype != logits_CV.dtype:
                logits_CV[part] = wide_PV
    return losses_C


def gradient_(logits_CS: Tensor, labels_C: Tensor, weights_C: Tensor, softmax_C2: Tensor, first: int) -> None:
    """The logits of some words, from number `first` on, become their gradient, in place: bit for bit that of
    `losses_`, which gave `softmax_C2`."""
    rows, words = logits_CS.shape
    if native := kernels.find(logits_CS):
        inputs = labels_C.contiguous(), weights_C.to(softmax_C2.dtype).contiguous(), softmax_C2
        native.cross_entropy_gradient(logits_CS, *inputs, rows, words, first)
        return
    labels_C = labels_C - first
    has_label_C = (labels_C >= 0) & (labels_C < words)
    labels_C, minus_C = labels_C.where(has_label_C, 0), -weights_C.to(softmax_C2.dtype).where(has_label_C, 0)
    for part in _parts_of(logits_CS):
        wide_PS = logits_CS[part].to(softmax_C2.dtype)
        wide_PS.sub_(softmax_C2[part, :1]).exp_().mul_(softmax_C2[part, 1:])
        wide_PS.scatter_add_(1, labels_C[part, None], minus_C[part, None])
        if wide_PS.dtype != logits_CS.dtype:
            logits_CS[part] = wide_PS


def _parts_of(logits_CV: Tensor) -> list[slice]:
    rows, words = logits_CV.shape
    return cut(rows, PART_ON_CPU // words if logits_CV.device.type == "cpu" else rows)


def _split_losses_(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, needs_grad: bool, words: Words) -> Tensor:
    """`losses_` where this rank has its own words only."""
    wide_CV = logits_CV.to(accumulation_dtype(logits_CV))
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
    return (logsumexp_C - picked_C) * weights_C


def _split_logsumexp(logits_CV: Tensor, labels_C: Tensor, has_label_C: Tensor, words: Words) -> tuple[Tensor, Tensor]:
    """logsumexp over the words of all ranks, and the logit of each target, which one of them has."""
    largest_C = words.reduce(logits_CV.amax(dim=1), "MAX")
    picked_C = logits_CV.gather(1, labels_C[:, None])[:, 0].where(has_label_C, 0)
    sums_C = (logits_CV - largest_C[:, None]).exp_().sum(dim=1)
    sums_C, picked_C = words.reduce(torch.stack((sums_C, picked_C)))
    return sums_C.log() + largest_C, picked_C
