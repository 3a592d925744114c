"""The search for settings that train the same and fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optune.plan import Bounds, Forecast, Setting

MOST_TRIED = 12
"""Settings that are rehearsed until enough fit."""
ENOUGH = 3
ALIKE = 0.005
"""Peaks that differ by less are shown as the same."""


@dataclass(frozen=True)
class Fit:
    """A setting, and what it takes."""

    setting: Setting
    forecast: Forecast


def find_fits(
    settings: Sequence[Setting],
    bounds: Bounds,
    limit: int,
    rehearse: Callable[[Setting], Forecast | None],
) -> tuple[list[Fit], Fit | None]:
    """The cheapest of `settings` (cheapest first) whose peak is at most `limit`; and where none is, the one that takes
    least of those that were rehearsed, None where what stays all the time is more than the limit.

    `rehearse` gives None for a setting that does not go with the rest of the config. Settings that `bounds` show to
    take more, or that are weaker than one that does, are not rehearsed.
    """
    if bounds.stays > limit:
        return [], None
    tried: list[Fit] = []
    waiting = list(settings)
    while waiting and len(tried) < MOST_TRIED and len(drop_dominated(tried, limit)) < ENOUGH:
        setting = waiting.pop(0)
        if bounds.is_idle(setting.current) or bounds.least(setting.current) > limit:
            continue
        forecast = rehearse(setting)
        if forecast is None:
            continue
        tried.append(Fit(setting, forecast))
        bounds.learn(setting.current, forecast)
        if forecast.peak > limit:
            waiting = [other for other in waiting if not other.is_weaker(setting)]
    fits = drop_dominated(tried, limit)
    if not fits and (nearest := _find_nearest(settings, bounds)) is not None:
        if all(fit.setting is not nearest for fit in tried) and (forecast := rehearse(nearest)) is not None:
            tried.append(Fit(nearest, forecast))
        fits = drop_dominated(tried, limit)
    return fits, None if fits else min(tried, key=lambda fit: fit.forecast.peak, default=None)


def _find_nearest(settings: Sequence[Setting], bounds: Bounds) -> Setting | None:
    """The one that may take least of all; where several may, the one that does most to save memory."""
    useful = [setting for setting in settings if not bounds.is_idle(setting.current)]
    return min(useful, key=lambda each: (bounds.least(each.current), -sum(each.strength)), default=None)


def drop_dominated(tried: Iterable[Fit], limit: int) -> list[Fit]:
    """Those within the limit, cheapest first, without those that change as much as another one or more, and neither
    cost less nor take less."""
    fits = [fit for fit in tried if fit.forecast.peak <= limit]
    fits.sort(key=lambda fit: (round(fit.setting.time, 3), len(fit.setting.overrides)))
    kept: list[Fit] = []
    for fit in fits:
        if not any(_is_no_worse(other, fit) for other in kept):
            kept.append(fit)
    return kept


def _is_no_worse(one: Fit, other: Fit) -> bool:
    return (
        round(one.setting.time, 3) <= round(other.setting.time, 3)
        and one.forecast.peak <= other.forecast.peak * (1 + ALIKE)
        and len(one.setting.overrides) <= len(other.setting.overrides)
    )
