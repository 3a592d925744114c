"""Copies between a device and the host on a stand-in for a device, as late as they may be."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateCopies:
    """One stream: a copy is made when somebody waits for it or for a later one. Host buffers are NaN until then."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.log: list[tuple[str, int]] = []
        self.hosts: dict[int, Tensor] = {}
        self.free: list[Tensor] = []
        self.done = 0
        self.on_device = self.most_on_device = 0

    def _start(self, target: Tensor, source: Tensor) -> int:
        self.queue.append(lambda: target.copy_(source))
        return len(self.queue)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, int]:
        host = next((host for host in self.free if alike(host, tensor)), None)
        if host is None:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            self.hosts[id(host)] = host
        else:
            self.free = [each for each in self.free if each is not host]
        host.fill_(float("nan") if host.is_floating_point() else 0)
        self.log.append(("out", id(host)))
        return host, self._start(host, tensor)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, int]:
        tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        tensor.fill_(float("nan") if host.is_floating_point() else 0)
        self.on_device += tensor.nbytes
        self.most_on_device = max(self.most_on_device, self.on_device)
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)
        self.log.append(("in", id(host)))
        return tensor, self._start(tensor, host)

    def _freed(self, nbytes: int) -> None:
        self.on_device -= nbytes

    def wait(self, ticket: int) -> None:
        self.log.append(("wait", ticket))
        while self.done < ticket:
            self.queue[self.done]()
            self.queue[self.done] = lambda: None
            self.done += 1

    def give_back(self, host: Tensor) -> None:
        self.free.append(host)


def alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
