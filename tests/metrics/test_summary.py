"""Summaries fit 80 columns and say numbers as people read them."""

from __future__ import annotations

import pytest

from optune.metrics import describe_parameters, describe_rows, describe_steps, format_fields
from optune.metrics.measure import format_rate, format_time, format_value


def test_fields_are_aligned_and_wrap_under_themselves() -> None:
    text = format_fields("title", {"a": "x " * 60, "longer name": 3, "empty": None, "blank": ""})
    lines = text.splitlines()
    assert lines[0] == "title"
    assert lines[1].startswith("  a            x x")
    assert lines[2].startswith(" " * 15 + "x")
    assert lines[-1] == "  longer name  3"
    assert max(map(len, lines)) <= 80
    assert "empty" not in text and "blank" not in text


def test_a_path_is_never_broken() -> None:
    path = "/home/some-one/" + "a-long-name/" * 12 + "model"
    assert path in format_fields("title", {"writes to": path})


def test_no_fields_is_the_title_alone() -> None:
    assert format_fields("title", {}) == "title"


def test_parameters_rows_and_steps_read_as_sentences() -> None:
    assert describe_parameters(1000, 1000) == "1,000, all trained"
    assert describe_parameters(460_800, 134_975_808) == "460,800 trained of 134,975,808 (0.34 %)"
    assert describe_rows(1) == "1 row"
    assert describe_rows(200, {"too long": 2, "without targets": 1, "other": 0}) == (
        "200 rows, 3 skipped (2 too long, 1 without targets)"
    )
    assert describe_steps(150, steps_per_epoch=50, rows_per_step=8) == "150 steps of 8 rows, 50 an epoch (3 epochs)"
    assert describe_steps(1, steps_per_epoch=1, rows_per_step=1, first_step=1) == (
        "1 step of 1 row, 1 an epoch (1 epoch), going on after step 1"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (245, "4:05"),
        (3723, "1:02:03"),
        (86400 * 2 + 3 * 3600 + 240, "2d 03:04"),
        (-1, "0:00"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0.0"),
        (3.44, "3.4"),
        (9.99, "10"),
        (820.4, "820"),
        (999.7, "1.0k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (1.23e6, "1.2M"),
        (5e9, "5.0G"),
    ],
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.0000"),
        (1.23456, "1.2346"),
        (12.345, "12.35"),
        (1234.5, "1234"),
        (0.0012, "0.0012"),
        (1.2e-5, "1.2e-05"),
        (1e7, "1.0e+07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_values(value: float | None, text: str) -> None:
    assert format_value(value) == text
