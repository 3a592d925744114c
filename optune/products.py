"""Matrix products on a CPU by a native kernel where torch is asked for one: by a linear layer, its gradients, adapters,
a loss, whatever runs.

It takes the place of torch's own in the dispatcher, so nobody has to know of it, and whatever stands above (autograd,
checkpointing, tensors that are divided) works as ever. Each number is one chain of fused multiply-adds, in the order of
k: it depends neither on the rows beside it nor on the number of threads. AMD's processors with AVX-512 have it, whose
fp32 and bf16 products it makes up to 1.2 times as fast (docs/benchmarks.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optune import kernels
from optune.native import is_amd_without_tiles

LEAST = 32
"""Rows, columns and length from which on a product goes to the kernel: smaller ones are torch's."""

_users = 0
_library: Any = None


@contextmanager
def native() -> Iterator[None]:
    """In this context the kernel is used, where there is one; it is loaded by the first product that is its."""
    global _users, _library
    _users += 1
    if _users == 1 and is_amd_without_tiles():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            _take_over("mm", _multiply)
            _take_over("mm.out", _multiply_into)
    try:
        yield
    finally:
        _users -= 1
        if not _users and _library is not None:
            _library._destroy()
            _library = None


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, begins: bool) -> bool:
    """Adds A · B to `sum_MN`, in fp32 throughout, or begins it. False where there is no kernel for that, or for fp32
    torch's is used, and nothing is done."""
    native = kernels.find(a_MK, b_KN)
    if native is None or not native.has("sum_matrices") or (a_MK.dtype == torch.float32 and _library is None):
        return False
    if sum_MN.dtype != torch.float32 or sum_MN.stride(1) != 1 or not (_is_readable(a_MK) and _is_readable(b_KN)):
        return False
    native.sum_matrices(*_arguments(sum_MN, a_MK, b_KN), int(not begins))
    return True


def _take_over(name: str, run: Any) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        return kernel.call_boxed(keys, *args, **kwargs) if result is None else result

    _library.impl(name, call, "CPU", with_keyset=True, allow_override=True)


def _multiply(a_MK: Tensor, b_KN: Tensor) -> Tensor | None:
    if (native := _find(a_MK, b_KN)) is None:
        return None
    made = torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=a_MK.dtype)
    native.multiply_matrices(*_arguments(made, a_MK, b_KN))
    return made


def _multiply_into(a_MK: Tensor, b_KN: Tensor, *, out: Tensor) -> Tensor | None:
    if (native := _find(a_MK, b_KN)) is None or out.dtype != a_MK.dtype or out.device != a_MK.device:
        return None
    overlaps = out.untyped_storage()._cdata in (a_MK.untyped_storage()._cdata, b_KN.untyped_storage()._cdata)
    if out.shape != (a_MK.shape[0], b_KN.shape[1]) or out.stride(1) != 1 or overlaps:
        return None
    native.multiply_matrices(*_arguments(out, a_MK, b_KN))
    return out


def _find(a_MK: Tensor, b_KN: Tensor) -> kernels.Kernels | None:
    """The kernels, where they make this product."""
    if a_MK.dim() != 2 or b_KN.dim() != 2 or a_MK.shape[1] != b_KN.shape[0]:
        return None
    if min(*a_MK.shape, b_KN.shape[1]) < LEAST or not (_is_readable(a_MK) and _is_readable(b_KN)):
        return None
    native = kernels.find(a_MK, b_KN)
    return native if native is not None and native.has("multiply_matrices") else None


def _is_readable(matrix: Tensor) -> bool:
    """Whether rows or columns are numbers side by side."""
    return 1 in matrix.stride() and min(matrix.stride()) > 0


def _arguments(made: Tensor, a_MK: Tensor, b_KN: Tensor) -> list[kernels.Matrix | int]:
    (rows, length), columns = a_MK.shape, b_KN.shape[1]
    matrices = map(kernels.Matrix, (made, a_MK, b_KN))
    return [*matrices, rows, columns, length, made.stride(0), *a_MK.stride(), *reversed(b_KN.stride())]
