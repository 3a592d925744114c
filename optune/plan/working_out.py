"""What operations on fake tensors give, from the shapes that torch's kernels for its meta device make.

torch's own way to ask those kernels provides for shapes that are symbols, devices that differ and values that are
known: for the first operation alone it imports an algebra system, and at times a compiler. Here shapes are numbers and
everything lies on one device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
"""Where all fake tensors lie."""
_META = torch.device("meta")
_LIKES = {getattr(torch.ops.aten, f"{name}_like").default for name in ("empty", "zeros", "ones", "full")}


def work_out(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[FakeTensor]
) -> Any:
    """What `func(*args, **kwargs)` gives; `tensors` are all tensors among its arguments.

    Raises whatever keeps the kernel from an answer; torch itself is to be asked then, which may know more.
    """
    func, args, kwargs = _on_meta(func, args, kwargs)
    plain = {id(tensor): make_view(tensor, tensor) for tensor in tensors}
    with _without_symbols(), torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        result = func(
            *_replace(args, lambda tensor: plain[id(tensor)]),
            **{key: _replace(value, lambda tensor: plain[id(tensor)]) for key, value in kwargs.items()},
        )
    given = {id(plain[id(tensor)]): tensor for tensor in tensors}
    if any(plain[id(tensor)].shape != tensor.shape for tensor in tensors):
        raise NotImplementedError(f"{func} changes the shape of what it was given")
    return _replace(result, lambda tensor: given[id(tensor)] if id(tensor) in given else wrap(mode, tensor))


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """The same call for tensors on the meta device."""
    if any(argument.name == "device" for argument in func._schema.arguments):
        if kwargs.get("device") not in (None, CPU):
            raise NotImplementedError(f"{func} is to make a tensor on {kwargs['device']}")
        kwargs = {**kwargs, "device": _META}
    preserves = kwargs.get("memory_format") in (None, torch.preserve_format)
    if func in _LIKES and preserves and args[0].is_contiguous():
        # The kernels for these look at strides at length.
        made = {"dtype": args[0].dtype, **{key: value for key, value in kwargs.items() if value is not None}}
        made.pop("memory_format", None)
        return torch.ops.aten.empty.memory_format, [list(args[0].shape)], made
    return func, args, kwargs


def make_fake(mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """A new fake tensor."""
    return wrap(mode, make_plain(shape, stride, dtype))


def make_plain(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor on the meta device, whatever mode is active."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device=_META)


def make_view(of: Tensor, like: Tensor) -> Tensor:
    """A tensor on the meta device of the memory of `of`, with dtype, shape and strides of `like`."""
    return view_memory(of, like.shape, like.stride(), int(like.storage_offset()), like.dtype)


def view_memory(of: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
    """The same for a shape, strides and an offset into that memory."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=_META).set_(of.untyped_storage(), offset, shape, stride)  # pyright: ignore


def wrap(mode: FakeTensorMode, plain: Tensor) -> FakeTensor:
    """`FakeTensor(mode, plain, CPU)`, whose arguments are looked at for the first one of a mode alone."""
    like = vars(mode).get("_like")
    if like is None:
        made = FakeTensor(mode, plain, CPU)
        vars(mode)["_like"] = dict(vars(made))
        return made
    made: Any = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=CPU)  # pyright: ignore
    vars(made).update(like)
    return made


def _replace(value: Any, make: Callable[[Tensor], Any]) -> Any:
    """`value`, a list or tuple in depth, with what `make` gives in place of each tensor."""
    if isinstance(value, Tensor):
        return make(value)
    return type(value)(_replace(each, make) for each in value) if type(value) in (list, tuple) else value


def _stand_in(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


def _are_equal(one: Any, other: Any) -> bool:
    return list(one) == list(other) if isinstance(one, list | tuple) else one == other


_STAND_INS = {
    "sympy": _stand_in("sympy", Basic=type("Basic", (), {})),
    "torch.fx.experimental.symbolic_shapes": _stand_in(
        "symbolic_shapes",
        **dict.fromkeys(
            ("guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true", "expect_true"), bool
        ),
        **dict.fromkeys(("guard_int", "guarding_hint_or_throw"), int),
        has_guarding_hint=lambda _: True,
        is_nested_int=lambda _: False,
        sym_and=lambda *values: all(values),
        sym_or=lambda *values: any(values),
        sym_eq=_are_equal,
    ),
}
"""What these modules say of numbers. More than a quarter of a second goes by until they are imported."""


_only_numbers = False


@contextmanager
def numbers_only() -> Iterator[None]:
    """Around the work of a process that plans and does nothing else: what is imported meanwhile may take the stand-ins
    for what they stand for, so nothing that has symbols in shapes may come after it."""
    global _only_numbers
    before, _only_numbers = _only_numbers, True
    try:
        yield
    finally:
        _only_numbers = before


@contextmanager
def _without_symbols() -> Iterator[None]:
    """Kernels that are written in Python ask whether shapes are symbols. Under `numbers_only`, unless the modules that
    know symbols are there already, or another thread may ask for them meanwhile, they are told what is true of
    numbers."""
    is_alone = _only_numbers and threading.active_count() == 1
    put = {name: module for name, module in _STAND_INS.items() if is_alone and name not in sys.modules}
    sys.modules.update(put)
    try:
        yield
    finally:
        for name in put:
            del sys.modules[name]
