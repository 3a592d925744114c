"""Counts live tensor bytes, allocation by allocation: what a step holds, whatever the allocator keeps beside it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, for as long as the storage lives.

    What was there before is not counted, also where an operation gives a view of it: a parameter is first seen as the
    transpose that a linear layer multiplies with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
