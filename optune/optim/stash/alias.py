"""Gradients wait in the storage of the working weights, which nobody reads until the step rewrites them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optune.optim.buckets import Bucket, Entry
from optune.optim.stash.base import Stash
from optune.optim.stepper import SkipCounter
from optune.optim.update import Update


class AliasStash(Stash):
    """Needs fp32 master weights. Bitwise the update after backward, for no memory at all.

    A block's low-precision working weight is dead once the block's backward is over, and is computed anew from its
    master in the step. So the gradient, of the same shape and dtype, is copied over it and freed. Were the weight still
    needed in this backward, autograd would see the changed version and stop. Parameters without a master hold their
    gradient.
    """

    name = "alias"
    frees_gradients = True

    def __init__(self, update: Update, buckets: Sequence[Bucket], skips: SkipCounter, reason: str = "") -> None:
        super().__init__(update, buckets, skips, reason)
        self._aliased: dict[int, Entry] = {}

    @torch.no_grad()
    def take(self, bucket: Bucket) -> None:
        self.update.measure(bucket.entries)
        for entry in bucket.entries:
            if entry.has_master and entry.weight.grad is not None:
                entry.weight.copy_(entry.weight.grad)
                entry.weight.grad = None
                self._aliased[entry.index] = entry

    def restore(self, part: Bucket) -> None:
        for entry in part.entries:
            if self._aliased.pop(entry.index, None) is not None:
                entry.held.grad = entry.weight.detach().float()

    def drop(self) -> None:
        super().drop()
        self.update.rewrite_weights(list(self._aliased.values()))
        self._aliased = {}
