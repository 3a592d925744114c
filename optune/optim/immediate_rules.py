"""Gradients of single functions: closed forms for the frequent ones, re-evaluation for all others.

A rule is asked twice in a backward pass: for the gradients of the parameters at their old values, and, after the
update, for the gradients of the inputs at the new ones. Both times it gets the saved inputs and the same incoming
gradients. A closed form computes only what is asked for, so a linear layer costs the three matrix products of ordinary
backpropagation; re-evaluation runs the function once more for each question.

Names: D width of the input, O width of the output, N all other dimensions together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from optune.optim.immediate_parts import Surroundings, reason_hidden

Tensors = Sequence[Tensor | None]
Gradients = list[Tensor | None]
aten = torch.ops.aten


class Rule(Protocol):
    """How one call is run and differentiated. `tensors` are the call's tensors in the rule's own order."""

    keeps_inputs: bool
    """Whether the gradients need the input tensors' values; else these are not saved."""

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        """The function's result, and further tensors to save."""
        ...

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        """The gradient for each wanted tensor, None for the others and where there is none."""
        ...


@dataclass
class Reevaluation:
    """Any function: run it again under the same settings and random numbers, and differentiate that."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    positions: list[int]
    """Where in `leaves` the tensors belong."""
    surroundings: Surroundings
    output_spec: TreeSpec | None = None
    keeps_inputs: bool = True

    def _call(self, tensors: Tensors) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        versions = [0 if tensor is None else tensor._version for tensor in tensors]
        result = self._call(tensors)
        self.surroundings.drop_unused_randomness()
        changed = any(tensor is not None and tensor._version != versions[i] for i, tensor in enumerate(tensors))
        if changed and self.function not in _KEEP_STATISTICS:
            raise reason_hidden(
                f"{getattr(self.function, '__name__', self.function)} gets a parameter and changes another tensor",
                "write it without an in-place function, or use optimizer_step=in_backward",
            )
        return result, []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        leaves: list[Tensor | None] = []
        for i, tensor in enumerate(tensors):
            if tensor is None:
                leaves.append(None)
            elif self.function in _KEEP_STATISTICS and tensor.dim() == 1 and not wanted[i]:
                leaves.append(tensor.clone())
            else:
                leaves.append(tensor.detach().requires_grad_(wanted[i] and _differentiable(tensor)))
        with torch.enable_grad(), self.surroundings.again():
            outputs = [leaf for leaf in tree_flatten(self._call(leaves))[0] if isinstance(leaf, Tensor)]
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        asked = [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
        result: Gradients = [None] * len(leaves)
        if pairs and asked:
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                [leaf for leaf in leaves if leaf is not None and leaf.requires_grad],
                [grad for _, grad in pairs],
                allow_unused=True,
            )
            for i, grad in zip(asked, found, strict=True):
                result[i] = grad
        return result


# They change running statistics, some of them unseen by version counters: a repetition changes a copy.
_KEEP_STATISTICS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm})


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Linear:
    """y = x Wᵀ + b. dW = dyᵀ x, db = Σ dy, dx = dy W."""

    keeps_inputs = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        x, weight_OD, bias_O = tensors
        return F.linear(_given(x), _given(weight_OD), bias_O), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        x, weight_OD, _ = tensors
        grad = _given(grads[0])
        grad_NO = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight_OD = None
        if wanted[0]:
            grad_x = (grad_NO @ _given(weight_OD)).view(_given(x).shape)
        if wanted[1]:
            grad_weight_OD = grad_NO.t() @ _given(x).reshape(-1, _given(x).shape[-1])
        return [grad_x, grad_weight_OD, grad_NO.sum(0) if wanted[2] else None]


class Matmul:
    """y = x W with a two-dimensional W. dW = xᵀ dy, dx = dy Wᵀ."""

    keeps_inputs = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        x, weight_DO = tensors
        return torch.matmul(_given(x), _given(weight_DO)), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        x, weight_DO = tensors
        grad = _given(grads[0])
        grad_NO = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight_DO = None
        if wanted[0]:
            grad_x = (grad_NO @ _given(weight_DO).t()).view(_given(x).shape)
        if wanted[1]:
            grad_weight_DO = _given(x).reshape(-1, _given(x).shape[-1]).t() @ grad_NO
        return [grad_x, grad_weight_DO]


@dataclass
class Embedding:
    """Rows of W. dW adds each incoming row to its own; the padding row gets none."""

    padding_index: int
    scale_by_frequency: bool
    rows: int
    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        tokens, weight_VD = tensors
        return torch.embedding(_given(weight_VD), _given(tokens)), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        grad_weight_VD = None
        if wanted[1]:
            grad_weight_VD = aten.embedding_dense_backward(
                grads[0], tensors[0], self.rows, self.padding_index, self.scale_by_frequency
            )
        return [None, grad_weight_VD]


@dataclass
class Multiply:
    """y = a ⊙ b with broadcasting: a scale."""

    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        a, b = tensors
        return torch.mul(_given(a), _given(b)), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        a, b = _given(tensors[0]), _given(tensors[1])
        grad = _given(grads[0])
        grad_a = (grad * b).sum_to_size(a.shape).to(a.dtype) if wanted[0] else None
        grad_b = (grad * a).sum_to_size(b.shape).to(b.dtype) if wanted[1] else None
        return [grad_a, grad_b]


@dataclass
class Add:
    """y = a + sign · b with broadcasting: a bias. Needs no values, only shapes."""

    function: Callable[..., Any]
    sign: int
    shapes: tuple[torch.Size, torch.Size]
    dtypes: tuple[torch.dtype, torch.dtype]
    keeps_inputs: bool = False

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        return self.function(*tensors), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        grad = _given(grads[0])
        signs = (1, self.sign)
        return [
            (grad if signs[i] > 0 else -grad).sum_to_size(self.shapes[i]).to(self.dtypes[i]) if wanted[i] else None
            for i in range(2)
        ]


@dataclass
class RMSNorm:
    """y = x / rms(x) ⊙ w over the last dimensions (arXiv 1910.07467), float32 inside for half precision."""

    shape: tuple[int, ...]
    eps: float
    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        return torch.rms_norm(_given(tensors[0]), self.shape, tensors[1], self.eps), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        x, weight = _given(tensors[0]), tensors[1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        dims = tuple(range(-len(self.shape), 0))
        wide = x.to(dtype)
        inverse = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + self.eps)
        normal = wide * inverse
        grad = _given(grads[0]).to(dtype)
        grad_x = grad_weight = None
        if wanted[1]:
            grad_weight = (grad * normal).sum_to_size(self.shape).to(_given(weight).dtype)
        if wanted[0]:
            scaled = grad if weight is None else grad * weight
            grad_x = inverse * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
            grad_x = grad_x.to(x.dtype)
        return [grad_x, grad_weight]


@dataclass
class DecoderNorm:
    """The decoder's RMSNorm, one operation of `optune.models.fused` with another for its gradients."""

    eps: float
    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        return torch.ops.optune.rms_norm(*tensors, self.eps), []

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        made = torch.ops.optune.rms_norm_backward(grads[0], *tensors, self.eps, wanted[1])
        return [grad if asked else None for grad, asked in zip(made, wanted, strict=True)]


@dataclass
class LayerNorm:
    """y = (x − mean) / deviation ⊙ w + b over the last dimensions, by torch's own kernels."""

    shape: tuple[int, ...]
    eps: float
    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        x, weight, bias = tensors
        result, mean, inverse = aten.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return result, [mean, inverse]

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        x, weight, bias = tensors
        return list(
            aten.native_layer_norm_backward(
                _given(grads[0]).contiguous(), x, self.shape, *kept, weight, bias, list(wanted)
            )
        )


@dataclass
class Convolution:
    """Convolution and its transpose in one to three dimensions, by torch's own kernel for each gradient."""

    settings: tuple[list[int], list[int], list[int], bool, list[int], int]
    """Stride, padding, dilation, transposed, output padding, groups."""
    keeps_inputs: bool = True

    def run(self, tensors: Tensors) -> tuple[Any, list[Tensor]]:
        return torch.convolution(*tensors, *self.settings), []  # type: ignore[arg-type]

    def gradients(self, tensors: Tensors, kept: Sequence[Tensor], grads: Tensors, wanted: Sequence[bool]) -> Gradients:
        x, weight, bias = tensors
        sizes = None if bias is None else list(bias.shape)
        found = aten.convolution_backward(grads[0], x, weight, sizes, *self.settings, list(wanted))
        return [grad if asked else None for grad, asked in zip(found, wanted, strict=True)]


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a closed form was asked for the gradient of a tensor that the call does not have")
    return tensor


def plain(*tensors: Tensor | None) -> bool:
    """Whether closed forms hold: ordinary real dense tensors, no subclass with rules of its own."""
    return all(
        tensor is None
        or (type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_complex())
        for tensor in tensors
    )
