"""Operations on fake tensors, worked out once for each combination of shapes.

Blocks are alike, and so are the rehearsals of several settings: of thousands of operations a few hundred differ.
torch's own memory of fake operations costs several times what is needed here, where shapes are numbers and everything
lies on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from optune.plan.working_out import CPU, make_fake, make_plain, view_memory, work_out, wrap

_Make = Callable[[FakeTensorMode, Sequence[Any]], Any]
_KNOWN: dict[Hashable, _Make] = {}
_PLACES = ("aten", "optune")
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_DETACH, _LIFT = torch.ops.aten.detach_.default, torch.ops.aten.lift_fresh.default


class Mode(FakeTensorMode):
    """Under it every new tensor is fake; real ones may be mixed in. What torch's own mode would do with an operation is
    remembered, or worked out more simply, wherever that is possible."""

    def __init__(self) -> None:
        # An operation that torch cannot tell the shapes of would be run on real zeros, of the model's size.
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.cache_enabled = False

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """What `func(*args, **kwargs)` gives."""
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        if func in (_LIFT, _DETACH) and type(args[0]) is FakeTensor:
            return args[0]
        if func is _LIFT and type(args[0]) is Tensor and args[0].device == CPU:
            # torch would keep its value, and ask its compiler for a name.
            return make_fake(self, args[0].shape, args[0].stride(), args[0].dtype)
        return _recall(func, tuple(args), dict(kwargs or {}), partial(self._ask_torch, func, types), self)

    def _ask_torch(self, func: Any, types: Any, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(func, types, args, kwargs)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func(*args, **kwargs)` gives."""
    return _recall(func, args, kwargs, func)


def _recall(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ask: Callable[..., Any],
    mode: FakeTensorMode | None = None,
) -> Any:
    """The same, where `ask` is torch's way to know it. `mode`: of what is made, where no argument tells."""
    if func.namespace not in _PLACES:
        return ask(*args, **kwargs)
    tensors: list[Any] = []
    key = (func, *describe((*args, *sorted(kwargs.items())), tensors))
    mode = tensors[0].fake_mode if tensors and type(tensors[0]) is FakeTensor else mode
    try:
        make = None if mode is None else _KNOWN.get(key)
    except TypeError:  # An argument that cannot be compared.
        return ask(*args, **kwargs)
    if mode is None or not all(type(tensor) is FakeTensor for tensor in tensors) or not _NEVER.isdisjoint(func.tags):
        return ask(*args, **kwargs)
    if make is not None:
        return make(mode, tensors)
    try:
        result = work_out(mode, func, args, kwargs, tensors)
    except Exception:  # torch knows more ways, and says best what is wrong.
        result = ask(*args, **kwargs)
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
        return lambda mode, given: None
    if isinstance(result, tuple | list):
        makes = [_make_like(each, storages, tensors) for each in result]
        made = [storage_key(each) for each in result if isinstance(each, Tensor)]
        if None in makes or len(set(made) - set(storages)) < len([key for key in made if key not in storages]):
            return None  # two of them share memory that is new
        kind = type(result)  # and not the result itself, which would live on
        return lambda mode, given: kind(make(mode, given) for make in makes if make is not None)
    if type(result) is not FakeTensor or result.layout != torch.strided or result.is_conj() or result.is_neg():
        return None
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return lambda mode, given: given[index]
    if result.fake_device != CPU:
        return None
    shape, stride, offset, dtype = result.shape, result.stride(), int(result.storage_offset()), result.dtype
    if storage_key(result) in storages:
        viewed = storages.index(storage_key(result))
        return lambda mode, given: wrap(mode, view_memory(given[viewed], shape, stride, offset, dtype))
    if offset or make_plain(shape, stride, dtype).untyped_storage().nbytes() != result.untyped_storage().nbytes():
        return None
    return lambda mode, given: make_fake(mode, shape, stride, dtype)
