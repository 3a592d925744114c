"""The cheap operations of a block as one operation each, which keep for the backward pass only what must be kept.

Autograd keeps what every single step of a formula reads: for an RMSNorm three tensors of the size of its input, two of
them in fp32. These keep the inputs alone and compute the rest again: in one pass of a native kernel (`optune.kernels`),
or in parts that stay in a CPU's second-level cache. The numbers are those of the plain formulas; what is summed is
summed in fp32. Where there is no native kernel, compiled code gets the plain formulas, and fuses them with others.

Shapes: D width, F inner features of the MLP, anything (…) in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import has_torch_function

from optune import kernels
from optune.shards import is_sharded

_PART_ON_CPU = 2**18
"""Elements worked on at a time."""


def rms_norm(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root mean square norm (arXiv 1910.07467), float32 inside and rounded before the weight, as in transformers."""
    if torch.compiler.is_compiling() and not kernels.covers(hidden):
        return weight_D * _normalize(hidden, eps).to(hidden.dtype)
    return torch.ops.optune.rms_norm(hidden, weight_D, eps)


def swiglu(gate: Tensor, up: Tensor, *, owned: bool = False) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202).

    `owned`: one layer alone takes the result, and its gradient for it is new and nobody else's, as that of a linear
    layer is. A native kernel may write the gradient of `gate` over it then.
    """
    if torch.compiler.is_compiling():
        return torch.ops.optune.swiglu(gate, up, False) if kernels.covers(gate) else F.silu(gate) * up
    return torch.ops.optune.swiglu(gate, up, owned)


def remaking(made: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[Any]:
    """Layers that run in this context and keep `made`, which is `make(*inputs)`, keep these inputs, which are kept
    anyway. It is made again when the first of them asks for it in backward, and let go when the last one has."""
    # A mode that sees each use of a parameter may change it before the layers ask.
    changes = has_torch_function(inputs) and any(isinstance(tensor, nn.Parameter) for tensor in inputs)
    if torch.compiler.is_compiling() or not made.requires_grad or changes or is_sharded(made):
        return nullcontext()
    storage, size = made.untyped_storage()._cdata, made.numel()
    remade = _Remade(make, tuple(tensor.detach() for tensor in inputs))

    def pack(tensor: Tensor) -> Tensor | tuple[_Remade, torch.Size]:
        if tensor.untyped_storage()._cdata != storage or tensor.numel() != size:
            return tensor
        remade.uses += 1
        return remade, tensor.shape

    def unpack(kept: Tensor | tuple[_Remade, torch.Size]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].take().view(kept[1])

    return saved_tensors_hooks(pack, unpack)


@dataclass
class _Remade:
    make: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    uses: int = 0
    taken: int = 0
    value: Tensor | None = None

    def take(self) -> Tensor:
        value = self.value
        if value is None:
            with torch.no_grad():
                value = self.make(*self.inputs)
        self.taken += 1
        self.value = None if self.taken % self.uses == 0 else value
        return value


def _normalize(hidden: Tensor, eps: float) -> Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _rows(hidden: Tensor) -> int:
    return hidden.numel() // max(hidden.shape[-1], 1)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, seen as (rows, last dimension): on a CPU few at a time, elsewhere all at once."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    count = len(flat[0])
    size = max(1, _PART_ON_CPU // max(flat[0].shape[1], 1)) if tensors[0].device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        yield tuple(tensor[start : start + size] for tensor in flat)


@torch.library.custom_op("optune::rms_norm", mutates_args=())
def _rms_norm(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if native := kernels.find(hidden, weight_D):
        native.rms_norm(hidden.contiguous(), weight_D, out, _rows(hidden), len(weight_D), eps)
        return out
    for rows, made in _parts(hidden, out):
        torch.mul(_normalize(rows, eps).to(hidden.dtype), weight_D, out=made)
    return out


@_rms_norm.register_fake
def _(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@torch.library.custom_op("optune::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: Tensor, hidden: Tensor, weight_D: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Of n = x / rms(x): dx = (dn − n · mean(dn · n)) / rms(x), with dn = dy · weight; dweight = Σ dy · n."""
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if native := kernels.find(hidden, weight_D, grad):
        parts = kernels.count_parts(_rows(hidden)) if needs_weight else 0
        sums_PD = torch.empty(parts, len(weight_D)) if needs_weight else None
        inputs = grad.contiguous(), hidden.contiguous(), weight_D
        native.rms_norm_backward(*inputs, grad_hidden, sums_PD, _rows(hidden), len(weight_D), eps)
        return grad_hidden, weight_D.new_empty(0) if sums_PD is None else sums_PD.sum(0).to(weight_D.dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    wide_weight_D, sum_D = weight_D.to(wide), torch.zeros(len(weight_D), dtype=wide, device=hidden.device)
    for rows, grads, made in _parts(hidden, grad, grad_hidden):
        rows, grads = rows.to(wide), grads.to(wide)
        inverse = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        normed = rows * inverse
        if needs_weight:
            sum_D += (normed * grads).sum(0)
        grads = grads * wide_weight_D
        inside = (grads * normed).mean(-1, keepdim=True)
        made.copy_(normed.mul_(-inside).add_(grads).mul_(inverse))
    return grad_hidden, sum_D.to(weight_D.dtype) if needs_weight else weight_D.new_empty(0)


@_rms_norm_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight_D: Tensor, eps: float, needs_weight: bool) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return made, torch.empty_like(weight_D) if needs_weight else weight_D.new_empty(0)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight_D, ctx.eps = inputs
    ctx.save_for_backward(hidden, weight_D)


def _differentiate_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight_D = ctx.saved_tensors
    needs_weight = ctx.needs_input_grad[1]
    made, weight = torch.ops.optune.rms_norm_backward(grad, hidden, weight_D, ctx.eps, needs_weight)
    return made, weight if needs_weight else None, None


_rms_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)


@torch.library.custom_op("optune::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor, owned: bool) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if native := kernels.find(gate, up):
        native.swiglu(gate.contiguous(), up.contiguous(), out, out.numel())
        return out
    for gates, ups, made in _parts(gate, up, out):
        torch.mul(F.silu(gates), ups, out=made)
    return out


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor, owned: bool) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("optune::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
    if native := kernels.find(gate, up, grad):
        inputs = (tensor.contiguous() for tensor in (grad, gate, up))
        native.swiglu_backward(*inputs, grad_gate, grad_up, grad_up.numel())
        return grad_gate, grad_up
    for gates, ups, grads, made_gate, made_up in _parts(gate, up, grad, grad_gate, grad_up):
        torch.mul(grads, F.silu(gates), out=made_up)
        made_gate.copy_(torch.ops.aten.silu_backward(grads * ups, gates))
    return grad_gate, grad_up


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    made = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
    return tuple(made)  # type: ignore[return-value]


@torch.library.custom_op("optune::swiglu_backward_", mutates_args=("grad",))
def _swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The gradient of `up`; that of `gate` takes the place of `grad`, which has native kernels and is contiguous."""
    grad_up, native = torch.empty_like(up, memory_format=torch.contiguous_format), kernels.find(grad, gate, up)
    assert native is not None
    native.swiglu_backward(grad, gate.contiguous(), up.contiguous(), grad, grad_up, grad_up.numel())
    return grad_up


@_swiglu_backward_.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(up, memory_format=torch.contiguous_format)


def _keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *kept, ctx.owned = inputs
    ctx.save_for_backward(*kept)


def _differentiate_swiglu(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    if ctx.owned and grad.is_contiguous() and kernels.find(grad, gate, up):
        grad_up = torch.ops.optune.swiglu_backward_(grad, gate, up)
        return grad, grad_up, None
    return *torch.ops.optune.swiglu_backward(grad, gate, up), None


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_keep_swiglu)
