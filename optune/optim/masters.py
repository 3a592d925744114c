"""fp32 master weights for a low-precision model, and a word of warning where they are missing.

The optimizer then holds the masters; the model's own (working) weights are the masters rounded, rewritten after each
update. The bf16 model computes; the fp32 masters remember updates that are smaller than bf16's spacing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optune.optim.kinds import local_part

BF16_LOST = 2.0**-9
"""An update smaller than this part of a bf16 weight may round to nothing (half the spacing at the top of a binade)."""
SAMPLE = 4096
"""Elements of each weight that the warning looks at."""
WARN_SHARE = 0.1


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
        if name in own and own[name] != id(held)
    }


@torch.no_grad()
def fill_masters(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> None:
    """Sets each master to its working weight: after weights were loaded from a folder that holds no masters."""
    own = dict(named_parameters)
    for name, master in named_masters(own.items(), optimizer).items():
        master.copy_(own[name])


def warn_lost_updates(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, *, peak_factor: float = 1.0
) -> str | None:
    """A sentence when most updates of a bf16 run would round away, else None.

    Looks at a sample of each trained bf16 weight that has no master and counts elements for which an update of the size
    of the learning rate (what Adam's are; SGD's under clipping are smaller) is less than half of bf16's spacing.
    `peak_factor` is the largest factor of the schedule.
    """
    if getattr(optimizer, "bf16_stochastic_round", False):
        return None  # torchao: rounding up or down by chance keeps the mean
    held = named_optimizer_parameters(optimizer)
    rates = _rates_by_name(optimizer)
    lost = total = 0
    for name, parameter in named_parameters:
        if held.get(name) is parameter and parameter.dtype is torch.bfloat16:
            stride = max(1, local_part(parameter).numel() // SAMPLE)
            sizes = local_part(parameter.detach()).reshape(-1)[::stride].float().abs()
            lost += int((sizes * BF16_LOST > rates[name] * peak_factor).sum()) * stride
            total += sizes.numel() * stride
    if not total or lost < WARN_SHARE * total:
        return None
    return (
        f"about {lost / total:.0%} of the trained bf16 weights are so large that an update of the size of the learning "
        "rate is less than half of bf16's spacing and rounds away; "
        "keep fp32 masters (model.master_weights=fp32) or train in fp32 (model.dtype=fp32)"
    )


def _rates_by_name(optimizer: Optimizer) -> Mapping[str, float]:
    return {
        name: float(group.get("initial_lr", group["lr"]))
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
