"""Immediate updates as a function of functions, for parameters in a pytree: nothing is changed in place.

    loss, new_params, grads = value_and_immediate_grad(loss_fn, params, update, args=(inputs, targets))

mirrors `jax.value_and_grad`, with the update inside: `update(name, parameter, gradient)` gives the parameter's new
value, and the gradients further down are taken with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import KeyEntry, tree_flatten_with_path, tree_unflatten

from optune.errors import ConfigError
from optune.optim.immediate_exact import ExactSweep
from optune.optim.immediate_local import LocalSweep
from optune.optim.immediate_parts import Slot, uncompiled

SWEEPS = {"local": LocalSweep, "exact": ExactSweep}


class ImmediateResult(NamedTuple):
    """`params` and `grads` have the structure of the given parameters."""

    loss: Tensor
    params: Any
    grads: Any


def value_and_immediate_grad(
    fn: Callable[..., Tensor],
    params: Any,
    update: Callable[[str, Tensor, Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor] | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    variant: Literal["local", "exact"] = "local",
) -> ImmediateResult:
    """The loss `fn(params, *args, **kwargs)`, the parameters updated inside its backward, and the gradients used.

    - `params`: a pytree of floating-point tensors. They keep their values; a tensor that stands at two places is one
      parameter with two uses, updated once, under its first name.
    - `update(name, parameter, gradient) -> Tensor`: the new value, same shape and dtype. `name` is the dotted path in
      the pytree, such as `layers.0.weight`.
    - `reduce(gradient) -> Tensor`: applied to each gradient before `update`, for example the mean over ranks. It is
      called in the order of the backward pass, which is the same on all ranks for the same function.
    - `variant`: see `ImmediateStepper`.

    A parameter that the loss does not depend on is updated last, with a gradient of zeros, as `jax.grad` gives it.
    Raises `ConfigError` for parameters that are not floating-point tensors and `TrainingError` for what the mode cannot
    see.
    """
    if variant not in SWEEPS:
        raise ConfigError(f"{variant!r} is not one of {', '.join(SWEEPS)}", where="variant")
    paths, spec = tree_flatten_with_path(params)
    leaves, slots, places = _make_slots(paths)
    grads: dict[Slot, Tensor] = {}

    @torch.no_grad()
    def apply(ready: list[tuple[Slot, Tensor]]) -> None:
        for slot, gradient in ready:
            gradient = gradient if reduce is None else reduce(gradient)
            new = update(slot.name, slot.tensor.detach(), gradient)
            if new.shape != slot.tensor.shape or new.dtype != slot.tensor.dtype:
                raise ConfigError(
                    f"update({slot.name!r}) gave {new.dtype} {tuple(new.shape)} for a parameter that is "
                    f"{slot.tensor.dtype} {tuple(slot.tensor.shape)}",
                    where="update",
                )
            slot.tensor, grads[slot] = new.detach(), gradient

    sweep = SWEEPS[variant](slots, apply)
    with uncompiled():
        with torch.enable_grad(), sweep:
            loss = fn(tree_unflatten(leaves, spec), *args, **(kwargs or {}))
        sweep.backward(loss)
    apply([(slot, torch.zeros_like(slot.tensor)) for slot in slots if not slot.updated])
    return ImmediateResult(
        loss.detach(),
        tree_unflatten([slot.tensor for slot in places], spec),
        tree_unflatten([grads[slot] for slot in places], spec),
    )


def _make_slots(paths: list[tuple[tuple[KeyEntry, ...], Any]]) -> tuple[list[Tensor], list[Slot], list[Slot]]:
    """The tensors to call the function with, the slots, and the slot of each leaf. Aliases are kept: one slot."""
    by_identity: dict[int, tuple[Tensor, Slot]] = {}
    leaves: list[Tensor] = []
    places: list[Slot] = []
    for path, value in paths:
        name = ".".join(_key(entry) for entry in path)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"{name} is {kind}; parameters are floating-point tensors", where="params", hint="pass it in args"
            )
        if id(value) not in by_identity:
            leaf = value.detach().requires_grad_()
            by_identity[id(value)] = (leaf, Slot(name, leaf))
        leaf, slot = by_identity[id(value)]
        leaves.append(leaf)
        places.append(slot)
    return leaves, list(dict.fromkeys(places)), places


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
