"""The processes of a run and the device of this one. What a launcher puts into the environment is read here alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from optune.errors import ConfigError


@dataclass(frozen=True)
class Processes:
    """This process's place in the run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


@contextmanager
def start(device: str = "auto") -> Iterator[Processes]:
    """Joins the processes that a launcher started, for as long as the context lasts.

    Raises ConfigError where the device is not there, or where there is more than one process.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            f"{world_size} processes were started, but training runs on one process in this version",
            where="--nproc-per-node",
            hint="start it without --nproc-per-node; gradient_accumulation_steps gives the same batch on one device",
        )
    yield Processes(device=find_device(device))


def find_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else Apple's GPU, else the CPU; any other name must be there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{name!r} is not a device", where="device", hint="use auto, cpu, cuda, cuda:N or mps"
        ) from None
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 0)
    if (device.index or 0) >= available:
        found = (
            f"{available} {device.type} device{'s' if available > 1 else ''}"
            if available
            else f"no {device.type} device"
        )
        raise ConfigError(
            f"{name!r} is not there: torch finds {found} on this machine", where="device", hint="use device=auto"
        )
    return device
