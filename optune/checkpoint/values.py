"""State values as JSON and named tensors, and back, without pickle.

JSON holds None, booleans, integers, text and finite floats as they are. Everything else is an object with one key that
says what it is: `{"tensor": name}`, `{"float": "inf"}`, `{"dtype": "bfloat16"}`, `{"tuple": […]}`, `{"dict": {…}}`,
`{"wrapper": class, …}` for a low-bit tensor of torchao, taken apart into its plain tensors.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from optune import shards
from optune.errors import CheckpointError

WRAPPER_PACKAGE = "torchao"

TensorReader = Callable[[str, str | None], Tensor]
"""`(name, device)` → the tensor. `device` is "cpu" for a tensor that stood there while its parameter did not."""


class UnknownValueError(TypeError):
    """A value that has no form without pickle."""


def encode(value: Any, name: str, tensors: dict[str, Tensor], home: torch.device | None = None) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors`, the first under `name` itself.

    `home` is the device of the parameter that the value belongs to. Raises `UnknownValueError` for what has no form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, name, tensors, home)
    if type(value) in (list, tuple):
        entries = [encode(entry, f"{name}.{index}", tensors, home) for index, entry in enumerate(value)]
        return {type(value).__name__: entries}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(entry, f"{name}.{key}", tensors, home) for key, entry in value.items()}}
    raise UnknownValueError(f"{name} is a {type(value).__module__}.{type(value).__qualname__}")


def _encode_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor], home: torch.device | None) -> Any:
    kind = type(shards.local_values(tensor)) if shards.is_sharded(tensor) else type(tensor)
    if shards.is_sharded(tensor) and kind is not Tensor:
        raise UnknownValueError(f"{name} is a {kind.__qualname__} spread over processes, which are not put together")
    if kind in (Tensor, torch.nn.Parameter):
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnknownValueError(f"{name} is a tensor of layout {tensor.layout}")
        tensors[name] = tensor.detach()
        stays_on_cpu = home is not None and home.type != "cpu" and tensor.device.type == "cpu"
        return {"tensor": name, "device": "cpu"} if stays_on_cpu else {"tensor": name}
    if kind.__module__.split(".")[0] != WRAPPER_PACKAGE or not hasattr(kind, "__tensor_flatten__"):
        raise UnknownValueError(f"{name} is a {kind.__module__}.{kind.__qualname__}")
    parts, context = cast(Any, tensor).__tensor_flatten__()
    return {
        "wrapper": f"{kind.__module__}:{kind.__qualname__}",
        "parts": {part: encode(getattr(tensor, part), f"{name}.{part}", tensors, home) for part in parts},
        "context": encode(context, f"{name}.context", tensors, home),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def decode(value: Any, read: TensorReader) -> Any:
    """What `encode` was given; `read` hands out the tensors. Raises `CheckpointError` for an unknown form."""
    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor": str(name)}:
            return read(name, value.get("device"))
        case {"float": str(text)}:
            return float(text)
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"size": list(lengths)} if len(value) == 1:
            return torch.Size(lengths)
        case {"list": list(entries)}:
            return [decode(entry, read) for entry in entries]
        case {"tuple": list(entries)}:
            return tuple(decode(entry, read) for entry in entries)
        case {"dict": dict(entries)}:
            return {key: decode(entry, read) for key, entry in entries.items()}
        case {"wrapper": str(name)}:
            parts = {part: decode(entry, read) for part, entry in value["parts"].items()}
            kind = _find_wrapper(name)
            return kind.__tensor_unflatten__(parts, decode(value["context"], read), value["size"], value["stride"])
    raise CheckpointError(f"a state value of an unknown kind: {', '.join(value)}")


def _find_wrapper(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    # A checkpoint from a stranger must not choose what is imported.
    if module_name.split(".")[0] != WRAPPER_PACKAGE:
        raise CheckpointError(f"state of class {name} is not read: only classes of {WRAPPER_PACKAGE} are")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"state of class {name} needs {WRAPPER_PACKAGE}: {error}", hint="pip install 'optune[torchao]'"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(f"{name} is not a kind of tensor")
    return kind


def names_in(value: Any) -> set[str]:
    """The names of all tensors in an encoded value."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    if not isinstance(value, dict):
        return set()
    if isinstance(value.get("tensor"), str):
        return {value["tensor"]}
    return set().union(*map(names_in, value.values()))
