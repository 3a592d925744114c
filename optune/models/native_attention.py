"""Causal attention by a native kernel, see `optune/native/attention.cpp`: the memory that it works in.

Shapes: B rows, T positions, N query heads, K key heads, H head_dim, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optune import kernels

_STRIP = 64
_GROUP = 8
"""As in attention.cpp."""
_TILE_FLOATS = 2**15
"""Scores of a tile. Backward holds up to twelve bytes for each of them, in the second-level cache."""
_LARGEST_TILE, _SMALLEST_TILE = 64, 16

Segments = Sequence[tuple[int, int, int]]
"""Row, first position, one past the last: positions that see each other."""


def find(*tensors: Tensor) -> kernels.Kernels | None:
    """The kernels where they have attention for such tensors."""
    native = kernels.find(*tensors)
    return native if native is not None and tensors[0].shape[-1] % 16 == 0 and native.has("causal_attention") else None


def forward(
    native: kernels.Kernels,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    segments: Segments,
    window: int | None,
) -> Tensor:
    """As `attention.causal_attention`."""
    inputs = [_by_positions(tensor) for tensor in (query_BNTH, key_BKTH, value_BKTH)]
    out_BTNH = torch.empty_like(inputs[0])
    for some in _split(segments):
        room = _Room(query_BNTH, key_BKTH, some, window)
        native.causal_attention(*inputs, out_BTNH, *room.segments(), *room.packed(2), *room.scratch(), *room.sizes())
    return out_BTNH.transpose(1, 2)


def backward(
    native: kernels.Kernels,
    grad_BNTH: Tensor,
    query_BNTH: Tensor,
    key_BKTH: Tensor,
    value_BKTH: Tensor,
    segments: Segments,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    inputs = [_by_positions(tensor) for tensor in (grad_BNTH, query_BNTH, key_BKTH, value_BKTH)]
    outputs = [torch.empty_like(tensor) for tensor in inputs[1:]]
    for some in _split(segments):
        room = _Room(query_BNTH, key_BKTH, some, window)
        memory = *room.packed(3), room.sums(), *room.scratch()
        native.causal_attention_backward(*inputs, *outputs, *room.segments(), *memory, *room.sizes())
    grad_query_BTNH, grad_key_BTKH, grad_value_BTKH = outputs
    return grad_query_BTNH.transpose(1, 2), grad_key_BTKH.transpose(1, 2), grad_value_BTKH.transpose(1, 2)


def lay_out(*gradients_BNTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the same shapes, as `backward` lays them out in memory."""
    query, key, value = (torch.empty_like(_by_positions(tensor)).transpose(1, 2) for tensor in gradients_BNTH)
    return query, key, value


def _by_positions(tensor: Tensor) -> Tensor:
    """(B, N, T, H) as (B, T, N, H), contiguous."""
    return tensor.transpose(1, 2).contiguous()


def _split(segments: Segments) -> Iterator[Segments]:
    """Parts that need at most twice the memory of one segment of as many positions: a short one takes a whole strip."""
    limit = 2 * _round_up(sum(stop - start for _, start, stop in segments), _STRIP)
    part: list[tuple[int, int, int]] = []
    padded = 0
    for segment in segments:
        size = _round_up(segment[2] - segment[1], _STRIP)
        if part and padded + size > limit:
            yield part
            part, padded = [], 0
        part.append(segment)
        padded += size
    if part:
        yield part


class _Room:
    """The kernel's arguments about sizes, and the memory that it works in."""

    def __init__(self, query_BNTH: Tensor, key_BKTH: Tensor, segments: Segments, window: int | None) -> None:
        _, self._heads, self._length, self._head_dim = query_BNTH.shape
        self._dtype = query_BNTH.dtype
        self._key_heads, self._window = key_BKTH.shape[1], window or 0
        self._padded, rows = 0, []
        for row, start, stop in segments:
            rows.append((row, start, stop - start, self._padded))
            self._padded += _round_up(stop - start, _STRIP)
        self._segments_S4 = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        longest = max((stop - start for _, start, stop in segments), default=0)
        tile = min(max(_TILE_FLOATS // max(longest, 1), _SMALLEST_TILE), _LARGEST_TILE)
        self._tile = tile // _GROUP * _GROUP
        seen = longest if window is None else min(longest, window + self._tile)
        self._widest = _round_up(seen, _STRIP) + _STRIP

    def segments(self) -> tuple[Tensor, int]:
        return self._segments_S4, len(self._segments_S4)

    def packed(self, parts: int) -> tuple[Tensor, int]:
        size = parts * self._key_heads * self._padded * self._head_dim
        return torch.empty(size, dtype=self._dtype), self._padded

    def sums(self) -> Tensor:
        return torch.empty(2 * self._heads * self._padded * self._head_dim)

    def scratch(self) -> tuple[Tensor, int]:
        """For each thread: rows of two tensors, and scores and weights in fp32; they are rounded into operands that
        take as much as one of them, or are operands themselves."""
        rows = 2 * self._tile * self._head_dim * self._dtype.itemsize // torch.float32.itemsize
        size = rows + (2 if self._dtype == torch.float32 else 3) * self._tile * self._widest
        return torch.empty(torch.get_num_threads(), size), size

    def sizes(self) -> tuple[int, ...]:
        return self._length, self._heads, self._key_heads, self._head_dim, self._tile, self._window


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to
