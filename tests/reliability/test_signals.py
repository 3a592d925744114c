"""SIGINT and SIGTERM save and leave, SIGUSR1 saves and stays, a time limit leaves in time; and the run goes on from
there as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optune.errors import ConfigError
from optune.time_limit import TimeLimit, parse_duration
from tests import forked
from tests.recipes.running import RECIPES, ROOT
from tests.reliability.interrupting import Place, all_metrics, assert_same_end, at_call

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number", CODES)
def test_a_stopping_signal_finishes_the_step_saves_and_says_how_to_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, recipe: str
) -> None:
    straight = place.straight(recipe=recipe)
    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 7, lambda: send(number))
        name = f"{number.name}-{recipe}"
        stopped = place.run(name, recipe=recipe)
    assert stopped.code == CODES[number]
    assert names(place.folder / name) == ["step-000007"]
    assert not (place.folder / name / "model").exists()
    assert f"{number.name}: saving after step 7" in stopped.err
    assert f"optune resume {place.folder / name}" in " ".join(stopped.err.split())
    assert "stopped after step 7 of 12" in stopped.err
    assert place.resume(name).code == 0
    assert_same_end(place.finished(name), straight)


def test_before_the_run_folder_is_made_a_signal_writes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, "optune.data.load_rows", 1, lambda: send(signal.SIGTERM))
    stopped = place.run("early")
    assert stopped.code == 143
    assert stopped.errors == ["error: terminated"]
    assert not (place.folder / "early").exists()


def test_before_the_first_step_a_signal_leaves_at_once_and_resume_starts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = place.straight()
    with monkeypatch.context() as patch:
        at_call(patch, "optune.checkpoint.rehearsal.write_folder", 1, lambda: send(signal.SIGTERM))
        at_call(patch, "optune.train.train_step", 1, lambda: pytest.fail("a step was taken"))
        stopped = place.run("unborn")
    assert stopped.code == 143
    assert "left before step 1 of 12" in stopped.err
    assert names(place.folder / "unborn") == []
    resumed = place.resume("unborn")
    assert resumed.code == 0
    assert "holds no checkpoint yet: starting from the beginning" in resumed.err
    assert_same_end(place.finished("unborn"), straight)


@pytest.mark.parametrize(("nth", "step"), [(2, 4), (4, 12)], ids=["in the middle", "at the end"])
def test_a_validation_is_left_and_taken_when_the_run_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, nth: int, step: int
) -> None:
    straight = place.straight()
    name = f"validation-{step}"
    with monkeypatch.context() as patch:
        # The first call is the rehearsal.
        at_call(patch, "optune.train.evaluate", nth, lambda: send(signal.SIGTERM))
        stopped = place.run(name)
    assert stopped.code == 143
    assert f"the validation after step {step} is left" in stopped.err
    assert names(place.folder / name)[-1] == f"step-{step:06d}"
    last = all_metrics(place.finished(name))[-1]
    assert last["step"] == step and "validation_loss" not in last
    assert place.resume(name).code == 0
    assert_same_end(place.finished(name), straight)


def test_a_signal_while_a_checkpoint_is_written_waits_for_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = place.straight()
    with monkeypatch.context() as patch:
        # Sent from the thread that writes; Python's handlers run in the main one.
        at_call(patch, "optune.checkpoint.background.write_checkpoint", 1, lambda: send(signal.SIGINT))
        stopped = place.run("saving", "checkpoint={save_every_steps: 5, keep_last: null}")
    assert stopped.code == 130
    assert names(place.folder / "saving")[0] == "step-000005"
    assert place.resume("saving").code == 0
    assert_same_end(place.finished("saving"), straight)


def test_a_signal_after_the_last_step_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, "optune.run_folder.RunFolder.publish_model", 1, lambda: send(signal.SIGTERM))
    assert place.run("late").code == 0
    assert (place.folder / "late" / "model").is_dir()


def test_sigusr1_saves_and_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = place.straight()
    with monkeypatch.context() as patch:
        at_call(patch, "optune.data.load_rows", 1, lambda: send(signal.SIGUSR1))
        at_call(patch, "optune.train.train_step", 3, lambda: send(signal.SIGUSR1))
        at_call(patch, "optune.train.train_step", 8, lambda: send(signal.SIGUSR1))
        done = place.run("usr1", "checkpoint.keep_last=null")
    assert done.code == 0
    assert names(place.folder / "usr1") == ["step-000003", "step-000008", "step-000012"]
    assert "SIGUSR1: saving after step 8" in done.err
    assert_same_end(place.finished("usr1"), straight)


def test_handlers_are_as_they_were_when_the_command_is_over(place: Place) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    place.run("handlers", "max_steps=1")
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5s", 1.5), ("30m", 1800), ("1h30m", 5400), ("2d", 172800), ("01:30:00", 5400),
     ("1:30", 90), ("1-12:00:00", 129600)],
)  # fmt: skip
def test_lengths_of_time_are_written_as_people_and_batch_queues_do(text: str, seconds: float) -> None:
    assert parse_duration(text, where="max_time") == seconds


@pytest.mark.parametrize("text", ["", "0", "abc", "-5", "1:2:3:4", "h"])
def test_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"max_time: .*is not a length of time"):
        parse_duration(text, where="max_time")


def test_a_time_limit_counts_from_when_it_is_made() -> None:
    now = [100.0]
    limit = TimeLimit("60s", clock=lambda: now[0])
    now[0] = 150.0
    assert limit.leaves(10.0) and not limit.leaves(10.5)
    assert TimeLimit(None).leaves(1e9)


def test_a_run_at_its_time_limit_ends_with_0_saved_and_goes_on_step_by_step(place: Place) -> None:
    straight = place.straight()
    ended = place.run("limited", "max_time=0.001s")
    assert ended.code == 0
    assert "max_time is nearly over: saving after step 1 of 12" in ended.err
    for step in (2, 3):
        # Too small a limit, and yet each call comes one step further.
        assert place.resume("limited").code == 0
        assert names(place.folder / "limited")[-1] == f"step-{step:06d}"
        assert not (place.folder / "limited" / "model").exists()
    assert place.resume("limited", "max_time=null").code == 0
    assert_same_end(place.finished("limited"), straight)


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tune_cli.main", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_is_stopped_and_resumed_from_outside(place: Place) -> None:
    """As a person does it: `kill PID`, `optune resume`, and the steps are those of the run that was left alone."""
    run_dir = place.folder / "process"
    # More steps than there is time for: the signal comes in the middle, wherever that is.
    settings = ["epochs=2000", "validation_every_steps=null", "schedule={name: constant, warmup_steps: 0}"]
    process = start("run", "full_finetune", "--config", str(place.config), f"output_dir={run_dir}", *settings)
    wait_for_steps(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    (saved,) = names(run_dir)
    step = int(saved.removeprefix("step-"))
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step
    resumed = start("resume", str(run_dir), f"max_steps={step + 5}")
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert_same_end(place.finished("process"), place.straight(*settings, f"max_steps={step + 5}"))


HANG = """
import ctypes, sys, optune.train
from tune_cli.main import main

def hang(*arguments, **keywords):
    print("hangs", flush=True)
    # In C, without Python's lock, and deaf to signals: a collective whose other side is gone.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

optune.train.train_step = hang
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_second_signal_stops_at_once_even_a_step_that_never_ends(place: Place, number: signal.Signals) -> None:
    run_dir = place.folder / f"second-{number.name}"
    words = ["run", "full_finetune", "--config", str(place.config), f"output_dir={run_dir}"]
    process = subprocess.Popen(
        [forked.python(), "-c", HANG, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "hangs\n"
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=5)
    assert process.returncode == CODES[number]
    assert f"{number.name}: the run is saved and left after this step; a second signal stops it at once" in err
    assert place.resume(run_dir.name).code == 0
    assert_same_end(place.finished(run_dir.name), place.straight())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("number", CODES)
def test_a_signal_in_the_middle_of_importing_torch_is_one_clear_line(place: Place, number: signal.Signals) -> None:
    """An exception there goes through C++ that does not know it."""
    run_dir = place.folder / f"import-{number.name}"
    process = start("run", "full_finetune", "--config", str(place.config), f"output_dir={run_dir}")
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == CODES[number], err
    assert err == f"error: {'terminated' if number == signal.SIGTERM else 'interrupted'}\n"
    assert not run_dir.exists()
