"""What a run was predicted to take, beside what it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import psutil
from torch import nn
from torch.optim import Optimizer

from optune import files, metrics
from optune.optim.kinds import is_compiled
from optune.shards import local_values
from optune.train import StepResult
from optune.types import MicrobatchShape

WORTHWHILE_S = 20.0
"""Runs whose steps took less end without the comparison: to predict takes a second or two."""


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
    without the tensors of model and optimizer.
    """

    def __init__(self, predict: Predict | None, model: nn.Module, optimizer: Optimizer, device: str) -> None:
        self._predict, self._device = predict, device
        self._compiles = any(map(is_compiled, model.modules())) or type(optimizer).__module__.startswith("torchao.")
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

    def compare(self, stepped_s: float, *, saves_ahead: bool) -> str | None:
        """One line for the end of a run whose steps took `stepped_s`; None where nothing is predicted."""
        if self._predict is None or stepped_s < WORTHWHILE_S or not self._microbatches:
            return None
        try:
            forecast = self._predict(self._widest, self._microbatches, saves_ahead and self._device == "cpu")
        except Exception as error:  # A trained model must not be lost to a comparison.
            return f"could not be predicted: {str(error).partition(chr(10))[0]}"
        predicted = f"{files.format_bytes(forecast.peak)} (in {forecast.fullest})"
        whole = metrics.peak_memory_bytes(self._device)
        if self._device != "cpu":
            return f"{predicted}, measured {files.format_bytes(whole)} (given out by torch's allocator)"
        own = files.format_bytes(max(0, whole - self._before))
        beyond = f"resident, beyond {files.format_bytes(self._before)} before the model"
        return f"{predicted}, measured {own} ({beyond}{', with the compiler' if self._compiles else ''})"
