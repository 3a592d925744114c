"""Operations on fake tensors, worked out once for each combination of shapes.

Blocks are alike, and so are the rehearsals of several settings: of thousands of operations a few hundred differ.
torch's own memory of fake operations costs several times what is needed here, where shapes are numbers and everything
lies on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_Make = Callable[[Sequence[Tensor]], Any]
_KNOWN: dict[Hashable, _Make] = {}
_PLACES = ("aten", "optune")
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func(*args, **kwargs)` gives."""
    tensors: list[Tensor] = []
    if func.namespace not in _PLACES:
        return func(*args, **kwargs)
    key = (func, *describe((*args, *sorted(kwargs.items())), tensors))
    try:
        make = _KNOWN.get(key)
    except TypeError:  # An argument that cannot be compared.
        return func(*args, **kwargs)
    if make is not None:
        return make(tensors)
    result = func(*args, **kwargs)
    if tensors and all(type(tensor) is FakeTensor for tensor in tensors) and _NEVER.isdisjoint(func.tags):
        make = _make_like(result, [storage_key(tensor) for tensor in tensors], tensors)
        if make is not None:
            _KNOWN[key] = make
    return result


def describe(values: Iterable[Any], tensors: list[Tensor]) -> Iterator[Hashable]:
    """All that the memory of an operation can depend on: shapes, dtypes, what shares memory, and plain values. The
    tensors among them are added to `tensors`."""
    for value in values:
        if isinstance(value, Tensor):
            key = storage_key(value)
            shared = next((index for index, other in enumerate(tensors) if storage_key(other) == key), -1)
            tensors.append(value)
            yield value.shape, value.stride(), value.storage_offset(), value.dtype, type(value), shared
        elif isinstance(value, tuple | list):
            yield tuple(describe(value, tensors))
        else:
            yield type(value), value  # 1, 1.0 and True are equal


def storage_key(tensor: Tensor) -> int:
    """What tells storages apart while they live."""
    return tensor.untyped_storage()._cdata


def _make_like(result: Any, storages: Sequence[int], tensors: Sequence[Tensor]) -> _Make | None:
    """What makes another `result` of other tensors in the place of `tensors`; None where that is not known."""
    if result is None:
        return lambda _: None
    if isinstance(result, tuple | list):
        makes = [_make_like(each, storages, tensors) for each in result]
        made = [storage_key(each) for each in result if isinstance(each, Tensor)]
        if None in makes or len(set(made) - set(storages)) < len([key for key in made if key not in storages]):
            return None  # two of them share memory that is new
        kind = type(result)  # and not the result itself, which would live on
        return lambda given: kind(make(given) for make in makes if make is not None)
    if type(result) is not FakeTensor or result.layout != torch.strided or result.is_conj() or result.is_neg():
        return None
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return lambda given: given[index]
    shape, stride, offset, dtype = result.shape, result.stride(), result.storage_offset(), result.dtype
    device, size = result.fake_device, result.untyped_storage().nbytes()
    viewed = storages.index(storage_key(result)) if storage_key(result) in storages else None

    def make(given: Sequence[Any]) -> Tensor:
        mode = given[0].fake_mode
        with in_kernel_invocation_manager(mode):
            if viewed is None:
                plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                plain = torch.empty(0, dtype=dtype, device="meta")
                plain.set_(given[viewed].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, plain, device)

    if viewed is None:
        with in_kernel_invocation_manager(tensors[0].fake_mode):  # pyright: ignore
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if offset or plain.untyped_storage().nbytes() != size:
            return None
    return make
