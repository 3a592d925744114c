"""What a run was predicted to take, beside what it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Protocol

import psutil
from torch import nn
from torch.optim import Optimizer

from optune import files, metrics
from optune.distributed import Processes
from optune.optim.kinds import is_compiled
from optune.shards import local_values
from optune.train import StepResult
from optune.types import MicrobatchShape

TOY_BYTES = 2**24
"""A model with less than this, trained or not, is lost in what a process takes beside it: nothing is compared."""


class Forecast(Protocol):
    """What is read of a `plan.Forecast`."""

    @property
    def peak(self) -> int: ...
    @property
    def fullest(self) -> str: ...


Predict = Callable[[MicrobatchShape, int, bool], Forecast]
"""The forecast for steps of so many microbatches of a shape, and whether copies are saved from the same memory."""


class MemoryCheck:
    """Remembers what memory depends on while a run lasts, and compares at its end. Made before the first step.

    On CUDA, measured is what torch's allocator had given out at most. On a CPU it is the most that the process had
    resident, less what it had before the model: Python, torch and the rows. That is what was there when this was made,
    without the tensors of model and optimizer. Of several processes the one with the most is measured.
    """

    def __init__(self, predict: Predict | None, model: nn.Module, optimizer: Optimizer, processes: Processes) -> None:
        self._predict, self._processes, self._device = predict, processes, processes.device.type
        self._compiles = any(map(is_compiled, model.modules())) or type(optimizer).__module__.startswith("torchao.")
        self._is_toy = sum(tensor.nbytes for tensor in model.parameters()) < TOY_BYTES
        held = [*model.parameters(), *model.buffers()]
        held += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held += [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
        storages = {s._cdata: s.nbytes() for s in (local_values(tensor).untyped_storage() for tensor in held)}
        self._before = max(0, psutil.Process().memory_info().rss - sum(storages.values()))
        self._widest = MicrobatchShape(0, 0, 0)
        self._microbatches = 0

    def saw(self, result: StepResult) -> None:
        """After each step."""
        if result.widest is not None and result.widest.positions > self._widest.positions:
            self._widest = result.widest
        self._microbatches = max(self._microbatches, result.microbatches)

    def compare(self, *, saves_ahead: bool) -> str | None:
        """One line for the end of a run; None where nothing is predicted. All processes call it together."""
        if self._predict is None or self._is_toy or not self._microbatches:
            return None
        whole = metrics.peak_memory_bytes(self._device)
        own = whole if self._device != "cpu" else max(0, whole - self._before)
        most, before, rank = self._of_first_with_most(own, [self._before])
        _, *sizes, packed, weighted, _ = self._of_first_with_most(self._widest.positions, astuple(self._widest))
        shape = MicrobatchShape(*sizes, packed=bool(packed), weighted=bool(weighted))
        if not self._processes.is_main:
            return None
        try:
            forecast = self._predict(shape, self._microbatches, saves_ahead and self._device == "cpu")
        except Exception as error:  # A trained model must not be lost to a comparison.
            return f"could not be predicted: {str(error).partition(chr(10))[0]}"
        predicted = f"{files.format_bytes(forecast.peak)} (in {forecast.fullest})"
        where = f"on rank {rank}, " if self._processes.world_size > 1 else ""
        if self._device != "cpu":
            return f"{predicted}, measured {files.format_bytes(most)} ({where}given out by torch's allocator)"
        beyond = f"{where}resident, beyond {files.format_bytes(before)} before the model"
        compiler = ", with the compiler" if self._compiles else ""
        return f"{predicted}, measured {files.format_bytes(most)} ({beyond}{compiler})"

    def _of_first_with_most(self, amount: int, values: Sequence[int]) -> list[int]:
        """The largest amount of all processes, the `values` of the one that has it, and its rank."""
        processes = self._processes
        most = processes.agree([amount])[0]
        rank = -processes.agree([-processes.rank if amount == most else -processes.world_size])[0]
        return [most, *processes.agree([int(value) if processes.rank == rank else 0 for value in values]), rank]
