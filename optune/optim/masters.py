"""What the optimizer holds for a low-precision model, and a word of warning where small updates are lost.

With fp32 masters the optimizer holds those; the model's own (working) weights are the masters rounded, rewritten after
each update. The bf16 model computes; the masters remember updates that are smaller than bf16's spacing. Without them,
updates may be rounded stochastically (`rounding.py`), or else to the nearest bf16 number, which loses small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optune.errors import ConfigError
from optune.optim.kinds import local_part
from optune.optim.rounding import empty, fill, make_transient, rounding_of

SAMPLE = 4096
"""Elements of each weight that the warning looks at."""
WARN_SHARE = 0.1


def choose_held(
    trained: Sequence[tuple[str, nn.Parameter]], *, master_weights: str, update_rounding: str, seed: int
) -> dict[str, nn.Parameter]:
    """What the optimizer holds for each of the `trained` parameters, by name; see `build_optimizer`.

    Raises `ConfigError` for an unknown value, and where rounding cannot be stochastic.
    """
    if master_weights not in ("none", "fp32"):
        raise ConfigError(f"{master_weights!r} is neither none nor fp32", where="model.master_weights")
    if update_rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"{update_rounding!r} is neither nearest nor stochastic", where="model.update_rounding")
    if update_rounding == "stochastic":
        _refuse_rounding([parameter for _, parameter in trained], master_weights)
        return {
            name: make_transient(name, parameter, seed) if needs_master(parameter) else parameter
            for name, parameter in trained
        }
    if master_weights == "none":
        return dict(trained)
    return {name: make_master(parameter) if needs_master(parameter) else parameter for name, parameter in trained}


def _refuse_rounding(trained: Sequence[Tensor], master_weights: str) -> None:
    if master_weights != "none":
        raise ConfigError(
            "stochastic has nothing to round with model.master_weights=fp32, which keeps every update whole",
            where="model.update_rounding",
            hint="take one of them: stochastic rounding needs no memory, masters need 4 bytes a parameter",
        )
    low = {parameter.dtype for parameter in trained if needs_master(parameter)}
    if not low:
        raise ConfigError(
            "stochastic rounds bf16 weights, and every weight that is trained here is fp32 (adapters always are)",
            where="model.update_rounding",
            hint="leave model.update_rounding and bf16_stochastic_round out",
        )
    if low != {torch.bfloat16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
        raise ConfigError(f"stochastic rounds to bf16, not to {names}", where="model.update_rounding")


def needs_master(parameter: Tensor) -> bool:
    """True for a floating dtype of less than 32 bits."""
    return parameter.is_floating_point() and parameter.element_size() < 4


def make_master(parameter: Tensor) -> nn.Parameter:
    """An fp32 copy of `parameter` on the same device, as the optimizer's own parameter."""
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def named_optimizer_parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimizer holds under each parameter name. Needs an optimizer from `build_optimizer`."""
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        named |= dict(zip(group["param_names"], group["params"], strict=True))
    return named


def named_masters(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Tensor]:
    """The master weights by the name of their parameter; empty when the optimizer holds the model's own weights.

    A checkpoint stores them as `state.<name>.master`, and restores them with `copy_` into these very tensors.
    """
    own = {name: id(parameter) for name, parameter in named_parameters}
    return {
        name: held
        for name, held in named_optimizer_parameters(optimizer).items()
        if name in own and own[name] != id(held) and rounding_of(held) is None
    }


@torch.no_grad()
def fill_masters(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> None:
    """Sets each master to its working weight: after weights were loaded from a folder that holds no masters."""
    own = dict(named_parameters)
    for name, master in named_masters(own.items(), optimizer).items():
        master.copy_(own[name])


def describe_held(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> str:
    """What the optimizer holds in place of weights, in words that follow those about the weights; else nothing."""
    if named_masters(named_parameters, optimizer):
        return ", with fp32 masters"
    held = named_optimizer_parameters(optimizer).values()
    return ", updates rounded stochastically" if any(rounding_of(each) is not None for each in held) else ""


@contextmanager
def filled(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> Iterator[None]:
    """Inside, what the optimizer holds has values, also where it has them only while a step lasts: for a step that is
    not to change the weights."""
    own = dict(named_parameters)
    transients = {
        name: held for name, held in named_optimizer_parameters(optimizer).items() if rounding_of(held) is not None
    }
    for name, held in transients.items():
        fill(held, own[name])
    try:
        yield
    finally:
        for held in transients.values():
            empty(held)


def warn_lost_updates(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, *, peak_factor: float = 1.0
) -> str | None:
    """A sentence when many updates of a bf16 run would round away, else None.

    Looks at a sample of each bf16 weight that the optimizer steps itself, and counts elements for which an update of
    the size of the learning rate (what Adam's are; SGD's under clipping are smaller) is less than half of bf16's
    spacing there. `peak_factor` is the largest factor of the schedule.
    """
    held = named_optimizer_parameters(optimizer)
    rates = _rates_by_name(optimizer)
    lost = total = 0
    for name, parameter in named_parameters:
        if held.get(name) is parameter and parameter.dtype is torch.bfloat16:
            stride = max(1, local_part(parameter).numel() // SAMPLE)
            sizes = local_part(parameter.detach()).reshape(-1)[::stride].float().abs()
            lost += int((half_spacing(sizes) > rates[name] * peak_factor).sum()) * stride
            total += sizes.numel() * stride
    if not total or lost < WARN_SHARE * total:
        return None
    return (
        f"about {lost / total:.0%} of the trained bf16 weights are so large that an update of the size of the learning "
        "rate is less than half of bf16's spacing and rounds away; keep fp32 masters (model.master_weights=fp32), "
        "round by chance (model.update_rounding=stochastic) or train in fp32 (model.dtype=fp32)"
    )


def half_spacing(sizes: Tensor) -> Tensor:
    """Half of the distance from each bf16 number, given without its sign in fp32, to the next larger one."""
    _, exponents = torch.frexp(sizes)  # a mantissa of 1/2 to 1, of which bf16 keeps 8 bits
    return torch.ldexp((sizes > 0).float(), exponents - 9)  # from zero no update is too small


def _rates_by_name(optimizer: Optimizer) -> Mapping[str, float]:
    return {
        name: float(group.get("initial_lr", group["lr"]))
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
