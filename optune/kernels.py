"""Native kernels for CPUs: what a step does between its matrix products, in one pass over memory each.

They come with an installation, or are compiled on the machine that uses them, once, in three seconds. Without both, on
other devices and for other dtypes there are none; torch's own operations do the work then, with the same results to
rounding.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from optune.native import NoLibraryError, is_amd_without_tiles, make_kernels

ROWS_OF_A_SUM = 64
"""As in kernels.cpp."""

NOTHING_TO_COMPILE = "nothing left to do: native kernels are compiled code already, and as fast"
"""What a run says that was asked to compile, where `are_all_there_is`."""

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_lock = threading.Lock()
_library: ctypes.CDLL | NoLibraryError | None = None
_kernels: dict[torch.dtype, Kernels] = {}
_made_by = ""
_is_off = False


@dataclass(frozen=True)
class Matrix:
    """A tensor whose strides a kernel is told."""

    tensor: Tensor


class Kernels:
    """The kernels of one dtype. Each method is a function of `optune/native`, where its arguments are described;
    tensors are contiguous, but for a `Matrix`; the number of threads is torch's."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        self._library, self._suffix = library, suffix

    def has(self, name: str) -> bool:
        """Whether there is a kernel of this name: some need instructions that not every processor has."""
        return hasattr(self._library, f"{name}_{self._suffix}")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"{name}_{self._suffix}")
        function.restype = None
        setattr(self, name, partial(_call, function))
        return self.__dict__[name]


def _call(function: Any, *arguments: Tensor | Matrix | float | int | None) -> None:
    if any(isinstance(getattr(argument, "tensor", argument), FakeTensor) for argument in arguments):
        return  # There is nothing to compute.
    function(*map(_convert, arguments), ctypes.c_int64(torch.get_num_threads()))


def _convert(argument: Tensor | Matrix | float | int | None) -> Any:
    if isinstance(argument, Matrix):
        return ctypes.c_void_p(argument.tensor.data_ptr())
    if isinstance(argument, Tensor):
        if not argument.is_contiguous():
            raise ValueError(f"a kernel was given a tensor of strides {argument.stride()} for {tuple(argument.shape)}")
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def find(*tensors: Tensor) -> Kernels | None:
    """The kernels for the device and dtype that `tensors` have; None where there are none, or tensors differ. The first
    call loads them, and may compile them."""
    dtype = tensors[0].dtype
    if dtype not in _SUFFIXES or any(tensor.device.type != "cpu" or tensor.dtype != dtype for tensor in tensors):
        return None
    return _kernels.get(dtype) if is_ready() else None


def covers(tensor: Tensor) -> bool:
    """`find(tensor) is not None`, for code that is being compiled: it loads nothing, so ask `is_ready` before."""
    return bool(_kernels) and not _is_off and tensor.device.type == "cpu" and tensor.dtype in _SUFFIXES


def is_ready() -> bool:
    """Whether this machine has kernels, and they are in use. The first call loads them, and may compile them."""
    return not _is_off and not isinstance(_load(), NoLibraryError)


def are_all_there_is(weight: Tensor) -> bool:
    """Whether `torch.compile` has nothing to gain in a block with weights like `weight`: they and matrix products are
    all that it takes time for. Compiled, steps of 20 ms to 6 s took 0.98 to 1.02 of the time (docs/benchmarks.md)."""
    return is_ready() and covers(weight)


def count_parts(rows: int) -> int:
    """Into how many sums `rms_norm_backward` splits that over `rows`."""
    return -(-rows // ROWS_OF_A_SUM)


def describe() -> str | None:
    """Which kernels a CPU uses, for a person and for a checkpoint's record: `native, by g++ … 12.2.0`, with products
    where those of a run are native too, or `torch's (why)`. None where nothing has asked for any."""
    if _library is None:
        return None
    if isinstance(_library, NoLibraryError):
        return f"torch's ({_library})"
    multiply = is_amd_without_tiles() and _kernels[torch.float32].has("multiply_matrices")
    return f"native{', with products' if multiply else ''}, by {_made_by}"


@contextmanager
def turned_off() -> Iterator[None]:
    """In this context torch's operations do the work."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def _load() -> ctypes.CDLL | NoLibraryError:
    global _library, _made_by
    with _lock:
        if _library is None:
            try:
                try:
                    path, _made_by = make_kernels()
                    _library = _open(str(path))
                except OSError:  # Those that were installed want newer system libraries.
                    path, _made_by = make_kernels(anew=True)
                    _library = _open(str(path))
                _kernels.update({dtype: Kernels(_library, suffix) for dtype, suffix in _SUFFIXES.items()})
            except (NoLibraryError, OSError) as error:
                _library = error if isinstance(error, NoLibraryError) else NoLibraryError(str(error))
    return _library


def _open(path: str) -> ctypes.CDLL:
    """Bound to the OpenMP that torch has loaded."""
    loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = sorted(name for name in loaded if Path(name).name.startswith(("libgomp", "libiomp", "libomp")))
    if not runtimes:
        raise NoLibraryError("torch's OpenMP was not found")
    ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path, mode=os.RTLD_NOW)
