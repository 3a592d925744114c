"""Stepping an ordinary optimizer on a part of its parameters, and finding out beforehand whether it can be done."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optune import idle_modules
from optune.errors import ConfigError

Slices = list[tuple[dict[str, Any], list[Tensor]]]
"""The groups that a step touches, each with the parameters that it touches in the group's order."""

PROBE_STEPS = 3
PROBE_SIZE = 64
"""Dimensions of the probe's parameters are cut to this; 64 x 64 is where low-bit optimizers begin to quantise."""


def slice_groups(optimizer: Optimizer, parameters: Collection[Tensor]) -> Slices:
    """The part of `optimizer.param_groups` that holds `parameters`; groups without any of them are left out."""
    wanted = {id(parameter) for parameter in parameters}
    slices = [(group, [p for p in group["params"] if id(p) in wanted]) for group in optimizer.param_groups]
    return [(group, members) for group, members in slices if members]


def step_slices(optimizer: Optimizer, slices: Slices) -> None:
    """`optimizer.step()` on these parameters only. The groups are the optimizer's own, narrowed for the moment, so
    rates and settings are read, and settings written, exactly as in a whole step."""
    groups, members = optimizer.param_groups, [group["params"] for group, _ in slices]
    try:
        for group, narrowed in slices:
            group["params"] = narrowed
        optimizer.param_groups = [group for group, _ in slices]
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        for (group, _), whole in zip(slices, members, strict=True):
            group["params"] = whole


def check_no_closure(optimizer: Optimizer) -> None:
    """Raises `ConfigError` for an optimizer that evaluates the loss itself (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss itself, through a closure; a step here has one backward",
            where="optimizer._target_",
            hint="take an optimizer whose step() needs no closure, such as torch.optim.AdamW",
        )


def find_subset_fault(optimizer: Optimizer) -> str | None:
    """Why stepping `optimizer` part by part is not bitwise the same as stepping it whole; None where it is the same.

    Nothing is assumed about the class: two copies of the optimizer with small parameters are stepped, one whole and one
    part by part, and weights and state are compared. `optimizer` itself and its parameters stay as they are.
    """
    reason = _find_private_reference(optimizer)
    if reason is None:
        try:
            whole, parts = _run_probe(optimizer, by_parts=False), _run_probe(optimizer, by_parts=True)
        except Exception as error:
            reason = f"a trial on small parameters failed with {type(error).__name__}: {error}"
        else:
            differing = _first_difference(whole, parts)
            if differing is not None:
                reason = (
                    f"in a trial on small parameters, {differing} differs from that of one whole step: "
                    "what it does to one parameter depends on the others"
                )
    return reason


def check_subset_step(optimizer: Optimizer) -> None:
    """Raises `ConfigError` for what `find_subset_fault` finds."""
    reason = find_subset_fault(optimizer)
    if reason is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be stepped on a part of its parameters: {reason}",
            where="optimizer._target_",
            hint="use optimizer_step: after_backward with this optimizer",
        )


def _find_private_reference(optimizer: Optimizer) -> str | None:
    """What stands against the trial itself: parameters or optimizers that are reached past `param_groups`."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def reaches(value: Any, depth: int = 2) -> bool:
        if isinstance(value, Optimizer) or id(value) in parameters:
            return True
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return depth > 0 and isinstance(inner, list | tuple | set) and any(reaches(item, depth - 1) for item in inner)

    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state") and reaches(value):
            return f"its attribute {key!r} refers to parameters past the parameter groups"
    return None


def _run_probe(optimizer: Optimizer, *, by_parts: bool) -> dict[str, Any]:
    """Weights and state of a small copy of `optimizer` after a few steps, by name."""
    clone = _clone_small(optimizer)
    parameters = [parameter for group in clone.param_groups for parameter in group["params"]]
    parts = [parameters] if not by_parts else [parameters[:1], parameters[1:2], parameters[2:]]
    slices = [slice_groups(clone, part) for part in parts if part]
    # Stochastic rounding draws from the global generator, in the same order in both runs. Compiled optimizers are
    # tried uncompiled: the same arithmetic without a minute of compiling.
    with torch.random.fork_rng(), idle_modules.tried(clone):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(PROBE_STEPS):
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter.device, parameter.dtype)
            for part in slices:
                step_slices(clone, part)
    outcome: dict[str, Any] = {f"weight {index}": parameter.detach() for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        for key, value in clone.state.get(parameter, {}).items():
            outcome[f"state {key!r} of weight {index}"] = value
    return outcome


def _clone_small(optimizer: Optimizer) -> Optimizer:
    """A copy with the same class, settings and groups, fresh state, and at most three small parameters a group."""
    clone = object.__new__(type(optimizer))
    generator = torch.Generator().manual_seed(0)
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        small = [_shrink(parameter, generator) for parameter in _choose_by_shape(group["params"])]
        groups.append(copy.deepcopy(settings) | {"params": small})
    # An instance's own `step` would be a wrapper bound to the original; hooks are not the clone's business.
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
    hooks = {key: OrderedDict() for key in attributes if key.startswith("_optimizer_") and key.endswith("_hooks")}
    vars(clone).update(attributes)
    vars(clone).update(hooks, param_groups=groups, state=defaultdict(dict), defaults=copy.deepcopy(optimizer.defaults))
    return clone


def _choose_by_shape(parameters: list[Tensor]) -> list[Tensor]:
    """Up to three parameters, of different rank and dtype where there are such."""
    kinds: dict[tuple[int, torch.dtype], Tensor] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dim(), parameter.dtype), parameter)
    chosen = list(kinds.values())[:3]
    others = [parameter for parameter in parameters if not any(parameter is kind for kind in chosen)]
    return chosen + others[: 3 - len(chosen)]


def _shrink(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    shape = [min(size, PROBE_SIZE) for size in parameter.shape]
    values = torch.randn(shape, generator=generator)
    return nn.Parameter(values.to(parameter.device, parameter.dtype))


def _first_difference(whole: dict[str, Any], parts: dict[str, Any]) -> str | None:
    for key in sorted(whole.keys() | parts.keys()):
        if key not in whole or key not in parts:
            return key
        left, right = _plain(whole[key]), _plain(parts[key])
        equal = torch.equal(left, right) if isinstance(left, Tensor) else left == right
        if not equal:
            return key
    return None


def _plain(value: Any) -> Any:
    # Quantised state is a tensor subclass that defines no comparison of its own.
    is_subclass = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)
    return value.dequantize() if is_subclass else value
