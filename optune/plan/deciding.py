"""What the whole model's stepper decides, and says of itself: a shallow one might decide otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from optune.optim.stash import choose
from optune.plan.remembering import Mode
from optune.plan.without_values import answering, give_memory

if TYPE_CHECKING:
    from optune.plan.rehearsal import Task

_ENOUGH = 2
"""Blocks of a model whose stepper asks."""


def describe_stepping(task: Task, layers: int | None = None) -> str:
    """What the stepper of the model, or of one with so many `layers`, says of itself."""
    with torch.random.fork_rng(devices=[]):
        model = task.outline(task.layers if layers is None else layers)
        give_memory(model, Mode())
        with answering():
            _, stepper = task.build(model, task.processes, lambda _: None, task.positions_per_step)
        stepping = stepper.describe()
        stepper.close()
        return stepping


def decide_stash(task: Task) -> None:
    """Fills `task.decided`, where its stepper has a stash to choose."""
    with deciding_for_whole_model(task):
        describe_stepping(task, min(task.layers, _ENOUGH))


@contextmanager
def deciding_for_whole_model(task: Task) -> Iterator[None]:
    """Lets `gradient_stash: auto` decide for a shallow model what it decides for the whole one."""
    plain = choose.choose_policy

    def decide(*args: Any, **kwargs: Any) -> choose.Choice:
        if not task.decided:
            choose.choose_policy = remember
            describe_stepping(task)
            choose.choose_policy = decide
        return task.decided[0]

    def remember(*args: Any, **kwargs: Any) -> choose.Choice:
        task.decided.append(plain(*args, **kwargs))
        return task.decided[0]

    choose.choose_policy = decide
    try:
        yield
    finally:
        choose.choose_policy = plain
