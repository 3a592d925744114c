"""What `optune plan` found, and the document that it is as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tune_cli.fitting import Fit

if TYPE_CHECKING:
    from optune.plan import Forecast


@dataclass(frozen=True)
class Result:
    """What `optune plan` found."""

    summary: dict[str, str]
    forecast: Forecast
    device: str
    overhead: int
    memory: int | None
    fits: list[Fit]
    smallest: Fit | None
    adapters: Forecast | None
    """What training adapters takes, or adapters over a base in NF4: not the same training, but what may fit."""
    adapters_by: str
    notes: list[str]

    @property
    def stays(self) -> int:
        """Bytes that are there all the time, whatever is set, with those beside tensors."""
        return self.forecast.totals["save"] + self.overhead

    def is_enough(self, forecast: Forecast) -> bool:
        return self.memory is None or forecast.peak + self.overhead <= self.memory

    def as_json(self) -> dict[str, Any]:
        """See docs/memory.md."""
        return {
            **self.summary,
            "device": self.device,
            "moments": {moment: dict(parts) for moment, parts in self.forecast.moments.items()},
            "peak_bytes": self.forecast.peak,
            "peak_moment": self.forecast.fullest,
            "overhead_bytes": self.overhead,
            "memory_bytes": self.memory,
            "fits": None if self.memory is None else self.is_enough(self.forecast),
            "settings": [_describe(fit) for fit in self.fits],
            "smallest": None if self.smallest is None else _describe(self.smallest),
            "adapters": None
            if self.adapters is None
            else {"by": self.adapters_by, "peak_bytes": self.adapters.peak, "fits": self.is_enough(self.adapters)},
            "notes": self.notes,
        }


def _describe(fit: Fit) -> dict[str, Any]:
    return {
        "overrides": fit.setting.words,
        "time": round(fit.setting.time, 3),
        "peak_bytes": fit.forecast.peak,
        "peak_moment": fit.forecast.fullest,
    }
