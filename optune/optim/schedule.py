"""Learning-rate schedules as pure functions of the step.

A schedule gives the factor on each group's base rate. Step 0 is the first update; nothing is remembered between calls,
so a resumed run needs no replay. s: step, w: warm-up steps, n: total steps, m: `min_lr_ratio`.

- warm-up: (s + 1) / w while s < w. The first update has a rate above 0, and update w the full rate.
- afterwards, with p = (s - w) / (n - w), the part of the rest that is over, m + (1 - m) · shape(p):
  constant 1; linear 1 - p; cosine (1 + cos πp) / 2 (Loshchilov and Hutter 2017, without restarts);
  wsd 1 until the last d steps, then linear (Hu et al. 2024, MiniCPM; d is a fifth unless said);
  inverse_sqrt √(t / (s - w + t)), where t is w, or 10,000 without warm-up (Vaswani et al. 2017).

These are transformers' curves (`get_cosine_schedule_with_warmup`, …) except in warm-up, whose first rate is 0 there.
The floor m is what step n would have; so no update before the last one is at the floor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from optune.errors import ConfigError

Schedule = Callable[[int], float]
"""step (0 = the first update) -> factor on the base rate"""

NAMES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
DECAY_SHARE = 0.2
NO_WARMUP_TIMESCALE = 10_000


def build_schedule(
    *,
    total_steps: int,
    name: str = "constant",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    decay_steps: int | None = None,
    factory: Callable[..., LRScheduler] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule called `name`, or the one that a torch scheduler gives.

    - `total_steps`: updates in the whole run; `warmup_steps` of them may be warm-up, up to all.
    - `decay_steps`: of `wsd` only; a fifth of the run when None.
    - `factory`, `settings`: a class from `torch.optim.lr_scheduler` and its keywords, see `TableSchedule`.

    Raises `ConfigError` for values that cannot make a schedule, such as more warm-up than steps.
    """
    if total_steps < 1:
        raise ConfigError(f"a run of {total_steps} steps has no schedule", where="schedule")
    if factory is not None:
        if warmup_steps or min_lr_ratio or decay_steps is not None:
            raise ConfigError(
                "warmup_steps, min_lr_ratio and decay_steps belong to named schedules; a _target_ has its own keywords",
                where="schedule",
            )
        return TableSchedule(factory, settings or {}, total_steps)
    _check(name, total_steps, warmup_steps, min_lr_ratio, decay_steps)
    shape = _choose_shape(name, total_steps, warmup_steps, decay_steps)

    def schedule(step: int) -> float:
        if step < 0:
            raise ValueError(f"step {step} is before the first update, which is step 0")
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return min_lr_ratio + (1.0 - min_lr_ratio) * shape(min(step, total_steps))

    return schedule


def set_learning_rate(optimizer: Optimizer, schedule: Schedule, step: int) -> None:
    """Sets each group's rate to its own base rate (`initial_lr`) times the factor for `step`; before the step's first
    backward, since a step may happen inside it."""
    for group in optimizer.param_groups:
        base = group["initial_lr"]
        rate = schedule.rate(base, step) if isinstance(schedule, TableSchedule) else base * schedule(step)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def get_learning_rate(optimizer: Optimizer) -> float:
    """The rate of the first group: of all parameters that no entry of `parameter_groups` matches, if there are any."""
    return float(optimizer.param_groups[0]["lr"])


def _check(name: str, total_steps: int, warmup_steps: int, min_lr_ratio: float, decay_steps: int | None) -> None:
    if name not in NAMES:
        raise ConfigError(f"{name!r} is not one of {', '.join(NAMES)}", where="schedule.name")
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"{warmup_steps} warm-up steps in a run of {total_steps} steps: the rate would never be reached",
            where="schedule.warmup_steps",
            hint=f"0 to {total_steps}",
        )
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ConfigError(f"{min_lr_ratio} is not between 0 and 1", where="schedule.min_lr_ratio")
    if decay_steps is None:
        return
    if name != "wsd":
        raise ConfigError(f"belongs to wsd, and the schedule is {name}", where="schedule.decay_steps")
    if not 0 <= decay_steps <= total_steps - warmup_steps:
        raise ConfigError(
            f"{decay_steps} steps do not fit into the {total_steps - warmup_steps} after warm-up",
            where="schedule.decay_steps",
        )


def _choose_shape(name: str, total: int, warmup: int, decay: int | None) -> Callable[[int], float]:
    """The curve after warm-up, from 1 down, as a function of the step."""
    rest = max(1, total - warmup)
    if name == "linear":
        return lambda step: 1.0 - (step - warmup) / rest
    if name == "cosine":
        return lambda step: 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / rest))
    if name == "wsd":
        length = min(total - warmup, max(1, round(DECAY_SHARE * total))) if decay is None else decay
        return lambda step: min(1.0, (total - step) / length) if length else 1.0
    if name == "inverse_sqrt":
        timescale = warmup or NO_WARMUP_TIMESCALE
        return lambda step: math.sqrt(timescale / (step - warmup + timescale))
    return lambda step: 1.0


class TableSchedule:
    """A torch scheduler as a pure function of the step.

    It is run over all steps beforehand, on an optimizer of its own, and its rates are kept. Some schedulers take rates
    besides factors (`eta_min`, `max_lr`), so each base rate has a table of its own: what the scheduler would give a
    group of that rate. Called with a step, it gives the rate for a base rate of 1.

    Raises `ConfigError` for a scheduler that follows the loss or changes the momentum, and for settings that fail.
    """

    def __init__(self, factory: Callable[..., LRScheduler], settings: Mapping[str, Any], total_steps: int) -> None:
        self._factory, self._settings, self._total_steps = factory, dict(settings), total_steps
        self._name = getattr(factory, "__name__", str(factory))
        self._tables: dict[float, list[float]] = {}
        if isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau):
            raise ConfigError(
                f"{self._name} follows the loss, so its rate is no function of the step and cannot be resumed exactly",
                where="schedule._target_",
                hint=f"use a schedule of the step: {', '.join(NAMES)}, or another torch scheduler",
            )
        self.rate(1.0, 0)

    def __call__(self, step: int) -> float:
        return self.rate(1.0, step)

    def rate(self, base_lr: float, step: int) -> float:
        """The rate that a group with `base_lr` has in `step`; after the last step, the last one."""
        if step < 0:
            raise ValueError(f"step {step} is before the first update, which is step 0")
        if base_lr not in self._tables:
            self._tables[base_lr] = self._tabulate(base_lr)
        return self._tables[base_lr][min(step, self._total_steps - 1)]

    def _tabulate(self, base_lr: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=base_lr, momentum=0.9)
        (group,) = optimizer.param_groups
        table = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler = self._factory(optimizer, **self._settings)
                for _ in range(self._total_steps):
                    table.append(float(group["lr"]))
                    optimizer.step()
                    scheduler.step()
        except Exception as error:
            # A ValueError is written for the caller; what else comes up, such as a division by zero, says nothing.
            said = str(error) if isinstance(error, ValueError) and str(error) else "these values do not go together"
            given = ", ".join(f"{key}: {value!r}" for key, value in self._settings.items()) or "no keywords"
            raise ConfigError(
                f"{self._name} with {given} cannot make a schedule of {self._total_steps} steps: {said}",
                where="schedule",
            ) from error
        if group["momentum"] != 0.9:
            raise ConfigError(
                f"{self._name} also changes the momentum, which a learning-rate schedule cannot carry",
                where="schedule",
                hint="set cycle_momentum: false",
            )
        return table
