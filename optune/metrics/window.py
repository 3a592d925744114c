"""The steps between two logged lines, summed up so that the loss is one definition: the token-weighted mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Window:
    """Sums since the last logged line. `loss_sum` is Σ loss × targets over the steps that count in `loss_targets`."""

    steps: int = 0
    last_loss: float = math.nan
    loss_sum: float = 0.0
    loss_targets: float = 0.0
    targets: float = 0.0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, *, loss: float, targets: float, tokens: int, skipped: bool, seconds: float) -> None:
        self.steps += 1
        self.targets += targets
        self.tokens += tokens
        self.skipped += skipped
        self.seconds += seconds
        if not skipped or math.isfinite(loss):  # One skipped NaN must not hide the loss of the steps around it.
            self.last_loss = loss
            self.loss_sum += loss * targets
            self.loss_targets += targets

    @property
    def loss(self) -> float:
        """The mean over targets; of a single step, the very number that it gave."""
        return self.last_loss if self.steps == 1 or not self.loss_targets else self.loss_sum / self.loss_targets

    def state(self) -> dict[str, Any]:
        """Everything but the time, for `progress.json`."""
        return {key: value for key, value in vars(self).items() if key != "seconds"}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Window:
        window = cls(**state)
        # JSON has no NaN.
        window.last_loss = math.nan if window.last_loss is None else window.last_loss
        return window
