"""Copies in host memory, from which a thread writes while training goes on, and whether there is room for them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from optune import files, shards


def find_tight_host(size: int, ranks: shards.Ranks) -> str | None:
    """Whether the copies of all ranks fit in the memory of their machines; `size` is this rank's, in bytes.

    None, or what is lacking where. All ranks call it and get the same answer.
    """
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for host, own, available in ranks.gather([socket.gethostname(), size, psutil.virtual_memory().available]):
        needed[host] = needed.get(host, 0) + own
        free[host] = min(free.get(host, available), available)
    for host, bytes_needed in needed.items():
        if bytes_needed and bytes_needed >= free[host]:
            lacking = (
                f"takes {files.format_bytes(bytes_needed)} of host memory, {files.format_bytes(free[host])} are free"
            )
            return f"saving in the background {lacking}" + ("" if ranks.is_alone else f" on {host}")
    return None


def copy_to_host(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies in host memory, into `buffers` where those fit. Tensors that are the same memory share one copy.

    What is on an accelerator goes to pinned memory, all of it on the way at once.
    """
    buffers = buffers or {}
    copies: dict[tuple[Any, ...], Tensor] = {}
    used: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or same not in copies:
            copy = buffers.get(name)
            if copy is None or id(copy) in used or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used.add(id(copy))
            copies[same] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        result[name] = copies[same]
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return result
