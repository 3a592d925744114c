"""Tensors that have shapes and no values, and answers to the questions that only values could answer.

The code that trains runs on torch's fake tensors as it stands. Where it looks at a value (a norm, a count, which
positions are targets) it is told what a usual step would tell it: finite norms below the limit of clipping, and as many
targets as the plan assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from optune import cross_entropy
from optune.lora import nf4
from optune.models import attention
from optune.optim import immediate, norms, rounding
from optune.plan.working_out import make_fake

_ATEN = torch.ops.aten
NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What is raised where a question is asked that nobody here answers."""


def give_memory(model: nn.Module, mode: FakeTensorMode) -> None:
    """Gives each parameter of an outline (on the meta device) fake memory; ties stay ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                # What nn.Parameter makes of a tensor of another class, without a detour.
                values: Any = make_fake(mode, parameter.shape, parameter.stride(), parameter.dtype)
                values._is_param = True
                made[id(parameter)] = values.requires_grad_(parameter.requires_grad)
            setattr(module, name, made[id(parameter)])


@cache
def make_answers(mask_size: int, targets: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """`Tracker`'s answers where masks of `mask_size` positions (a microbatch's) have `targets` that are set."""

    def count(mask: Tensor) -> int:
        return targets if mask.numel() == mask_size else mask.numel()

    def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ATEN._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
            return None  # an optimizer's step, all of it in place
        if func is _ATEN.equal.default:
            return True
        if func is _ATEN.index.Tensor and _is_mask(args[1]):
            mask = args[1][0]
            return args[0].new_empty((count(mask), *args[0].shape[mask.dim() :]))
        if func in _PUTS and _is_mask(args[1]):
            return args[0]
        if func is _ATEN.index_put.default and _is_mask(args[1]):
            return torch.empty_like(args[0])
        if func is _ATEN.nonzero.default:
            return args[0].new_empty((count(args[0]), args[0].dim()), dtype=torch.int64)
        if func is _ATEN.masked_select.default:
            return args[0].new_empty(count(args[1]))
        if func is _ATEN._unique2.default:
            # As many as there can be: all of them different.
            return args[0].new_empty(args[0].numel()), torch.empty_like(args[0]), args[0].new_empty(0)
        return NotImplemented

    return answer


_PUTS = (_ATEN.index_put_.default, _ATEN._index_put_impl_.default)


def _is_mask(indices: Any) -> bool:
    return indices[0] is not None and indices[0].dtype is torch.bool


@contextmanager
def answering() -> Iterator[None]:
    """What looks at values in ways that no operation shows is answered for as long as the context lasts."""
    with (
        patch.object(norms, "norm_by_rows", _norm_without_values),
        patch.object(cross_entropy, "cut", partial(_first_two, cross_entropy.cut)),
        patch.object(nf4, "_runs", partial(_first_two, nf4._runs)),
        patch.object(rounding, "draw", partial(_draw_twice, rounding.draw)),
        patch.object(attention, "_segments", _one_document_a_row),
        patch.object(immediate, "refuse_unfit", lambda _: None),  # these are plain parameters in all but their class
    ):
        yield


def _norm_without_values(tensor: Tensor) -> Tensor:
    """The memory of `norms.norm_by_rows`, without its thousands of small operations."""
    rows = torch.empty(tensor.numel() // norms.ROW + 1)
    if tensor.element_size() < 4:
        torch.empty(norms.CHUNK)
    return rows.sum()


def _first_two(cut: Callable[[int, int], Iterable[Any]], count: int, size: int) -> list[Any]:
    """Of thousands of parts that are worked on one after the other each takes, and leaves, what the second one does."""
    return list(islice(cut(count, size), 2))


def _draw_twice(draw: Callable[..., Iterable[Any]], *args: Any) -> Iterator[Any]:
    """The same for random bits, of which each part is freed before the one after the next is made."""
    return islice(draw(*args), 2)


def _one_document_a_row(documents_BT: Tensor) -> list[tuple[int, int, int]]:
    """The longest documents that packs can hold."""
    rows, length = documents_BT.shape
    return [(row, 0, length) for row in range(rows)]
