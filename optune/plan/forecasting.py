"""What a run will take, moment by moment and part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from optune.errors import ConfigError
from optune.plan.rehearsal import BEGINNING, Task, rehearse
from optune.plan.without_values import NO_VALUES

PARTS = {
    "weights": "weights",
    "masters": "fp32 master weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered from other shards",
    "activations": "activations",
    "loss": "logits and loss",
    "stash": "waiting for the norm",
    "update": "made by the update",
    "batch": "rows as tokens",
    "copies": "copies being saved",
}
"""The parts of memory, in the order in which they are shown."""

OVERHEAD = {"cpu": 400 * 2**20, "cuda": 500 * 2**20}
"""What a process takes beside its tensors: Python with torch; on a GPU the context of CUDA and its libraries. Seen with
torch 2.13 on Linux for the CPU; an assumption for CUDA."""


def _round_up_cuda(size: int) -> int:
    """torch's caching allocator gives multiples of 512 bytes, and rounds what is larger than 10 MiB up to 2 MiB where
    it asks the driver (c10/cuda/CUDACachingAllocator.cpp)."""
    return -(-size // 512) * 512 if size <= 10 * 2**20 else -(-size // 2**21) * 2**21


ROUND_UP = {"cpu": int, "cuda": _round_up_cuda}
"""What an allocator makes of a size."""
MOMENTS = ("load", "forward", "backward", "step", "validation", "save")


@dataclass(frozen=True)
class Forecast:
    """Bytes at the fullest point of each moment, by part; both in the order of `MOMENTS` and `PARTS`."""

    moments: Mapping[str, Mapping[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        return {moment: sum(parts.values()) for moment, parts in self.moments.items()}

    @property
    def peak(self) -> int:
        return max(self.totals.values())

    @property
    def fullest(self) -> str:
        """The moment of the peak; the first one where several are as full."""
        totals = self.totals
        return max(totals, key=lambda moment: totals[moment])


def forecast(task: Task, *, saved_on_device: bool = False) -> Forecast:
    """What `task` takes. With `saved_on_device` the copies from which checkpoints are written in the background stay in
    the same memory from the first save on (a run on the CPU that saves before its end)."""
    try:
        account = rehearse(task)
    except NO_VALUES as error:
        raise ConfigError(
            f"memory cannot be predicted so: {_name_operation(error)} needs values, and a plan has none",
            where="optune plan",
            hint="an optimizer or a layer of its own kind is the likely cause; plan without it for a lower bound",
        ) from error
    fullest: dict[str, Counter[str]] = {}
    for (moment, *_), parts in account.items():
        if moment not in fullest or parts.total() > fullest[str(moment)].total():
            fullest[str(moment)] = parts
    copies = fullest["save"]["copies"]
    fullest["save"] = account[BEGINNING].copy()
    if saved_on_device:
        for moment, parts in fullest.items():
            if moment != "load":
                parts["copies"] = copies
    moments = {moment: fullest[moment] for moment in MOMENTS if moment in fullest}
    return Forecast({moment: _in_order(parts) for moment, parts in moments.items()})


def _name_operation(error: BaseException) -> str:
    return str(getattr(error, "func", None) or error).partition("\n")[0]


def _in_order(parts: Counter[str]) -> dict[str, int]:
    return {part: parts[part] for part in PARTS if parts[part]}
