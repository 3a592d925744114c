"""Gradients beyond the watermark wait in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from optune.optim.buckets import Bucket, Entry
from optune.optim.kinds import local_part
from optune.optim.stash.base import Stash
from optune.optim.stepper import SkipCounter
from optune.optim.update import Update


class Mover(Protocol):
    """Carries gradients between the device and host memory."""

    def memory_in_use(self) -> int:
        """Bytes in use on the device now."""
        ...

    def to_host(self, entry: Entry) -> None:
        """Starts to copy the gradient of `entry` to the host and frees it on the device."""
        ...

    def to_device(self, entries: Sequence[Entry]) -> None:
        """Starts to copy the gradients of `entries` back."""
        ...

    def wait(self) -> None:
        """Returns when the current stream may use what was copied back."""
        ...


class HostStash(Stash):
    """The policy `cpu`. Bitwise the update after backward; 2 bytes a bf16 parameter over the bus each way.

    The watermark is the memory in use when backward begins. While less is in use, because activations have been freed,
    gradients wait on the device for nothing; beyond it they move. In `finish()` the next part is fetched while the one
    before is stepped.
    """

    name = "cpu"

    def __init__(
        self, update: Update, buckets: Sequence[Bucket], skips: SkipCounter, reason: str, mover: Mover
    ) -> None:
        super().__init__(update, buckets, skips, reason)
        self._mover = mover
        self._watermark = 0
        self._moved: dict[str, list[Entry]] = {}

    def backward_started(self) -> None:
        self._watermark = self._mover.memory_in_use()

    def take(self, bucket: Bucket) -> None:
        self.update.measure(bucket.entries)
        present = [entry for entry in bucket.entries if entry.weight.grad is not None]
        if present and self._mover.memory_in_use() > self._watermark:
            for entry in present:
                self._mover.to_host(entry)
            self._moved[bucket.name] = present

    def restore(self, part: Bucket) -> None:
        # This part was fetched while the one before was stepped, unless it is the first one.
        self._fetch(part.name)
        self._mover.wait()
        position = self.buckets.index(part)
        for following in self.buckets[position + 1 : position + 2]:
            self._fetch(following.name)

    def _fetch(self, name: str) -> None:
        entries = self._moved.pop(name, None)
        if entries:
            self._mover.to_device(entries)

    def drop(self) -> None:
        super().drop()
        self._moved = {}


def make_mover(device: torch.device) -> Mover:
    """The mover for gradients on `device`."""
    return CudaMover(device) if device.type == "cuda" else PlainMover()


class PlainMover:
    """For devices without streams. On a CPU the copy gains nothing; it keeps configs and tests the same everywhere."""

    def __init__(self) -> None:
        self._on_host: dict[int, Tensor] = {}
        self._calls = 0

    def memory_in_use(self) -> int:
        # No allocator to ask: each call reports more than the one before, so that everything is beyond the watermark.
        self._calls += 1
        return self._calls

    def to_host(self, entry: Entry) -> None:
        assert entry.weight.grad is not None
        self._on_host[entry.index] = entry.weight.grad.to("cpu", copy=True)
        entry.weight.grad = None

    def to_device(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.weight.grad = self._on_host.pop(entry.index).to(entry.weight.device, copy=True)

    def wait(self) -> None:
        pass


class CudaMover:
    """Copies on a stream of its own, to pinned buffers that are made once and used in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: dict[int, Tensor] = {}

    def memory_in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def to_host(self, entry: Entry) -> None:
        assert entry.weight.grad is not None
        gradient = local_part(entry.weight.grad)
        buffer = self._buffers.get(entry.index)
        if buffer is None:
            buffer = torch.empty_like(gradient, device="cpu", pin_memory=True)
            self._buffers[entry.index] = buffer
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(gradient, non_blocking=True)
        # The allocator must not hand the gradient's memory out again before the copy has read it.
        gradient.record_stream(self._stream)
        entry.weight.grad = None

    def to_device(self, entries: Sequence[Entry]) -> None:
        # Memory is taken on the current stream, which will use and free it; the copy waits for what ran there before.
        gradients = [torch.empty_like(entry.weight, requires_grad=False) for entry in entries]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for entry, gradient in zip(entries, gradients, strict=True):
                local_part(gradient).copy_(self._buffers[entry.index], non_blocking=True)
                local_part(gradient).record_stream(self._stream)
        for entry, gradient in zip(entries, gradients, strict=True):
            entry.weight.grad = gradient

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
