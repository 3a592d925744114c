"""Memory for tensors on a CPU: one range of addresses that is filled from both ends (`optune/native/memory.cpp`).

A step takes a sixth less of the process's memory than from malloc, and no more time. No number depends on it. Where it
cannot be compiled, and with `OPTUNE_MEMORY=0`, torch's own is used.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from optune.native import NoLibraryError, make_memory
from optune.shards import local_values

_STATE = torch.float32.itemsize
"""Bytes of a value in a master copy, or in a state that is wider than the parameter."""


_sizes_apart: set[int] = set()
_is_wanted = False


def want() -> None:
    """`begin` is to have an effect: this process trains. Takes no time; the library may still be compiled meanwhile."""
    global _is_wanted
    _is_wanted = True


def begin() -> None:
    """Uses the range where somebody wants it. Called before the first large tensors are made."""
    if _is_wanted:
        use()


def use() -> bool:
    """From here on tensors of 64 KiB and more that this process makes on the CPU lie in the range. False where there is
    none."""
    if (library := _library()) is None:
        return False
    for size in _sizes_apart:
        library.keep_apart(ctypes.c_size_t(size))
    return True


def keep_apart(parameters: Iterable[Tensor]) -> None:
    """Tells which tensors live long: those of the sizes of `parameters`, as their gradients and the optimizer's state
    are. Does nothing where the range is neither used nor wanted."""
    library = _in_use()
    if library is None and not _is_wanted:
        return
    for parameter in map(local_values, parameters):
        for size in {parameter.nbytes, parameter.numel() * _STATE} - _sizes_apart:
            _sizes_apart.add(size)
            if library is not None:
                library.keep_apart(ctypes.c_size_t(size))


def touch_ahead(size: int) -> None:
    """Has the system provide `size` more bytes of memory, beside what goes on here: half a second a GiB, which the
    first step would wait for. Only for what the range is sure to need."""
    if library := _in_use():
        touch = library.touch_memory_ahead
        threading.Thread(target=touch, args=(ctypes.c_size_t(size),), name="optune-memory", daemon=True).start()


def give_back() -> None:
    """The system has the memory of freed tensors again, which the range keeps for the next ones, and what the heap of
    this process can spare."""
    if library := _in_use():
        library.give_back_memory()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(ctypes.c_size_t(0))


def measure() -> tuple[int, int]:
    """The bytes of the range that were ever used, and those that were used at the same time at most: what lies between
    the two are holes. (0, 0) where the range is not used."""
    extent, most = ctypes.c_size_t(), ctypes.c_size_t()
    if library := _in_use():
        library.measure_memory(ctypes.byref(extent), ctypes.byref(most))
    return extent.value, most.value


def _in_use() -> ctypes.CDLL | None:
    """None also where nobody has asked for the range."""
    return _library() if _library.cache_info().currsize else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(make_memory()[0]))
    except (NoLibraryError, OSError):
        return None
    return library if library.use_memory() else None
