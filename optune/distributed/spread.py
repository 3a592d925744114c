"""A model over the processes of a run: parts of layers first, then shards by block, on torch's FSDP2."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from optune.distributed.layout import Layout
from optune.distributed.processes import Processes


def spread(model: Any, processes: Processes) -> None:
    """Divides `model` among `processes` as their layout says, in place; alone, or where it stays whole, does nothing.
    Offloaded parameters get their memory in `processes.parameter_device`, and come to the device block by block.

    `model` is a decoder (with `.blocks`) with its adapters, not yet compiled; steppers and optimizers are made
    afterwards. On the meta device nothing is allocated. With `tensor` > 1 each layer is split first. Then every block
    is one FSDP2 group and what is left is another: a block's weights are gathered while it runs.

    Gradients are **summed** over the data ranks, so the loss of each is divided by the targets of all of them.
    Low-precision gradients are summed in fp32 and rounded once.
    """
    if processes.layout.keep_whole or processes.mesh is None:
        return
    mesh, layout = processes.mesh, processes.layout
    if layout.tensor > 1:
        from optune.distributed import tensor_parallel

        tensor_parallel.apply(model, mesh["tensor"])
    if layout.data_size == 1 and not layout.offload:
        return
    _shard(model, mesh["shard"] if layout.replicate == 1 else mesh["replicate", "shard"], layout.offload)


def check_model(config: Any, layout: Layout) -> None:
    """Raises ConfigError where a decoder of the shape `config` cannot be divided so, before anything is loaded."""
    if layout.tensor > 1:
        from optune.distributed import tensor_parallel

        tensor_parallel.check(config, layout.tensor)


def _shard(model: Any, mesh: Any, offload: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # The hidden states of a split model are a view of what was gathered. Nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)

    is_low = any(parameter.element_size() < 4 for parameter in model.parameters() if parameter.requires_grad)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_low else None)
    # Pinned memory is what copies can overlap from; without an accelerator there is none.
    home = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=home)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums, and no scale is wanted
    _enter_by(model, "hidden", ("embed", "final_norm"))


def _enter_by(model: Any, whole: str, parts: tuple[str, ...]) -> None:
    """Lets FSDP2 gather the root's parameters around `whole`, and around each of `parts` where it is called alone.

    Called inside `whole`, a part must not be a forward pass of its own: its end would be taken for that of the whole.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    plain = {name: getattr(model, name) for name in parts}
    for name in (whole, *parts):
        register_fsdp_forward_method(model, name)
    hooked = {name: getattr(model, name) for name in (whole, *parts)}
    is_inside = False

    def run_whole(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return hooked[whole](*args, **kwargs)
        finally:
            is_inside = False

    def run_part(name: str, *args: Any, **kwargs: Any) -> Any:
        return (plain if is_inside else hooked)[name](*args, **kwargs)

    setattr(model, whole, run_whole)
    for name in parts:
        setattr(model, name, partial(run_part, name))
