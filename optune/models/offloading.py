"""Activations in host memory: what blocks keep for backward goes out while later blocks run, and comes back in time.

Forward: each tensor that a block saves is copied to pinned host memory on a stream of its own; its device memory is
free when the copy is done, at the latest when the next block has run. Backward: when the first tensor of a block is
asked for, the copies for the block below are started, so that they run beside the block's own computation. The last
block's tensors stay: they are wanted at once. Copies change no bit.

torch's `save_on_cpu` copies on the computing stream, and waits for each tensor in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from optune.errors import ConfigError
from optune.shards import local_values

SMALLEST_BYTES = 2**16
"""Smaller tensors stay: a copy of them costs more than their room."""


class Copies(Protocol):
    """Copies between a device and the host beside the computation. A ticket stands for a copy that was started."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts a copy of `tensor`, as it is when all that was computed before is done."""
        ...

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Starts a copy back, with the same strides."""
        ...

    def wait(self, ticket: Any) -> None:
        """What is computed from now on begins after the copy is done."""
        ...

    def give_back(self, host: Tensor) -> None:
        """The host copy is not needed any more."""
        ...


def check_offloading(device: torch.device, accumulation: str = "depth_first") -> None:
    """Raises ConfigError where activations cannot be moved to the host beside the computation, or none are kept."""
    if accumulation == "breadth_first":
        raise ConfigError(
            "is true, but with accumulation=breadth_first no block keeps anything for backward: it is run again",
            where="activation_offloading",
            hint="leave one of the two out",
        )
    if device.type == "cuda":
        return
    reason = (
        "what it would move to host memory is there already"
        if device.type == "cpu"
        else f"it needs copies beside the computation, which {device.type} does not have"
    )
    raise ConfigError(
        f"is true on {device}, but {reason}",
        where="activation_offloading",
        hint="use activation_checkpointing=selective, or block, which keeps only what enters each block",
    )


class Offloading:
    """Offloads the blocks of one model; the same object serves all its forward passes, one after the other."""

    def __init__(self, copies: Copies, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._copies, self._smallest_bytes = copies, smallest_bytes
        self._leaving: list[_Group] = []

    @contextmanager
    def block(self, block: nn.Module, shared: Any, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """Around the forward of each block, in order. What all blocks read, the attributes of `shared`, stays."""
        if is_first:
            self._leaving = []  # Of a pass that was not finished.
        below = self._leaving[-1] if self._leaving else None
        staying = _addresses([*block.parameters(), *vars(shared).values()])
        group = _Group(self._copies, below, None if is_last else self._smallest_bytes, staying)
        with torch.autograd.graph.saved_tensors_hooks(group.pack, group.unpack):
            yield
        # One block later than its own, so that the copies have had the time of a block.
        for earlier in self._leaving:
            earlier.leave()
        self._leaving = [] if is_last else [group]


class _Group:
    """What one block saved in one forward pass. With `smallest_bytes` None all of it stays."""

    def __init__(
        self, copies: Copies, below: _Group | None, smallest_bytes: int | None, staying: frozenset[int]
    ) -> None:
        self._copies, self._below, self._smallest_bytes, self._staying = copies, below, smallest_bytes, staying
        self._places: dict[Any, _Place] = {}
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """The place of `tensor`, one for all who save it, or the tensor itself where it stays."""
        if not self._may_leave(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(self._copies, tensor.detach())
        place.uses += 1
        return place

    def _may_leave(self, tensor: Tensor) -> bool:
        """Not weights, and nothing whose memory is also another tensor's: to copy a part of it would free nothing."""
        if self._smallest_bytes is None or type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        is_whole = storage.nbytes() == tensor.nbytes
        return is_whole and tensor.nbytes >= self._smallest_bytes and storage.data_ptr() not in self._staying

    def unpack(self, packed: Any) -> Tensor:
        stays = isinstance(packed, Tensor)
        if self._below is not None and (self._smallest_bytes is None or not stays):
            self._below.fetch()
        if stays:
            return packed
        self.fetch()
        tensor = packed.take()
        # Another backward over the same graph begins anew.
        self._is_fetched = any(place.is_due for place in self._places.values())
        return tensor

    def leave(self) -> None:
        for place in self._places.values():
            place.leave()

    def fetch(self) -> None:
        """Starts the copies back, once for each backward pass."""
        if not self._is_fetched:
            self._is_fetched = True
            for place in self._places.values():
                place.fetch()


class _Place:
    """Where a saved tensor is: on the device until `leave`, then on the host, and on the device again for its uses."""

    def __init__(self, copies: Copies, tensor: Tensor) -> None:
        self._copies, self._device = copies, tensor.device
        self._tensor: Tensor | None = tensor
        self._host, self._ticket = copies.to_host(tensor)
        self._has_left = False
        self.uses = self._taken = 0

    @property
    def is_due(self) -> bool:
        """Whether the backward pass under way has not taken it as often as it was saved."""
        return self._tensor is not None and self._has_left

    def leave(self) -> None:
        if not self._has_left:
            self._copies.wait(self._ticket)
            self._tensor, self._has_left = None, True

    def fetch(self) -> None:
        if self._has_left and self._tensor is None:
            self._tensor, self._ticket = self._copies.to_device(self._host, self._device)

    def take(self) -> Tensor:
        if not self._has_left:
            assert self._tensor is not None
            return self._tensor
        self.fetch()
        tensor = self._tensor
        assert tensor is not None
        self._copies.wait(self._ticket)
        self._taken += 1
        if self._taken == self.uses:
            self._tensor, self._taken = None, 0
        return tensor

    def __del__(self) -> None:
        # Device memory is handed out again in the order of the computing stream: no copy may still use it then.
        if self._tensor is not None:
            self._copies.wait(self._ticket)
        self._copies.give_back(self._host)


class CudaCopies:
    """Copies on a stream of their own, with pinned buffers that are used again in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: dict[Any, list[Tensor]] = {}

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        free = self._free.get(_kind(tensor))
        if free:
            host = free.pop()
        else:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        return host, self._start(host, tensor)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        # Memory is taken on the current stream, which will use and free it; the copy waits for what ran there before.
        tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        return tensor, self._start(tensor, host)

    def _start(self, target: Tensor, source: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def give_back(self, host: Tensor) -> None:
        # Its next copy waits on the same stream for the last one.
        self._free.setdefault(_kind(host), []).append(host)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype


def _addresses(values: Iterable[Any]) -> frozenset[int]:
    """Where the memory of the tensors among `values` begins."""
    tensors = [leaf for leaf in tree_iter(list(values)) if isinstance(leaf, Tensor)]
    return frozenset(local_values(tensor).untyped_storage().data_ptr() for tensor in tensors)
