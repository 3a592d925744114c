"""When and how the optimizer steps.

`build_optimizer` makes an ordinary torch optimizer; `build_stepper` makes the object that decides when it steps: after
the backward pass, inside it, or before the gradient flows on. The training step makes the same two calls for each.
"""

from optune.optim.build import build_optimizer, build_stepper, why_whole
from optune.optim.masters import (
    describe_held,
    fill_masters,
    filled,
    named_masters,
    named_optimizer_parameters,
    warn_lost_updates,
)
from optune.optim.schedule import Schedule, build_schedule, get_learning_rate, set_learning_rate
from optune.optim.stepper import Stepper, StepStats
from optune.optim.trial import try_optimizer

__all__ = [
    "Schedule",
    "StepStats",
    "Stepper",
    "build_optimizer",
    "build_schedule",
    "build_stepper",
    "describe_held",
    "fill_masters",
    "filled",
    "get_learning_rate",
    "named_masters",
    "named_optimizer_parameters",
    "set_learning_rate",
    "try_optimizer",
    "warn_lost_updates",
    "why_whole",
]
