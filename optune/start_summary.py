"""What a person should know before the first step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from optune import kernels, metrics, optim
from optune.types import count_parameters, split_packed


class _Kernels:
    """Asked for when the summary is shown, after the trial save: until then they may still be compiled beside it."""

    def __str__(self) -> str:
        kernels.is_ready()
        return kernels.describe() or ""


def show(title: str, fields: Mapping[str, object]) -> None:
    """The summary on stderr, where no run shows it."""
    sys.stderr.write(f"{metrics.format_fields(title, fields)}\n")


def summarize(
    name: str,
    source: Path,
    model: nn.Module,
    batches: Any,
    total_steps: int,
    optimizer: Optimizer,
    stepper: optim.Stepper,
    processes: str | None = None,
    validation: Any = None,
) -> dict[str, object]:
    """What a person should know before the first step, line by line. The model was asked for as `name` and found in
    `source`; `batches`: see `data.build_batches`; `processes`: how several of them share the run; `validation`: see
    `data.build_validation_batches`."""
    own, packed = split_packed(model)
    formats = sorted({_dtype_name(parameter) for parameter in own.values()}) + sorted(
        {weight.format for weight in packed.values()}
    )
    fields: dict[str, object] = {
        "model": name if name == str(source) else f"{name} ({source})",
        "parameters": metrics.describe_parameters(*count_parameters(model)),
        "weights": f"{', '.join(formats)} on {next(iter(own.values())).device}"
        + optim.describe_held(model.named_parameters(), optimizer),
    }
    if next(iter(own.values())).device.type == "cpu":
        fields["kernels"] = _Kernels()
    fields["compile"] = getattr(model, "compilation", None)
    fields["processes"] = processes
    fields |= batches.describe()
    fields["validation"] = validation.describe() if validation else None
    fields["steps"] = metrics.describe_steps(
        total_steps,
        steps_per_epoch=batches.steps_per_epoch,
        rows_per_step=batches.units_per_step,
        unit=batches.unit,
    )
    fields["optimizer"] = type(optimizer).__name__
    fields["step"] = stepper.describe()
    fields["warning"] = optim.warn_lost_updates(model.named_parameters(), optimizer)
    return fields


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
