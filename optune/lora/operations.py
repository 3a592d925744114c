"""The products of a frozen linear layer, with and without an adapter beside it, as single operations of torch.

Each is one operation for whatever watches torch's calls: compiled code takes it as it is, selective checkpointing keeps
its output as that of any matrix product, and fake tensors know its shapes.

All products have the dtype of the input and are summed in fp32 inside, as in mixed precision: of adapters in fp32 over
a bf16 base, A and s·B are rounded for the product, while they, their gradients and the optimizer's state stay fp32.
The adapter's part is added to the base's output, and to the input's gradient, inside the product. In fp32 each of these
would be a pass over a tensor four times the output's size, which took a third of the time of the base's own product.

Shapes: N positions (any leading axes in front of the last), I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from optune.lora.nf4 import Packed, dequantize


def lora_linear(
    input_NI: Tensor,
    weight: Tensor | Packed,
    shape: torch.Size,
    bias: Tensor | None,
    down_RI: Tensor,
    up_OR: Tensor,
    keep_NI: Tensor | None,
    scale: float,
) -> Tensor:
    """`x Wᵀ + b + scale · (keep ∘ x) Aᵀ Bᵀ` in the dtype of x. W and b, of `shape` O×I, get no gradient.

    Autograd keeps the input as it came (one tensor, however many layers read it) and R numbers a position.
    """
    return _LoraLinear.apply(input_NI, down_RI, up_OR, bias, keep_NI, scale, shape, *pieces(weight))  # type: ignore


def frozen_linear(input_NI: Tensor, weight: Packed, shape: torch.Size, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` in the dtype of x for a W of `shape` O×I in NF4, which gets no gradient. Autograd keeps the codes."""
    return _frozen_forward(input_NI, list(weight), list(shape), bias)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_NI: Tensor,
        down_RI: Tensor,
        up_OR: Tensor,
        bias: Tensor | None,
        keep_NI: Tensor | None,
        scale: float,
        shape: torch.Size,
        *weight: Tensor,
    ) -> Tensor:
        output_NO, hidden_NR = _lora_forward(input_NI, weight, list(shape), bias, down_RI, up_OR, keep_NI, scale)
        ctx.save_for_backward(input_NI, down_RI, up_OR, keep_NI, hidden_NR, *weight)
        ctx.scale, ctx.shape = scale, shape
        return output_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input_NI, down_RI, up_OR, keep_NI, hidden_NR, *weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        made = _lora_backward(
            grads[0], input_NI, weight, list(ctx.shape), down_RI, up_OR, keep_NI, hidden_NR, ctx.scale,
            wanted[0], any(wanted[1:]),
        )  # fmt: skip
        given = [grad if is_wanted else None for grad, is_wanted in zip(made, wanted, strict=True)]
        return *given, *([None] * (4 + len(weight)))


@torch.library.custom_op("optune::lora_forward", mutates_args=())
def _lora_forward(
    input_NI: Tensor,
    weight: Sequence[Tensor],
    shape: Sequence[int],
    bias: Tensor | None,
    down_RI: Tensor,
    up_OR: Tensor,
    keep_NI: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output, and x Aᵀ."""
    inputs, dtype, leading = _rows(input_NI), input_NI.dtype, input_NI.shape[:-1]
    outputs = F.linear(inputs, _weight(weight, shape, dtype), bias)
    hiddens = _kept(inputs, keep_NI) @ down_RI.to(dtype).T
    outputs.addmm_(hiddens, (up_OR * scale).to(dtype).T)
    return outputs.view(*leading, -1), hiddens.view(*leading, -1)


@torch.library.custom_op("optune::lora_backward", mutates_args=())
def _lora_backward(
    grad_NO: Tensor,
    input_NI: Tensor,
    weight: Sequence[Tensor],
    shape: Sequence[int],
    down_RI: Tensor,
    up_OR: Tensor,
    keep_NI: Tensor | None,
    hidden_NR: Tensor,
    scale: float,
    needs_input: bool,
    needs_adapter: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and B; empty where they are not needed."""
    grads, inputs, dtype = _rows(grad_NO), _rows(input_NI), input_NI.dtype
    hidden_grads = grads @ (up_OR * scale).to(dtype)
    if needs_adapter:
        # Written so that the long axis is never that of the result: on CPUs that is twice as fast.
        grad_down_RI = (hidden_grads.T @ _kept(inputs, keep_NI)).to(down_RI.dtype)
        grad_up_OR = (_rows(hidden_NR).T @ grads).T.contiguous().to(up_OR.dtype).mul_(scale)
    else:
        grad_down_RI, grad_up_OR = down_RI.new_empty(0), up_OR.new_empty(0)
    if not needs_input:
        return inputs.new_empty(0), grad_down_RI, grad_up_OR
    grad_NI = grads @ _weight(weight, shape, dtype)
    if keep_NI is None:
        grad_NI.addmm_(hidden_grads, down_RI.to(dtype))
    else:
        grad_NI.add_((hidden_grads @ down_RI.to(dtype)).mul_(_rows(keep_NI)))
    return grad_NI.view(input_NI.shape), grad_down_RI, grad_up_OR


@torch.library.custom_op("optune::frozen_forward", mutates_args=())
def _frozen_forward(input_NI: Tensor, weight: Sequence[Tensor], shape: Sequence[int], bias: Tensor | None) -> Tensor:
    return F.linear(input_NI, _weight(weight, shape, input_NI.dtype), bias)


@torch.library.custom_op("optune::frozen_backward", mutates_args=())
def _frozen_backward(grad_NO: Tensor, weight: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return grad_NO @ _weight(weight, shape, grad_NO.dtype)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, ctx.shape, _ = inputs
    ctx.save_for_backward(*weight)


def _differentiate_frozen(ctx: Any, grad_NO: Tensor) -> tuple[Any, ...]:
    weight = list(ctx.saved_tensors)
    return _frozen_backward(grad_NO, weight, ctx.shape), [None] * len(weight), None, None


_frozen_forward.register_autograd(_differentiate_frozen, setup_context=_keep_codes)


@_lora_forward.register_fake
def _(input_NI: Tensor, weight: Any, shape: Any, bias: Any, down_RI: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    leading = input_NI.shape[:-1]
    return input_NI.new_empty(*leading, shape[0]), input_NI.new_empty(*leading, down_RI.shape[0])


@_lora_backward.register_fake
def _(
    grad_NO: Tensor, input_NI: Tensor, weight: Any, shape: Any, down_RI: Tensor, up_OR: Tensor, keep_NI: Any,
    hidden_NR: Tensor, scale: float, needs_input: bool, needs_adapter: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        input_NI.new_empty(input_NI.shape if needs_input else (0,)),
        down_RI.new_empty(down_RI.shape if needs_adapter else (0,)),
        up_OR.new_empty(up_OR.shape if needs_adapter else (0,)),
    )


@_frozen_forward.register_fake
def _(input_NI: Tensor, weight: Any, shape: Any, bias: Any) -> Tensor:
    return input_NI.new_empty(*input_NI.shape[:-1], shape[0])


@_frozen_backward.register_fake
def _(grad_NO: Tensor, weight: Any, shape: Any) -> Tensor:
    return grad_NO.new_empty(*grad_NO.shape[:-1], shape[1])


@register_flop_formula([torch.ops.optune.frozen_forward, torch.ops.optune.frozen_backward])
def _frozen_flops(rows_shape: Any, weight: Any, shape: Any, *_: Any, **__: Any) -> int:
    return 2 * _count(rows_shape) * shape[0] * shape[1]


@register_flop_formula(torch.ops.optune.lora_forward)
def _forward_flops(input_shape: Any, weight: Any, shape: Any, bias: Any, down_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * _count(input_shape) * (shape[0] * shape[1] + down_shape[0] * sum(shape))


@register_flop_formula(torch.ops.optune.lora_backward)
def _backward_flops(
    grad_shape: Any, input_shape: Any, weight: Any, shape: Any, down_shape: Any, up: Any, keep: Any, hidden: Any,
    scale: float, needs_input: bool, needs_adapter: bool, **_: Any,
) -> int:  # fmt: skip
    outputs, inputs, rank = *shape, down_shape[0]
    each = rank * outputs + needs_adapter * rank * (outputs + inputs) + needs_input * inputs * (outputs + rank)
    return 2 * _count(grad_shape) * each


def _count(shape: Any) -> int:
    """Positions of a tensor of that shape."""
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows


def pieces(weight: Tensor | Packed) -> tuple[Tensor, ...]:
    """The tensors that a weight is made of."""
    return weight if isinstance(weight, Packed) else (weight,)


def _weight(pieces: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The matrix; of one in NF4 a copy that lives as long as the caller holds it."""
    return pieces[0] if len(pieces) == 1 else dequantize(Packed(*pieces), torch.Size(shape), dtype)


def _rows(tensor: Tensor) -> Tensor:
    """All leading axes as one."""
    return tensor.reshape(-1, tensor.shape[-1])


def _kept(inputs_NI: Tensor, keep_NI: Tensor | None) -> Tensor:
    return inputs_NI if keep_NI is None else inputs_NI * _rows(keep_NI)
