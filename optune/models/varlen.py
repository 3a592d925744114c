"""Attention for packs on CUDA: torch's kernel for sequences of several lengths, behind one another without padding.

A mask of T × T would be read for every pair, seen or not.

Shapes: B rows, T positions, N query heads, K key heads, H head_dim, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_HEAD = 256
"""Elements of a head that the kernel takes."""


@dataclass(frozen=True)
class Sequences:
    """Where sequences begin in all positions of a microbatch, row behind row: int32, with the end as S + 1st; and the
    tokens of the longest."""

    starts_S1: Tensor
    longest: int


def find_sequences(documents_BT: Tensor) -> Sequences:
    """The runs of equal numbers in each row."""
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    end = begins_BT.new_tensor([documents_BT.numel()], dtype=torch.int64)
    starts_S1 = torch.cat((begins_BT.flatten().nonzero()[:, 0], end)).to(torch.int32)
    return Sequences(starts_S1, int(starts_S1.diff().max()))


def fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes such inputs."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim <= LARGEST_HEAD


def varlen_attention(
    query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor, sequences: Sequences, window: int | None
) -> Tensor:
    """Causal attention within each sequence, as (B, N, T, H); a `window` limits a query to that many keys."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BNTH, key_BKTH, value_BKTH))
    starts_S1, longest = sequences.starts_S1, sequences.longest
    out = varlen_attn(
        query, key, value, starts_S1, starts_S1, longest, longest,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unflatten(0, (query_BNTH.shape[0], -1)).transpose(1, 2)
