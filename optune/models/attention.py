"""Causal attention on CPUs, for whole rows, for rows packed into one sequence, and within a sliding window.

torch's own kernel (`F.scaled_dot_product_attention`) takes twice the time in bf16 where there are no matrix tiles, and
needs a mask of T × T, and all products under it, as soon as rows are packed. Here the work goes in small tiles, a few
queries against the keys that they see, which stay in the second-level cache; rows that do not see each other never
meet. Scores and their softmax are fp32, sums over tiles too. Nothing of size T × T exists, and nothing but the three
inputs is kept for the backward pass, which makes the tiles again.

Formulas: FlashAttention (arXiv 2205.14135), without its running softmax, because a tile holds all keys of its queries.

Shapes: B rows, T positions, N query heads, K key heads, G = N / K query heads that share a key head, H head_dim,
P pairs of a row and a key head, Q queries of a tile, S keys that they see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from optune import kernels
from optune.models import native_attention

QUERIES = 64
"""Queries of a tile."""
TILE_ELEMENTS = 2**20
"""Scores held at once, 4 MiB; so many pairs go together."""


def causal_attention(
    query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, documents_BT: Tensor | None, window: int | None
) -> Tensor:
    """softmax(q kᵀ / √H) v over the keys at or before each query, as (B, N, T, H) in the inputs' dtype.

    `documents_BT` numbers the rows of a pack: a query sees the keys of its own number only, and a number's positions
    stand together, else ValueError. A `window` limits each query to that many keys, its own included.
    """
    return torch.ops.optune.causal_attention(query_BNTH, key_BKTH, value_BKTH, documents_BT, window)


@dataclass(frozen=True)
class _Tile:
    """`queries` against `keys` of some pairs, positions counted in the segment."""

    queries: slice
    keys: slice
    late_QS: Tensor
    """−inf where one of the last keys comes after a query; 0 elsewhere."""
    early_QS: Tensor | None
    """The same for the first keys where they lie before a query's window."""
    window: int | None

    def mask(self, scores_PGQS: Tensor) -> None:
        scores_PGQS[..., -self.late_QS.shape[1] :] += self.late_QS
        if self.early_QS is not None:
            scores_PGQS[..., : self.early_QS.shape[1]] += self.early_QS


def _tiles(length: int, window: int | None, dtype: torch.dtype) -> Iterator[_Tile]:
    """Of a segment of `length` positions, those from the first query on."""
    square_QQ = torch.full((QUERIES, QUERIES), -math.inf, dtype=dtype).triu_(1)
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        count = stop - start
        first = 0 if window is None else max(0, start - window + 1)
        early_QS = None
        if window is not None and stop - window > first:
            positions_Q, positions_S = torch.arange(start, stop), torch.arange(first, stop - window)
            too_early_QS = positions_S <= positions_Q[:, None] - window
            early_QS = torch.zeros(too_early_QS.shape, dtype=dtype).masked_fill_(too_early_QS, -math.inf)
        yield _Tile(slice(start, stop), slice(first, stop), square_QQ[:count, :count], early_QS, window)


def _parts(
    shape: torch.Size, key_heads: int, documents_BT: Tensor | None, window: int | None
) -> Iterator[tuple[slice, slice]]:
    """Which pairs go together, and their positions."""
    rows, heads, length, _ = shape
    segments = [(slice(0, rows * key_heads), slice(0, length))]
    if documents_BT is not None:
        segments = [
            (slice(row * key_heads, (row + 1) * key_heads), slice(start, stop))
            for row, start, stop in _segments(documents_BT)
        ]
    for pairs, positions in segments:
        seen = positions.stop - positions.start
        if window is not None:
            seen = min(seen, window + QUERIES)
        size = max(1, TILE_ELEMENTS // (heads // key_heads * QUERIES * max(seen, 1)))
        for first in range(pairs.start, pairs.stop, size):
            yield slice(first, min(first + size, pairs.stop)), positions


def _segments(documents_BT: Tensor) -> list[tuple[int, int, int]]:
    """The runs of equal numbers: row, first position, one past the last."""
    found = []
    for row, numbers in enumerate(documents_BT.tolist()):
        runs = [(number, len(list(run))) for number, run in groupby(numbers)]
        if len({number for number, _ in runs}) != len(runs):
            raise ValueError(f"the positions of a document stand apart in row {row}: {[number for number, _ in runs]}")
        start = 0
        for _, count in runs:
            found.append((row, start, start + count))
            start += count
    return found


def _weights(query_PGQH: Tensor, key_PSH: Tensor, tile: _Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) of a tile, fp32, and the same rounded to `dtype`; the queries are scaled already. (P, G·Q, S)."""
    pairs, groups, count, _ = query_PGQH.shape
    scores = torch.bmm(query_PGQH.flatten(1, 2), key_PSH.transpose(1, 2))
    rounded = scores if dtype == scores.dtype else torch.empty_like(scores, dtype=dtype)
    if native := kernels.find(rounded):
        sizes = pairs * groups, count, scores.shape[-1], tile.queries.start - tile.keys.start, tile.window or 0
        native.causal_softmax(scores, None if rounded is scores else rounded, *sizes)
        return scores, rounded
    tile.mask(scores.view(pairs, groups, count, -1))
    weights = torch.softmax(scores, -1)
    return weights, weights.to(dtype)


def _score_gradients(weights: Tensor, grad_weights: Tensor) -> Tensor:
    """Of the scores of a tile, in the dtype of `grad_weights`, whose memory may be used."""
    if weights.dtype == torch.float32 and (native := kernels.find(grad_weights)):
        native.softmax_backward(weights, grad_weights, weights.shape[0] * weights.shape[1], weights.shape[2])
        return grad_weights
    wide = grad_weights.to(weights.dtype)
    return torch._softmax_backward_data(wide, weights, -1, weights.dtype).to(grad_weights.dtype)  # pyright: ignore


def _by_pairs(query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query_PGTH, key_PTH and value_PTH."""
    key_heads = key_BKTH.shape[1]
    return query_BNTH.unflatten(1, (key_heads, -1)).flatten(0, 1), key_BKTH.flatten(0, 1), value_BKTH.flatten(0, 1)


def _make_queries(like_BNTH: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
    """New memory of the queries' size as (B, T, N, H), and a view of it as (B, K, G, T, H)."""
    rows, heads, length, width = like_BNTH.shape
    made_BTNH = like_BNTH.new_empty(rows, length, heads, width)
    return made_BTNH, made_BTNH.unflatten(2, (key_heads, -1)).permute(0, 2, 3, 1, 4)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.library.custom_op("optune::causal_attention", mutates_args=())
def _forward(
    query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, documents_BT: Tensor | None, window: int | None
) -> Tensor:
    if native := native_attention.find(query_BNTH, key_BKTH, value_BKTH):
        segments = _native_segments(query_BNTH.shape, documents_BT)
        return native_attention.forward(native, query_BNTH, key_BKTH, value_BKTH, segments, window)
    key_heads, dtype, wide = key_BKTH.shape[1], query_BNTH.dtype, _wide(query_BNTH)
    query_PGTH, key_PTH, value_PTH = _by_pairs(query_BNTH, key_BKTH, value_BKTH)
    out_BTNH, out_BKGTH = _make_queries(query_BNTH, key_heads)
    for pairs, positions in _parts(query_BNTH.shape, key_heads, documents_BT, window):
        part = _Part(query_PGTH, key_PTH, value_PTH, pairs, positions, wide)
        for tile in _tiles(part.length, window, wide):
            _, weights = _weights(part.queries(tile), part.key_PTH[:, tile.keys], tile, dtype)
            mixed = torch.bmm(weights, part.value_PTH[:, tile.keys]).unflatten(1, (query_PGTH.shape[1], -1))
            _write(out_BKGTH, mixed, pairs, _shift(tile.queries, positions.start))
    return out_BTNH.transpose(1, 2)


def _native_segments(shape: torch.Size, documents_BT: Tensor | None) -> list[tuple[int, int, int]]:
    rows, _, length, _ = shape
    return [(row, 0, length) for row in range(rows)] if documents_BT is None else _segments(documents_BT)


def _shift(positions: slice, by: int) -> slice:
    return slice(positions.start + by, positions.stop + by)


def _write(target_BKGTH: Tensor, made_PGQH: Tensor, pairs: slice, positions: slice) -> None:
    """Pairs of whole rows in one copy, others one by one."""
    key_heads = target_BKGTH.shape[1]
    if pairs.start % key_heads == 0 and pairs.stop % key_heads == 0:
        rows = slice(pairs.start // key_heads, pairs.stop // key_heads)
        target_BKGTH[rows, :, :, positions] = made_PGQH.unflatten(0, (-1, key_heads))
        return
    for index, pair in enumerate(range(pairs.start, pairs.stop)):
        target_BKGTH[pair // key_heads, pair % key_heads, :, positions] = made_PGQH[index]


class _Part:
    """Some pairs in one segment: what their tiles are cut from."""

    def __init__(
        self, query_PGTH: Tensor, key_PTH: Tensor, value_PTH: Tensor, pairs: slice, positions: slice, wide: torch.dtype
    ) -> None:
        self.length = positions.stop - positions.start
        self.scale = query_PGTH.shape[-1] ** -0.5
        self.key_PTH = key_PTH[pairs, positions].to(wide)
        self.value_PTH = value_PTH[pairs, positions]
        self._query_PGTH = query_PGTH[pairs, :, positions]
        self._wide = wide

    def queries(self, tile: _Tile) -> Tensor:
        """The tile's queries, times 1 / √H, fp32."""
        return self._query_PGTH[:, :, tile.queries].to(self._wide) * self.scale


@_forward.register_fake
def _(
    query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, documents_BT: Tensor | None, window: int | None
) -> Tensor:
    return _make_queries(query_BNTH, key_BKTH.shape[1])[0].transpose(1, 2)


@torch.library.custom_op("optune::causal_attention_backward", mutates_args=())
def _backward(
    grad_BNTH: Tensor,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    documents_BT: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if native := native_attention.find(grad_BNTH, query_BNTH, key_BKTH, value_BKTH):
        segments = _native_segments(query_BNTH.shape, documents_BT)
        return native_attention.backward(native, grad_BNTH, query_BNTH, key_BKTH, value_BKTH, segments, window)
    key_heads, dtype, wide = key_BKTH.shape[1], query_BNTH.dtype, _wide(query_BNTH)
    query_PGTH, key_PTH, value_PTH = _by_pairs(query_BNTH, key_BKTH, value_BKTH)
    grad_PGTH = grad_BNTH.unflatten(1, (key_heads, -1)).flatten(0, 1)
    grad_query_BTNH, grad_query_BKGTH = _make_queries(query_BNTH, key_heads)
    grad_key_PTH, grad_value_PTH = torch.empty_like(key_PTH), torch.empty_like(value_PTH)
    for pairs, positions in _parts(query_BNTH.shape, key_heads, documents_BT, window):
        part = _Part(query_PGTH, key_PTH, value_PTH, pairs, positions, wide)
        narrow_key_PTH, value_PHT = key_PTH[pairs, positions], part.value_PTH.transpose(1, 2)
        sum_key_PTH, sum_value_PTH = torch.zeros_like(part.key_PTH), torch.zeros_like(part.key_PTH)
        for tile in _tiles(part.length, window, wide):
            query_PGQH = part.queries(tile)
            grad = grad_PGTH[pairs, :, _shift(tile.queries, positions.start)].flatten(1, 2)
            weights, rounded = _weights(query_PGQH, part.key_PTH[:, tile.keys], tile, dtype)
            sum_value_PTH[:, tile.keys] += torch.bmm(rounded.transpose(1, 2), grad)
            grad_scores = _score_gradients(weights, torch.bmm(grad, value_PHT[:, :, tile.keys]))
            made = torch.bmm(grad_scores, narrow_key_PTH[:, tile.keys]).mul_(part.scale)
            _write(
                grad_query_BKGTH,
                made.unflatten(1, (query_PGTH.shape[1], -1)),
                pairs,
                _shift(tile.queries, positions.start),
            )
            sum_key_PTH[:, tile.keys] += torch.bmm(grad_scores.transpose(1, 2), query_PGQH.to(dtype).flatten(1, 2))
        grad_key_PTH[pairs, positions], grad_value_PTH[pairs, positions] = sum_key_PTH, sum_value_PTH
    shape = key_BKTH.shape
    return grad_query_BTNH.transpose(1, 2), grad_key_PTH.view(shape), grad_value_PTH.view(shape)


@_backward.register_fake
def _(
    grad_BNTH: Tensor,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    documents_BT: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    made = (
        _make_queries(query_BNTH, key_BKTH.shape[1])[0].transpose(1, 2),
        key_BKTH.new_empty(key_BKTH.shape),
        value_BKTH.new_empty(value_BKTH.shape),
    )
    if native_attention.find(grad_BNTH, query_BNTH, key_BKTH, value_BKTH):
        return native_attention.lay_out(*made)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:
    query_BNTH, key_BKTH, value_BKTH, documents_BT = ctx.saved_tensors
    grads = torch.ops.optune.causal_attention_backward(
        grad_BNTH, query_BNTH, key_BKTH, value_BKTH, documents_BT, ctx.window
    )
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _count_pairs(shape: Any, documents_BT: Tensor | None, window: int | None) -> int:
    """Scores of all tiles, for a head; of whole rows where the documents are not known."""
    rows, _, length, _ = shape
    lengths = [length] * rows
    if documents_BT is not None and not isinstance(documents_BT, FakeTensor):
        lengths = [stop - start for _, start, stop in _segments(documents_BT)]
    return sum(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for length in lengths
        for tile in _tiles(length, window, torch.float32)
    )


@register_flop_formula(torch.ops.optune.causal_attention, get_raw=True)
def _count_forward(query: Tensor, key: Any, value: Any, documents: Any, window: Any, *_: Any, **__: Any) -> int:
    return 4 * query.shape[1] * query.shape[3] * _count_pairs(query.shape, documents, window)


@register_flop_formula(torch.ops.optune.causal_attention_backward, get_raw=True)
def _count_backward(grad: Any, query: Tensor, key: Any, value: Any, documents: Any, window: Any, *_: Any, **__: Any):
    return 10 * query.shape[1] * query.shape[3] * _count_pairs(query.shape, documents, window)
