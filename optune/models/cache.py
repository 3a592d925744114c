"""Keys and values of the tokens that a decoder has seen, so that generating reads each token once.

Shapes: B rows, K key/value heads, S slots, T new tokens, H head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Room for `length` tokens in each of `rows` rows, allocated at once. The slot of a token is its place in its row.

    A forward pass writes its tokens behind the `lengths` of the rows and adds them. Rows of unequal length are padded
    on the right; `forget_padding` then says how long each one really is, and later tokens overwrite the padding.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, rows, heads, length, head_dim)
        self.keys_LBKSH = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBKSH = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * rows

    @property
    def room(self) -> int:
        return self.keys_LBKSH.shape[3]

    def slots(self, count: int) -> Tensor:
        """Where the next `count` tokens of each row go: (B, T), or (1, T) where all rows are equally long."""
        lengths = self.lengths[:1] if len(set(self.lengths)) == 1 else self.lengths
        device = self.keys_LBKSH.device
        return torch.tensor(lengths, device=device)[:, None] + torch.arange(count, device=device)

    def update(self, layer: int, key_BKTH: Tensor, value_BKTH: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new keys and values at `slots`; returns everything up to the longest row's end."""
        count = key_BKTH.shape[2]
        end = max(self.lengths) + count
        if end > self.room:
            raise ValueError(f"the cache has room for {self.room} tokens a row; {end} are needed")
        keys_BKSH, values_BKSH = self.keys_LBKSH[layer], self.values_LBKSH[layer]
        if len(slots) == 1:
            keys_BKSH[:, :, end - count : end] = key_BKTH
            values_BKSH[:, :, end - count : end] = value_BKTH
        else:
            index = slots[:, None, :, None].expand_as(key_BKTH)
            keys_BKSH.scatter_(2, index, key_BKTH)
            values_BKSH.scatter_(2, index, value_BKTH)
        return keys_BKSH[:, :, :end], values_BKSH[:, :, :end]

    def advance(self, count: int) -> None:
        self.lengths = [length + count for length in self.lengths]

    def forget_padding(self, lengths: list[int]) -> None:
        """Shortens each row to its real length."""
        self.lengths = list(lengths)
