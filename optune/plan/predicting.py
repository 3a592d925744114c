"""From what a recipe builds to a forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optune.loss import Loss
from optune.types import MicrobatchShape

if TYPE_CHECKING:
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
    device: str,
) -> Forecast:
    """The forecast of a run in one process whose widest microbatch is known. `outline`, `build`, `loss` and `config`:
    see `make_task`; a validation is taken to have microbatches of the same shape."""
    from optune.plan.forecasting import forecast

    task = make_task(
        outline, build, loss, config, shape,
        device=device,
        microbatches=microbatches,
        accumulation=accumulation,
        validation=shape if validates else None,
    )  # fmt: skip
    return forecast(task, saved_on_device=saves_on_device)
