"""The search for settings that fit: which ones are rehearsed, and which are shown."""

from __future__ import annotations

from typing import Any

from optune.optim.stash.choose import Choice
from optune.plan import Bounds, Current, Forecast, Setting
from tune_cli.fitting import ENOUGH, Fit, drop_dominated, find_fits

CURRENT = Current(
    batch_size=4, microbatches=1, length=128, checkpointing="none", step="after_backward", clips=True, stash="auto",
    accumulation="depth_first",
)  # fmt: skip


def make_forecast(peak: int, stays: int = 10) -> Forecast:
    return Forecast({
        "forward": {"weights": stays, "activations": peak - stays},
        "step": {"weights": stays, "gradients": 10},
        "save": {"weights": stays},
    })  # fmt: skip


def make_setting(name: str, time: float, changes: int = 1, **values: Any) -> Setting:
    overrides: dict[str, str | int] = {f"{name}{number}": number for number in range(changes)}
    return Setting(overrides, time, Current(**vars(CURRENT) | values), (0, 0, 0, 0))


def test_setting_that_changes_as_much_for_no_gain_in_time_or_memory_is_not_shown() -> None:
    plain, same, longer, less, slow = (
        Fit(make_setting("plain", 1.1), make_forecast(50)),
        Fit(make_setting("same", 1.1, changes=2), make_forecast(50)),
        Fit(make_setting("longer", 1.2), make_forecast(50)),
        Fit(make_setting("less", 1.2, changes=2), make_forecast(40)),
        Fit(make_setting("slow", 1.3, changes=3), make_forecast(45)),
    )
    too_much = Fit(make_setting("too_much", 1.0), make_forecast(99))
    assert drop_dominated([slow, same, plain, too_much, less, longer], 60) == [plain, less]


def test_only_settings_that_may_fit_are_rehearsed_and_no_more_than_are_shown() -> None:
    settings = [
        make_setting("whole", 1.0),  # all four rows: as much as now
        make_setting("half", 1.1, batch_size=2, microbatches=2),
        make_setting("idle", 1.1, changes=2, batch_size=2, microbatches=2, step="in_backward"),
        *(make_setting(f"block{number}", 1.2 + number / 10, checkpointing="block") for number in range(5)),
    ]
    rehearsed: list[Setting] = []

    def rehearse(setting: Setting) -> Forecast:
        rehearsed.append(setting)
        return make_forecast(50 - len(rehearsed))

    fits, smallest = find_fits(
        settings, Bounds(CURRENT, make_forecast(110), decided=[Choice("hold", "")]), 60, rehearse
    )
    assert rehearsed == settings[3:6]
    assert [fit.setting for fit in fits] == rehearsed
    assert (len(fits), smallest) == (ENOUGH, None)


def test_nothing_is_rehearsed_where_what_is_always_there_does_not_fit() -> None:
    def rehearse(setting: Setting) -> Forecast:
        raise AssertionError(setting)

    settings = [make_setting("block", 1.3, checkpointing="block")]
    assert find_fits(settings, Bounds(CURRENT, make_forecast(110, stays=61)), 60, rehearse) == ([], None)


def test_where_none_fits_the_one_that_may_take_least_is_rehearsed() -> None:
    settings = [make_setting("half", 1.1, batch_size=2, microbatches=2), make_setting("row", 1.2, batch_size=1)]
    fits, smallest = find_fits(settings, Bounds(CURRENT, make_forecast(410)), 60, lambda _: make_forecast(110))
    assert fits == []
    assert smallest is not None
    assert smallest.setting is settings[1]
