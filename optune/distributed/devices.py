"""The device of this process."""

from __future__ import annotations

import torch

from optune.errors import ConfigError


def read_device(name: str, local_world_size: int = 1) -> torch.device:
    """The device called `name`, which need not be there. Raises `ConfigError` for what is none, and for one that
    several processes of a machine cannot share."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{name!r} is not a device", where="device", hint="use auto, cpu, cuda, cuda:N or mps"
        ) from None
    if local_world_size > 1 and (device.type == "mps" or device.index is not None):
        raise ConfigError(
            f"{name!r} is one device, and {local_world_size} processes run on this machine",
            where="device",
            hint="use device=cuda (a device for each process) or device=cpu",
        )
    return device


def find_device(name: str, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """`auto` is a CUDA device, else Apple's GPU, else the CPU; any other name must be there.

    Of several processes on a machine each takes a CUDA device of its own, or all of them the CPU. Raises `ConfigError`.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if local_world_size == 1 and torch.backends.mps.is_available() else "cpu"
    device = read_device(name, local_world_size)
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 0)
    needed = local_world_size if device.type == "cuda" else 1
    if (device.index or 0) >= available:
        found = (
            f"{available} {device.type} device{'s' if available > 1 else ''}"
            if available
            else f"no {device.type} device"
        )
        raise ConfigError(
            f"{name!r} is not there: torch finds {found} on this machine", where="device", hint="use device=auto"
        )
    if needed > available:
        raise ConfigError(
            f"{needed} processes run on this machine, and torch finds {available} {device.type} devices",
            where="--nproc-per-node",
            hint="start as many processes as there are devices, or use device=cpu",
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank if local_world_size > 1 else torch.cuda.current_device())
    return device
