"""Which positions belong together, where that is said by tensors and not by kernels.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optune.models.cache import Cache


def lengths_of(positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """How long the row or document of each position is, (B, 1) or (B, T)."""
    if documents_BT is None:
        return positions_BT.amax(1, keepdim=True) + 1
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return torch.where(same_BTT, positions_BT[:, None, :], 0).amax(-1) + 1


def make_mask(
    count: int,
    device: torch.device,
    window: int | None,
    documents_BT: Tensor | None,
    cache: Cache | None,
    slots: Tensor | None,
) -> Tensor | None:
    """Which keys each new token sees. None where `attend` gets it right by itself."""
    if cache is None or slots is None or max(cache.lengths) == 0:
        queries, keys = torch.arange(count, device=device)[None], torch.arange(count, device=device)
        if documents_BT is None and (window is None or count <= window):
            return None
    else:
        queries, keys = slots, torch.arange(max(cache.lengths) + count, device=device)
        if count == 1 and len(slots) == 1 and (window is None or len(keys) <= window):
            return None
    visible = keys <= queries[:, :, None]
    if window is not None:
        visible &= keys > queries[:, :, None] - window
    if documents_BT is not None:
        visible = visible & (documents_BT[:, :, None] == documents_BT[:, None, :])
    return visible[:, None]
