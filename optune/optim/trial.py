"""Trying an optimizer before the weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from optune import idle_modules
from optune.errors import ConfigError
from optune.optim.build import build_optimizer
from optune.optim.masters import filled
from optune.shards import make_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TRIAL_SIZE = 8
"""Dimensions of the stand-ins are cut to this."""
LOW_BIT_SIZE = 128
"""Smaller parameters have state of full precision."""


def try_optimizer(
    outline: nn.Module,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    *,
    parameter_groups: Sequence[Mapping[str, Any]] = (),
    master_weights: str = "none",
    update_rounding: str = "nearest",
    seed: int = 0,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | None = None,
) -> None:
    """Builds the optimizer on small stand-ins of the parameters that `outline` trains, and takes one step.

    `outline` has the names, ranks and dtypes of the model to come, and may lie on the meta device; `device` is where
    its parameters will lie, `mesh` what they will be spread over. What only a step finds out is found here:
    `capturable` on the CPU, an optimizer that wants sparse gradients or cannot step shards, state that cannot be
    divided. Raises `ConfigError` as `build_optimizer` does, and for whatever goes wrong in the step.
    """
    trained = [(name, parameter) for name, parameter in outline.named_parameters() if parameter.requires_grad]
    values = [
        torch.zeros([min(size, TRIAL_SIZE) for size in parameter.shape], dtype=parameter.dtype, device=device)
        for _, parameter in trained
    ]
    if mesh is not None:
        from torch.distributed.tensor import Shard

        by_rows = [Shard(0)] * mesh.ndim
        whole = [(value.shape[0] * mesh.size(), *value.shape[1:]) for value in values]
        values = [make_dtensor(value, mesh, by_rows, shape) for value, shape in zip(values, whole, strict=True)]
    stand_ins = [(name, nn.Parameter(each)) for (name, _), each in zip(trained, values, strict=True)]
    optimizer = build_optimizer(
        stand_ins,
        factory=factory,
        settings=settings,
        parameter_groups=parameter_groups,
        master_weights=master_weights,
        update_rounding=update_rounding,
        seed=seed,
    )
    # Compiled optimizers are tried uncompiled: the same arithmetic without a minute of compiling. Those that round
    # stochastically draw from the global generator.
    with torch.random.fork_rng(), idle_modules.tried(optimizer), filled(stand_ins, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        try:
            optimizer.step()
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"{type(optimizer).__name__} fails in a trial step on small parameters: {text}",
                where="optimizer",
                hint=_advise(settings, parameter_groups),
            ) from error
        if mesh is not None:
            _refuse_low_bit_state(factory, settings)


def _refuse_low_bit_state(factory: Callable[..., Optimizer], settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where the state of a parameter is a tensor made of others, as torchao's is."""
    if factory.__module__.partition(".")[0] != "torchao":
        return
    probe = nn.Parameter(torch.zeros(LOW_BIT_SIZE, LOW_BIT_SIZE))
    probe.grad = torch.zeros_like(probe)
    optimizer = factory([probe], **settings)
    optimizer.step()
    if any(hasattr(value, "__tensor_flatten__") for value in optimizer.state[probe].values()):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps low-bit state, which is not divided among processes: which values share "
            "a scale depends on where a parameter is cut, so a checkpoint would fit one layout alone",
            where="optimizer._target_",
            hint="use torch.optim.AdamW; or whole weights: one process without parallel.offload, or "
            "optimizer_step=immediate",
        )


def _advise(settings: Mapping[str, Any], parameter_groups: Sequence[Mapping[str, Any]]) -> str:
    keys = dict.fromkeys(["_target_", *settings, *(key for group in parameter_groups for key in group)])
    return f"change {', '.join(f'optimizer.{key}' for key in keys if key not in ('match', 'lr', 'weight_decay'))}"
