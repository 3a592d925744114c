"""Losses: sums over targets, never means, so that the training step alone decides what a step is divided by.

Shapes: B rows, T positions, D width, V vocabulary (a rank's part of it, where it is split), N targets, C targets in
one chunk, S some words, P a part of the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from optune import cross_entropy, products
from optune.cross_entropy import Words, accumulation_dtype
from optune.types import IGNORE, Later, Microbatch, SharedHead

Loss = Callable[[Any, Tensor, Microbatch], Tensor]
"""`loss(model, hidden_BTD, microbatch)` gives the fp32 sum over the targets of the microbatch; `hidden_BTD` is the
output of the final norm."""

CHUNK_BYTES = 2**26
"""Of the logits held at once, 64 MiB, in the head's dtype."""
BLOCK_LOGITS = 2**24
"""On a CPU, of a head whose gradient may be made later: a product's, so that no more have to be held then."""
BLOCK_WORDS = 2**10
"""The same in words: for so many the gradient is made at a time."""
BLOCK_WORDS_ELSEWHERE = 2**14
"""On accelerators, which have to be asked for each product."""
ROWS = 64
"""A CPU's products of so many rows, or a multiple, are the fastest: 682 of them take longer than 768."""


def next_token_loss(model: Any, hidden_BTD: Tensor, microbatch: Microbatch) -> Tensor:
    """The cross-entropy of every target, each times its weight, summed in fp32 (float64 for a float64 model): a scalar.

    Positions without a target cost nothing: only the hidden states of targets meet the head, and never more than
    `CHUNK_BYTES` of logits are alive.
    """
    counted_BT = microbatch.labels_BT != IGNORE
    hidden_ND, labels_N = hidden_BTD[counted_BT], microbatch.labels_BT[counted_BT]
    weights_N = None if microbatch.weights_BT is None else microbatch.weights_BT[counted_BT]
    return linear_cross_entropy_sum(hidden_ND, model.lm_head, labels_N, weights_N, SharedHead.of(hidden_BTD))


def linear_cross_entropy_sum(
    hidden_ND: Tensor, head: nn.Module, labels_N: Tensor, weights_N: Tensor | None, shared: SharedHead | None = None
) -> Tensor:
    """The sum over N of weight × (logsumexp(logits) − logits[label]), logits = head(hidden), in fp32.

    A plain bias-free linear head takes the fused path, which makes both gradients during the forward pass and so
    never sees a chunk of logits twice. Any other head (adapters, a bias), and any head watched by a
    `TorchFunctionMode`, which must see an ordinary linear layer, takes the open path. Of a head that is split over
    ranks, all of them have the same targets, hold the sum, and have a summand of the gradient for `hidden_ND`.

    `shared` is the head's weight as the embedding hands it on that shares it (`models.lookup`): the fused path sends
    its gradient there, now or, where that is wanted, a way to make it later; the other one sends it to the head itself.
    """
    words = Words.of(head.weight)
    if type(head) is nn.Linear and head.bias is None and not has_torch_function((head.weight,)):
        if weights_N is None:
            weights_N = torch.ones_like(labels_N, dtype=torch.float32)
        whole_VD = head.weight if shared is None else shared.weight_VD
        weight_VD = whole_VD if words is None else head.weight.to_local()  # pyright: ignore
        later = None if shared is None else shared.later
        return _FusedLinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, weights_N, words, later)  # type: ignore[no-any-return]
    logits_NV = head(hidden_ND)
    if words is not None:
        weights_N = torch.ones_like(labels_N, dtype=torch.float32) if weights_N is None else weights_N
        return _SplitCrossEntropy.apply(logits_NV.to_local(), labels_N, weights_N, words)  # type: ignore[no-any-return]
    losses_N = F.cross_entropy(logits_NV.to(accumulation_dtype(logits_NV)), labels_N, reduction="none")
    return losses_N.sum() if weights_N is None else (losses_N * weights_N).sum()


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in chunks of targets; gradients of sums over chunks are accumulated in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        words: Words | None,
        later: Later | None,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        losses_N = hidden_ND.new_empty(len(labels_N), dtype=accumulation_dtype(hidden_ND))
        hidden_ND = _pad_rows(hidden_ND)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        cuts = _Cuts.of(hidden_ND, weight_VD, words, may_be_late=later is not None)
        late: _LateGradient | None = None
        grad_weight_VD: Tensor | None = None
        if needs_weight and later is not None and later.is_wanted:
            softmax_N2 = losses_N.new_empty(len(labels_N), 2)
            late = _LateGradient(hidden_ND, weight_VD.detach(), labels_N, weights_N, softmax_N2, cuts)
        elif needs_weight:
            grad_weight_VD = _begin_sum(weight_VD, cuts, losses_N.dtype)
        # One buffer for all chunks: a new one would be made before the last one is freed. It is made last, so that it
        # is the end of what is used, where the rounded gradient will find room.
        buffer_CV = hidden_ND.new_empty(cuts.most_rows(whole_chunks=late is None), len(weight_VD))
        for chunk, blocks in cuts.chunks:
            for block in blocks:
                begin = block.start - chunk.start if late is None else 0
                logits_CV = buffer_CV[begin : begin + block.stop - block.start]
                for some in cuts.words:
                    torch.mm(hidden_ND[block], weight_VD[some].T, out=logits_CV[:, some])
                labels_C, weights_C = labels_N[block], weights_N[block]
                softmax_C2 = None if late is None else late.softmax_N2[block]
                losses_N[block] = cross_entropy.losses_(
                    logits_CV[: len(labels_C)], labels_C, weights_C, needs_hidden or needs_weight, words, softmax_C2
                )
                if grad_hidden_ND is not None:
                    torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[block])
            if grad_weight_VD is not None:
                grads_CV = buffer_CV[: chunk.stop - chunk.start]
                _add_product_(grad_weight_VD, grads_CV, hidden_ND[chunk], cuts.words, is_first=chunk.start == 0)
        ctx.grads = (None if grad_hidden_ND is None else grad_hidden_ND[: len(labels_N)], grad_weight_VD, late)
        ctx.weight_dtype, ctx.later = weight_VD.dtype, later
        return sum((losses_N[chunk].sum() for chunk, _ in cuts.chunks), losses_N.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (grad_total,) = grad_outputs
        if ctx.grads is None:
            raise RuntimeError("the gradients of linear_cross_entropy_sum are freed by its first backward")
        (grad_hidden_ND, grad_weight_VD, late), ctx.grads = ctx.grads, None
        if grad_hidden_ND is not None:
            grad_hidden_ND.mul_(grad_total)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.mul_(grad_total).to(ctx.weight_dtype)
        if late is not None:
            ctx.later.make = partial(late.make, grad_total)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


@dataclass(frozen=True)
class _Cuts:
    """How the products of targets and words are cut. Where the gradient of the head's weight may be made later, they
    are small enough for that, and the same whenever it is made: so are the numbers, bit for bit."""

    chunks: list[tuple[slice, list[slice]]]
    """Targets whose logits are held at once, and in them the blocks that are multiplied at a time."""
    words: list[slice]

    @staticmethod
    def of(hidden_ND: Tensor, weight_VD: Tensor, words: Words | None, *, may_be_late: bool) -> _Cuts:
        vocabulary = weight_VD.shape[0] if words is None else words.largest
        in_chunk = CHUNK_BYTES // (vocabulary * hidden_ND.dtype.itemsize)
        chunks = _cut_evenly(0, len(hidden_ND), in_chunk)
        if not may_be_late:
            return _Cuts([(chunk, [chunk]) for chunk in chunks], [slice(0, len(weight_VD))])
        on_cpu = hidden_ND.device.type == "cpu"
        in_block = BLOCK_LOGITS // vocabulary if on_cpu else in_chunk
        blocks = [_cut_evenly(chunk.start, chunk.stop, in_block) for chunk in chunks]
        some_words = cross_entropy.cut(len(weight_VD), BLOCK_WORDS if on_cpu else BLOCK_WORDS_ELSEWHERE)
        return _Cuts(list(zip(chunks, blocks, strict=True)), some_words)

    def most_rows(self, whole_chunks: bool) -> int:
        """Of a chunk, or else of a block."""
        parts = [part for chunk, blocks in self.chunks for part in ([chunk] if whole_chunks else blocks)]
        return max((part.stop - part.start for part in parts), default=0)


@dataclass
class _LateGradient:
    """What the gradient of the head's weight is made from after all other gradients, some words at a time: the hidden
    states, and of each target's softmax two numbers. The logits are made again, a fourth product of the head beside its
    three; those of all words, and sums over chunks in fp32 of all words, never exist together.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    labels_N: Tensor
    weights_N: Tensor
    softmax_N2: Tensor
    cuts: _Cuts

    def __post_init__(self) -> None:
        self._version = self.weight_VD._version

    def make(self, grad_total: Tensor) -> Tensor:
        """The gradient, times `grad_total`. Raises RuntimeError where the weight has been changed meanwhile."""
        if self.weight_VD._version != self._version:
            raise RuntimeError("the head's weight was changed before its gradient was made")
        grad_VD = _begin_sum(self.weight_VD, self.cuts, self.weight_VD.dtype)
        if not self.cuts.chunks:
            return grad_VD
        # Memory for all words alike: new memory would be made before the last one is freed.
        first_SD = grad_VD[self.cuts.words[0]]
        wide_SD = None if len(self.cuts.chunks) == 1 else _begin_sum(first_SD, self.cuts, self.softmax_N2.dtype)
        buffer = self.hidden_ND.new_empty(self.cuts.most_rows(whole_chunks=True) * len(first_SD))
        for words in self.cuts.words:
            part_SD = grad_VD[words]
            sum_SD = part_SD if wide_SD is None else wide_SD[: len(part_SD)]
            self._sum_up(words, sum_SD, buffer)
            sum_SD.mul_(grad_total)
            if wide_SD is not None:
                part_SD.copy_(sum_SD)
        return grad_VD

    def _sum_up(self, words: slice, sum_SD: Tensor, buffer: Tensor) -> None:
        weight_SD, width = self.weight_VD[words], words.stop - words.start
        for chunk, blocks in self.cuts.chunks:
            grads_CS = buffer[: (chunk.stop - chunk.start) * width].view(-1, width)
            for block in blocks:
                logits_CS = grads_CS[block.start - chunk.start : block.stop - chunk.start]
                torch.mm(self.hidden_ND[block], weight_SD.T, out=logits_CS)
                labels_C, weights_C, softmax_C2 = self.labels_N[block], self.weights_N[block], self.softmax_N2[block]
                cross_entropy.gradient_(logits_CS[: len(labels_C)], labels_C, weights_C, softmax_C2, words.start)
            _add_product_(sum_SD, grads_CS, self.hidden_ND[chunk], [slice(0, width)], is_first=chunk.start == 0)


def _begin_sum(weight_VD: Tensor, cuts: _Cuts, wide: torch.dtype) -> Tensor:
    """Memory for the gradient: in the weight's own dtype where one product makes it. Zeros where none does."""
    dtype = weight_VD.dtype if len(cuts.chunks) <= 1 else wide
    return (torch.empty_like if cuts.chunks else torch.zeros_like)(weight_VD, dtype=dtype)


class _SplitCrossEntropy(torch.autograd.Function):
    """The weighted loss of logits of which each rank has its own words."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, words: Words) -> Tensor:
        grad_logits_NV = logits_NV.clone()
        losses_N = cross_entropy.losses_(grad_logits_NV, labels_N, weights_N, ctx.needs_input_grad[0], words)
        ctx.save_for_backward(grad_logits_NV)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_total,), (grad_logits_NV,) = grad_outputs, ctx.saved_tensors
        return grad_logits_NV * grad_total, None, None, None


def _cut_evenly(start: int, stop: int, most: int) -> list[slice]:
    """Of about the same size, `most` at most; a multiple of `ROWS` where there is room for so many."""
    most = max(1, most)
    most -= most % ROWS if most > ROWS else 0
    size = math.ceil((stop - start) / max(1, math.ceil((stop - start) / most)))
    size = min(most, math.ceil(size / ROWS) * ROWS)
    return [slice(start + part.start, start + part.stop) for part in cross_entropy.cut(stop - start, size)]


def _pad_rows(hidden_ND: Tensor) -> Tensor:
    """On a CPU with zeros to a multiple of `ROWS`: their logits, left as they are, are 0 and so are their gradients."""
    missing = -len(hidden_ND) % ROWS
    if hidden_ND.device.type != "cpu" or len(hidden_ND) < ROWS or not missing:
        return hidden_ND
    return F.pad(hidden_ND, (0, 0, 0, missing))


def _add_product_(
    sum_VD: Tensor, grad_logits_CV: Tensor, hidden_CD: Tensor, words: list[slice], *, is_first: bool
) -> None:
    """Adds grad_logitsᵀ · hidden to `sum_VD`, or begins it. A native kernel makes the product in the sum itself;
    torch's, of some `words` at a time, is rounded before a wider sum, and made in parts: whole, it and its wider copy
    would be read from main memory."""
    if products.add_product(sum_VD, grad_logits_CV.T, hidden_CD, begins=is_first):
        return
    if sum_VD.dtype == hidden_CD.dtype:
        for some in words:
            sum_VD[some].addmm_(grad_logits_CV[:, some].T, hidden_CD, beta=0 if is_first else 1)
        return
    size = cross_entropy.PART_ON_CPU // hidden_CD.shape[1] if sum_VD.device.type == "cpu" else len(sum_VD)
    for some in words:
        sum_SD, grad_logits_CS = sum_VD[some], grad_logits_CV[:, some]
        for part in cross_entropy.cut(len(sum_SD), size):
            product_PD = grad_logits_CS[:, part].T @ hidden_CD
            if is_first:
                sum_SD[part] = product_PD
            else:
                sum_SD[part] += product_PD
