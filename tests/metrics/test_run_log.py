"""The numbers that a run tells are defined once, and do not depend on how it was cut."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from optune import metrics, run_folder
from optune.metrics import RunLog, read_metrics
from optune.metrics.window import Window

KEYS = ["step", "epoch", "loss", "lr", "grad_norm", "targets", "tokens", "tokens_per_s", "peak_memory_gib", "step_s"]
LOSSES = [3.1, 2.7, 2.9, 2.3, 2.6, 1.7, 1.9, 1.1]
TARGETS = [10.0, 1.0, 7.0, 30.0, 2.0, 5.0, 9.0, 4.0]


@pytest.fixture(autouse=True)
def no_plot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a second."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda _: None)


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def take_steps(log: RunLog, first: int, last: int, clock: Clock | None = None, seconds: float = 0.5) -> None:
    for step in range(first, last + 1):
        if clock is not None:
            clock.now += seconds
        loss, targets = LOSSES[step - 1], TARGETS[step - 1]
        log.step(step, loss=loss, targets=targets, tokens=100, lr=step / 100, epoch=step / 4, grad_norm=1.5)


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("tokens_per_s", "peak_memory_gib", "step_s")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def test_a_line_has_the_keys_of_the_interface_and_the_numbers_given(tmp_path: Path) -> None:
    clock = Clock()
    with RunLog(tmp_path, 8, clock=clock) as log:
        take_steps(log, 1, 8, clock)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [list(line) for line in lines] == [KEYS] * 8
    assert [line["loss"] for line in lines] == LOSSES
    assert [line["targets"] for line in lines] == TARGETS
    assert lines[3] | {"peak_memory_gib": 0} == {
        "step": 4,
        "epoch": 1.0,
        "loss": 2.3,
        "lr": 0.04,
        "grad_norm": 1.5,
        "targets": 30,
        "tokens": 100,
        "tokens_per_s": 200.0,
        "peak_memory_gib": 0,
        "step_s": 0.5,
    }


@pytest.mark.parametrize("every", [2, 3, 5, 100])
def test_a_window_logs_the_mean_over_all_its_targets(tmp_path: Path, every: int) -> None:
    clock = Clock()
    with RunLog(tmp_path, 8, log_every_steps=every, clock=clock) as log:
        take_steps(log, 1, 8, clock)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    ends = [*range(every, 8, every), 8]
    assert [line["step"] for line in lines] == ends
    for line, start, end in zip(lines, [0, *ends], ends, strict=False):
        targets = sum(TARGETS[start:end])
        mean = sum(loss * count for loss, count in zip(LOSSES[start:end], TARGETS[start:end], strict=True)) / targets
        assert line["loss"] == pytest.approx(mean, rel=1e-15)
        assert (line["targets"], line["tokens"]) == (targets, 100 * (end - start))
        assert (line["tokens_per_s"], line["step_s"], line["lr"]) == (200.0, 0.5, end / 100)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("cut", range(1, 8))
def test_resumed_lines_equal_those_of_the_straight_run(tmp_path: Path, every: int, cut: int) -> None:
    with RunLog(tmp_path / ".", 8, log_every_steps=every) as log:
        take_steps(log, 1, 8)
    straight = read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    log = RunLog(tmp_path, 8, log_every_steps=every)
    take_steps(log, 1, cut)
    log.validation(cut, loss=2.0, epoch=cut / 4)
    # As progress.json holds it; the run then goes on for a while, is lost, and resumed.
    state = json.loads(json.dumps(log.checkpoint_state()))
    take_steps(log, cut + 1, min(8, cut + 2))
    with RunLog(tmp_path, 8, log_every_steps=every, first_step=cut, state=state) as log:
        take_steps(log, cut + 1, 8)
    resumed = read_metrics(tmp_path / "metrics.jsonl")
    trained = [line for line in resumed if "loss" in line]
    assert without_time(trained) == without_time(straight)
    assert [line["step"] for line in resumed if "validation_loss" in line] == [cut]
    steps = [line["step"] for line in trained]
    assert steps == sorted(set(steps))


def test_a_window_begun_before_a_resume_does_not_distort_the_speed(tmp_path: Path) -> None:
    clock = Clock()
    log = RunLog(tmp_path, 8, log_every_steps=4, clock=clock)
    take_steps(log, 1, 3, clock)
    state = log.checkpoint_state()
    with RunLog(tmp_path, 8, log_every_steps=4, first_step=3, state=state, clock=clock) as log:
        take_steps(log, 4, 8, clock)
    assert [line["tokens_per_s"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [200.0, 200.0]
    assert [line["step_s"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.5]


def test_what_is_done_aside_is_not_time_of_a_step(tmp_path: Path) -> None:
    clock = Clock()
    with RunLog(tmp_path, 3, clock=clock) as log:
        take_steps(log, 1, 1, clock)
        with log.aside("validating"):
            clock.now += 60
        take_steps(log, 2, 2, clock)
        with pytest.raises(ZeroDivisionError), log.aside("saving"):
            clock.now += 60
            _ = 1 / 0
        take_steps(log, 3, 3, clock)
    assert [line["step_s"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.5, 0.5]


def test_a_skipped_step_is_counted_and_its_nan_does_not_hide_the_others(tmp_path: Path) -> None:
    with RunLog(tmp_path, 4, log_every_steps=2) as log:
        for step, loss in enumerate((2.0, float("nan"), float("nan"), float("nan")), start=1):
            log.step(step, loss=loss, targets=4, tokens=8, lr=0.1, epoch=0.1, skipped=step > 1, grad_norm=float("inf"))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["loss"], first["skipped"], first["targets"]) == (2.0, 1, 8)
    assert (second["loss"], second["skipped"]) == (None, 2)
    assert second["non_finite"] == ["loss", "grad_norm"]


def test_a_nan_that_was_not_skipped_is_never_hidden() -> None:
    window = Window()
    for loss in (1.0, float("nan")):
        window.add(loss=loss, targets=1, tokens=1, skipped=False, seconds=1)
    assert window.loss != window.loss


def test_weighted_targets_keep_their_fraction(tmp_path: Path) -> None:
    with RunLog(tmp_path, 1) as log:
        log.step(1, loss=1.0, targets=2.5, tokens=8, lr=0.1, epoch=1, extra={"pairs": 3})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["targets"], line["grad_norm"], line["pairs"]) == (2.5, None, 3)


def test_peak_memory_is_the_high_water_mark_of_the_process() -> None:
    before = metrics.peak_memory_gib()
    assert before >= psutil.Process().memory_info().rss / 2**30 * 0.99
    block = bytearray(b"\1" * 300_000_000)
    peak = metrics.peak_memory_gib()
    del block
    assert peak >= psutil.Process().memory_info().rss / 2**30
    assert metrics.peak_memory_gib() >= peak


def test_without_a_terminal_there_are_plain_lines_on_stderr_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with RunLog(tmp_path, 8, clock=clock) as log:
        take_steps(log, 1, 8, clock, seconds=1.5)
        log.validation(8, loss=1.25, epoch=2)
        log.finish({"model": "runs/a/model"})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err and "\x1b" not in shown.err
    lines = shown.err.splitlines()
    assert lines[0].startswith("step 1/8 loss 3.1000 lr 1.0e-02 67 tok/s ")
    assert lines[3].startswith("step 4/8 loss 2.3000") and lines[3].endswith(" 0:06 left")
    assert lines[8] == "step 8/8 validation loss 1.2500"
    assert lines[9] == "finished after step 8 of 8"
    assert any(line.split() == ["model", "runs/a/model"] for line in lines)
    assert all(len(line) <= 80 for line in lines if "plot" not in line)


@pytest.mark.parametrize(("seconds", "steps", "most", "least"), [(0.01, 1000, 13, 10), (1, 20_000, 1000, 900)])
def test_plain_lines_are_no_more_than_a_person_can_use(
    tmp_path: Path, seconds: float, steps: int, most: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    log = RunLog(tmp_path, steps, clock=clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        log.step(step, loss=1.0, targets=1, tokens=1, lr=0.1, epoch=1)
    lines = capsys.readouterr().err.splitlines()
    assert least <= len(lines) <= most
    assert lines[0].startswith(f"step 1/{steps} ") and lines[-1].startswith(f"step {steps}/{steps} ")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == steps
    log.finish()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_that_never_wraps_and_plain_lines_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (60, 24))
    clock = Clock()
    with run_folder.open_run(tmp_path / "run", "seed: 0\n") as run, RunLog(run.path, 8, clock=clock) as log:
        take_steps(log, 1, 4, clock, seconds=4000)
        log.validation(4, loss=2.5, epoch=1)
        log.warn("a message")
        take_steps(log, 5, 8, clock, seconds=4000)
    screen = terminal.getvalue()
    drawn = [piece for line in screen.split("\n") for piece in line.split("\r")]
    bars = [piece for piece in drawn if piece.startswith("step ") and "|" in piece]
    assert len(bars) >= 3 and max(map(len, bars)) == 60
    assert any("8/8" in bar and "loss 1.1000" in bar for bar in bars)
    assert "warning: a message" in drawn and "step 4/8 validation loss 2.5000" in drawn
    log_lines = [line[20:] for line in (run.path / "log.txt").read_text().splitlines()]
    assert [line.split(" lr ")[0] for line in log_lines if " lr " in line] == [
        f"step {step}/8 loss {loss:.4f}" for step, loss in enumerate(LOSSES, start=1)
    ]
    assert "warning: a message" in log_lines
    assert not any("|" in line for line in log_lines)


def test_the_time_left_counts_validation_and_forgets_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with RunLog(tmp_path, 6, clock=clock) as log:
        take_steps(log, 1, 1, clock, seconds=100)
        take_steps(log, 2, 2, clock, seconds=10)
        with log.aside("validating"):
            clock.now += 60
        take_steps(log, 3, 3, clock, seconds=10)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.split(" GiB")[1] for line in lines] == ["", " 0:40 left", " 1:30 left"]


@pytest.mark.parametrize(
    ("error", "how"), [(KeyboardInterrupt, "stopped"), (SystemExit, "stopped"), (ValueError, "failed")]
)
def test_a_run_that_ends_early_is_summed_up_and_drawn_unless_it_was_stopped(
    tmp_path: Path, error: type[BaseException], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(error), RunLog(tmp_path, 8) as log:
        take_steps(log, 1, 3)
        raise error
    assert f"{how} after step 3 of 8" in capsys.readouterr().err
    assert (tmp_path / "plot.png").exists() == (how == "failed")


def test_another_rank_says_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, 8, loggers=[cast(Any, None)], main=False) as log:
        log.start("title", {"a": 1})
        take_steps(log, 1, 8)
        with log.aside("validating"):
            log.validation(8, loss=1.0, epoch=2)
        log.warn("message")
        state = log.checkpoint_state()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert state["validation_losses"] == [1.0]


def test_a_plot_that_cannot_be_drawn_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("optune.metrics.run_log.draw_plot", fail)
    with RunLog(tmp_path, 1) as log:
        take_steps(log, 1, 1)
    assert "warning: plot.png was not drawn: no fonts" in capsys.readouterr().err
