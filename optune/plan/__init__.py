"""What a run will need, before anything is loaded.

`forecast` rehearses a step of the run itself, on tensors without values, and says what it takes; `list_settings` says
what else takes less. The formulas say it from shapes alone, for any number of processes, with the bytes on the wire.

A name is read from its file when it is first used: a run must not wait for what it needs at its end.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optune.plan.bounds import Bounds
    from optune.plan.deciding import decide_stash, describe_stepping
    from optune.plan.forecasting import MOMENTS, OVERHEAD, PARTS, Forecast, forecast
    from optune.plan.formulas import (
        Collective,
        Memory,
        Work,
        bytes_on_the_wire,
        count_parameters,
        flops_per_token,
        memory,
        traffic,
    )
    from optune.plan.predicting import make_task, predict
    from optune.plan.rehearsal import Task
    from optune.plan.rows import widest
    from optune.plan.settings import Current, Setting, list_settings
    from optune.plan.working_out import numbers_only

__all__ = [
    "MOMENTS",
    "OVERHEAD",
    "PARTS",
    "Bounds",
    "Collective",
    "Current",
    "Forecast",
    "Memory",
    "Setting",
    "Task",
    "Work",
    "bytes_on_the_wire",
    "count_parameters",
    "decide_stash",
    "describe_stepping",
    "flops_per_token",
    "forecast",
    "list_settings",
    "make_task",
    "memory",
    "numbers_only",
    "predict",
    "traffic",
    "widest",
]

_FILES = {
    "bounds": ("Bounds",),
    "deciding": ("decide_stash", "describe_stepping"),
    "forecasting": ("MOMENTS", "OVERHEAD", "PARTS", "Forecast", "forecast"),
    "predicting": ("make_task", "predict"),
    "rehearsal": ("Task",),
    "rows": ("widest",),
    "settings": ("Current", "Setting", "list_settings"),
    "working_out": ("numbers_only",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = next((file for file, names in _FILES.items() if name in names), "formulas")
    value = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    globals()[name] = value
    return value
