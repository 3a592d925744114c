"""From what a recipe builds to a forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from optune.loss import Loss
from optune.types import MicrobatchShape

if TYPE_CHECKING:
    from optune.distributed import Processes
    from optune.plan.forecasting import Forecast
    from optune.plan.rehearsal import Task


def make_task(
    outline: Callable[[Any], Any],
    build: Callable[..., Any],
    loss: Loss,
    config: Any,
    shape: MicrobatchShape,
    *,
    device: str = "cpu",
    **settings: Any,
) -> Task:
    """The task of a recipe's functions: `outline(config)`, `build(model, processes, fill, positions_per_step)` and
    `loss`. `config` is the model's `DecoderConfig`; the other settings are those of `Task`."""
    from optune.plan.forecasting import ROUND_UP
    from optune.plan.rehearsal import Task

    def cut(layers: int) -> Any:
        return outline(replace(config, num_hidden_layers=layers, windows=config.windows[:layers]))

    alike = len(set(config.windows)) == 1
    return Task(cut, build, loss, config.num_hidden_layers, shape, alike, round_up=ROUND_UP[device], **settings)


def predict(
    shape: MicrobatchShape,
    microbatches: int,
    saves_on_device: bool,
    *,
    outline: Callable[[Any], Any],
    build: Callable[..., Any],
    loss: Loss,
    config: Any,
    accumulation: str,
    validates: bool,
    processes: Processes,
    device: str | None = None,
    is_apart: bool = False,
) -> Forecast:
    """The forecast of a run whose widest microbatch is known, for rank 0 of its `processes`.

    `outline`, `build`, `loss` and `config`: see `make_task`; a validation is taken to have microbatches of the same
    shape. `device` is that of `processes`, where none is named. What is divided among processes is rehearsed in one of
    its own; `is_apart` says that this is it.
    """
    device = device or processes.device.type
    if processes.mesh is not None and not is_apart:
        from optune.plan.apart import predict_apart

        values = {
            "shape": shape, "microbatches": microbatches, "saves_on_device": saves_on_device, "outline": outline,
            "build": build, "loss": loss, "config": config, "accumulation": accumulation, "validates": validates,
            "device": device,
        }  # fmt: skip
        return predict_apart(processes, values)

    from optune.plan.forecasting import forecast

    task = make_task(
        outline, build, loss, config, shape,
        device=device,
        microbatches=microbatches,
        accumulation=accumulation,
        validation=shape if validates else None,
        processes=replace(processes, device=torch.device("cpu")),
    )  # fmt: skip
    return forecast(task, saved_on_device=saves_on_device)
