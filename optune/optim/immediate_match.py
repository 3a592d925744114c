"""Which rule differentiates a call: a closed form where its arguments fit one, re-evaluation otherwise.

To add a closed form: write a rule in `immediate_rules.py` and a matcher here that gives it, with the call's tensors in
the rule's order, or None where the arguments ask for something that it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optune.optim import immediate_rules as rules
from optune.optim.immediate_parts import autocast_dtype, reason_hidden

Matched = tuple[rules.Rule, list[Tensor | None]]
Arguments = dict[str, Any]

NOTHING: Any = object()


def match(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Matched | None:
    """The closed form for a call and its tensors in the rule's order; None where there is none."""
    entry = _OWN.get(str(function)) if isinstance(function, _OPERATION) else _MATCHERS.get(function)
    if entry is None:
        return None
    names, defaults, build = entry
    if len(args) > len(names) or any(name not in names for name in kwargs):
        return None
    bound = defaults | dict(zip(names, args, strict=False)) | dict(kwargs)
    # Not `in`, which would compare tensors element by element.
    matched = None if any(value is NOTHING for value in bound.values()) else build(bound)
    if matched is None or not rules.plain(*matched[1]):
        return None
    first = next(tensor for tensor in matched[1] if tensor is not None)
    return matched if autocast_dtype(first.device.type) is None else None


def _linear(bound: Arguments) -> Matched | None:
    return rules.Linear(), [bound["input"], bound["weight"], bound["bias"]]


def _matmul(bound: Arguments) -> Matched | None:
    a, b = bound["a"], bound["b"]
    if not _both_tensors(a, b) or a.dim() < 2 or b.dim() != 2:
        return None
    return rules.Matmul(), [a, b]


def _multiply(bound: Arguments) -> Matched | None:
    a, b = bound["a"], bound["b"]
    if not _both_tensors(a, b) or not (a.is_floating_point() and b.is_floating_point()):
        return None
    return rules.Multiply(), [a, b]


def _add(function: Callable[..., Any], sign: int) -> Callable[[Arguments], Matched | None]:
    def build(bound: Arguments) -> Matched | None:
        a, b = bound["a"], bound["b"]
        if not _both_tensors(a, b) or not (a.is_floating_point() and b.is_floating_point()):
            return None
        return rules.Add(function, sign, (a.shape, b.shape), (a.dtype, b.dtype)), [a, b]

    return build


def _both_tensors(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor)


def _embedding(bound: Arguments) -> Matched | None:
    if bound["max_norm"] is not None:
        raise reason_hidden(
            f"an embedding with max_norm={bound['max_norm']} changes its weight in place inside the forward pass",
            "set max_norm to None, or use optimizer_step=in_backward",
        )
    if bound["sparse"]:
        return None
    rows, padding = bound["weight"].shape[0], bound["padding_idx"]
    padding = -1 if padding is None else padding % rows
    return rules.Embedding(padding, bound["scale_grad_by_freq"], rows), [bound["input"], bound["weight"]]


def _torch_embedding(bound: Arguments) -> Matched | None:
    padding = bound["padding_idx"]
    return _embedding(bound | {"max_norm": None, "padding_idx": None if padding == -1 else padding})


def _rms_norm(bound: Arguments) -> Matched | None:
    x, eps = bound["input"], bound["eps"]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return rules.RMSNorm(tuple(bound["normalized_shape"]), eps), [x, bound["weight"]]


def _decoder_norm(bound: Arguments) -> Matched | None:
    return rules.DecoderNorm(bound["eps"]), [bound["hidden"], bound["weight_D"]]


def _layer_norm(bound: Arguments) -> Matched | None:
    tensors = [bound["input"], bound["weight"], bound["bias"]]
    if len({tensor.dtype for tensor in tensors if tensor is not None}) > 1:
        return None
    return rules.LayerNorm(tuple(bound["normalized_shape"]), bound["eps"]), tensors


def _convolution(dimensions: int, transposed: bool) -> Callable[[Arguments], Matched | None]:
    def spread(value: Any) -> list[int]:
        return [value] * dimensions if isinstance(value, int) else list(value) * (dimensions // len(value))

    def build(bound: Arguments) -> Matched | None:
        x = bound["input"]
        if isinstance(bound["padding"], str) or x.dim() != dimensions + 2:
            return None
        settings = (
            spread(bound["stride"]),
            spread(bound["padding"]),
            spread(bound["dilation"]),
            transposed,
            spread(bound["output_padding"]),
            bound["groups"],
        )
        return rules.Convolution(settings), [x, bound["weight"], bound["bias"]]

    return build


_Entry = tuple[tuple[str, ...], Arguments, Callable[[Arguments], Matched | None]]


def _entry(signature: str, build: Callable[[Arguments], Matched | None], **defaults: Any) -> _Entry:
    names = tuple(signature.split())
    return names, dict.fromkeys(names, NOTHING) | defaults, build


_LINEAR = _entry("input weight bias", _linear, bias=None)
_MATMUL = _entry("a b", _matmul)
_MULTIPLY = _entry("a b", _multiply)
_RMS_NORM = _entry("input normalized_shape weight eps", _rms_norm, weight=None, eps=None)
_LAYER_NORM = {"weight": None, "bias": None, "eps": 1e-5}
_EMBEDDING = {"padding_idx": None, "scale_grad_by_freq": False, "sparse": False}

_OPERATION = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OWN: dict[str, _Entry] = {
    name: _entry("hidden weight_D eps", _decoder_norm) for name in ("optune.rms_norm", "optune.rms_norm.default")
}
"""Operations of optune's, by name: they exist only where the part of the library is loaded that makes them."""

_MATCHERS: dict[Callable[..., Any], _Entry] = {
    F.linear: _LINEAR,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.mm: _MATMUL,
    Tensor.mm: _MATMUL,
    torch.mul: _MULTIPLY,
    Tensor.mul: _MULTIPLY,
    torch.rms_norm: _RMS_NORM,
    F.rms_norm: _RMS_NORM,
    F.layer_norm: _entry("input normalized_shape weight bias eps", _layer_norm, **_LAYER_NORM),
    torch.layer_norm: _entry(
        "input normalized_shape weight bias eps cudnn_enable", _layer_norm, **_LAYER_NORM, cudnn_enable=True
    ),
    F.embedding: _entry(
        "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
        _embedding,
        **_EMBEDDING,
        max_norm=None,
        norm_type=2.0,
    ),
    torch.embedding: _entry(
        "weight input padding_idx scale_grad_by_freq sparse", _torch_embedding, **(_EMBEDDING | {"padding_idx": -1})
    ),
}
for _name, _sign in (("add", 1), ("sub", -1)):
    _MATCHERS[getattr(torch, _name)] = _MATCHERS[getattr(Tensor, _name)] = _entry(
        "a b", _add(getattr(torch, _name), _sign)
    )
for _dimensions in (1, 2, 3):
    _settings: dict[str, Any] = {
        "bias": None,
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "output_padding": 0,
        "groups": 1,
    }
    _MATCHERS[getattr(F, f"conv{_dimensions}d")] = _entry(
        "input weight bias stride padding dilation groups", _convolution(_dimensions, False), **_settings
    )
    _MATCHERS[getattr(F, f"conv_transpose{_dimensions}d")] = _entry(
        "input weight bias stride padding output_padding groups dilation",
        _convolution(_dimensions, True),
        **_settings,
    )
