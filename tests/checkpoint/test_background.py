"""Training goes on while a checkpoint is written, and the checkpoint does not notice."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optune import checkpoint
from optune.checkpoint.background import copy_to_host
from optune.errors import CheckpointError, ConfigError
from tests.checkpoint import runs


def make_saver(run_dir: Path, model: runs.Net, optimizer: torch.optim.Optimizer, **settings: Any) -> checkpoint.Saver:
    return checkpoint.Saver(
        run_dir,
        **{
            "write_model": runs.write_tensors,
            "model_tensors": dict(model.named_parameters()),
            "optimizer": optimizer,
            "named_parameters": model.named_parameters(),
        }
        | settings,
    )


class Gate:
    """A writer that waits until it is let through."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        assert self.opened.wait(10)
        runs.write_tensors(folder, tensors)


def test_what_is_saved_is_the_run_at_the_moment_of_the_save(tmp_path: Path) -> None:
    model = runs.Net()
    optimizer = runs.adamw(model)
    gate = Gate()
    with make_saver(tmp_path, model, optimizer, write_model=gate) as saver:
        runs.train(model, optimizer, range(1, 3))
        report = saver.save(2, {"epoch": 1.0})
        runs.train(model, optimizer, range(3, 6))
        assert checkpoint.list_checkpoints(tmp_path) == []
        gate.opened.set()
        assert saver.wait() == tmp_path / "checkpoints/step-000002"
    straight = runs.Net()
    straight_optimizer = runs.adamw(straight)
    runs.train(straight, straight_optimizer, range(1, 3))
    runs.assert_same_bits((straight, straight_optimizer), runs.load(tmp_path / "checkpoints/step-000002"))
    assert report.copied_bytes > 3 * 4 * 64 * 64
    assert 0 < report.stall_s < report.write_s


def test_an_error_in_the_background_is_raised_by_the_next_check(tmp_path: Path) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)

    def fail(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(28, "No space left on device")

    saver = make_saver(tmp_path, model, optimizer, write_model=fail, first_step=1)
    saver.save(2, {})
    assert saver._thread is not None
    saver._thread.join()
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.check()
    saver.check()
    for collect in (lambda: saver.save(4, {}), saver.wait):
        saver.save(3, {})
        with pytest.raises(CheckpointError, match="step-000003"):
            collect()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000001"]


def test_leaving_waits_and_raises(tmp_path: Path) -> None:
    model = runs.Net()

    def fail(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(5, "Input/output error")

    with (
        pytest.raises(CheckpointError, match="Input/output"),
        make_saver(tmp_path, model, runs.adamw(model), write_model=fail) as saver,
    ):
        saver.save(1, {})


def test_leaving_by_an_error_still_finishes_the_checkpoint_and_keeps_the_error(tmp_path: Path) -> None:
    model = runs.Net()
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), make_saver(tmp_path, model, runs.adamw(model)) as saver:
        saver.save(1, {})
        _ = 1 / 0
    checkpoint.verify(tmp_path / "checkpoints/step-000001")

    def fail(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(5, "Input/output error")

    saver = make_saver(tmp_path, model, runs.adamw(model), write_model=fail, first_step=1, say=said.append)
    with pytest.raises(ZeroDivisionError), saver:
        saver.save(2, {})
        _ = 1 / 0
    assert "Input/output error" in said[0]


@pytest.mark.parametrize("background", [True, False])
def test_twelve_saves_keep_the_newest_two_and_the_best(tmp_path: Path, background: bool) -> None:
    model = runs.Net()
    optimizer = runs.adamw(model)
    losses = {3: 0.5, 7: 0.7}
    with make_saver(tmp_path, model, optimizer, background=background) as saver:
        for step in range(1, 13):
            runs.train(model, optimizer, range(step, step + 1))
            saver.save(step, {"validation_loss": losses.get(step)})
    kept = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert kept == ["step-000003", "step-000011", "step-000012"]
    assert [report.step for report in saver.reports] == list(range(1, 13))
    assert all(report.path for report in saver.reports)


def test_the_older_checkpoint_stays_until_the_newer_one_is_whole(tmp_path: Path) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)
    gate = Gate()
    with make_saver(tmp_path, model, optimizer, write_model=gate, keep_last=1, first_step=1) as saver:
        saver.save(2, {})
        assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000001"]
        gate.opened.set()
        saver.wait()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000002"]


def test_weights_that_became_nan_are_refused_and_the_good_checkpoint_stays(tmp_path: Path) -> None:
    model = runs.Net()
    optimizer = runs.adamw(model)
    with torch.no_grad():
        model.scale[0] = float("inf")
    saver = make_saver(tmp_path, model, optimizer, keep_last=1)
    saver.save(1, {})
    with torch.no_grad():
        model.first["proj"].bias[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"first\.proj\.bias \(1 values\)") as caught:
        saver.save(2, {})
    assert "step-000001" in str(caught.value.hint)
    checkpoint.verify(tmp_path / "checkpoints/step-000001")
    saver.wait()


def test_without_room_for_the_copy_training_waits_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs.Net()
    said: list[str] = []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    saver = make_saver(tmp_path, model, runs.adamw(model), say=said.append)
    report = saver.save(1, {})
    assert report.path is not None and report.copied_bytes == 0
    assert report.stall_s >= report.write_s
    assert "1000 B are free: training waits" in said[0]


def test_a_bad_keep_last_is_refused_before_the_first_save(tmp_path: Path) -> None:
    model = runs.Net()
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_last: 0"):
        make_saver(tmp_path, model, runs.adamw(model), keep_last=0)


def test_going_on_from_an_older_step_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    model, optimizer = runs.make_run(tmp_path, 3)
    said: list[str] = []
    with make_saver(tmp_path, model, optimizer, first_step=1, say=said.append) as saver:
        saver.save(2, {})
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints/step-000002"
    assert len(said) == 2 and (tmp_path / "checkpoints/set-aside/step-000003").is_dir()


def test_tied_tensors_share_one_copy(tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    copies = copy_to_host({"a": tied, "b": tied, "c": tied.T, "d": torch.empty(0), "e": torch.empty(0)})
    assert copies["a"] is copies["b"]
    assert copies["a"].data_ptr() != tied.data_ptr()
    assert torch.equal(copies["c"], tied.T) and copies["c"] is not copies["a"]


def test_a_second_copy_takes_no_new_memory_and_no_old_value(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(4)}
    first = copy_to_host(tensors)
    changed = {"a": tensors["a"] + 1, "b": tensors["b"].double(), "c": torch.randn(5)}
    second = copy_to_host(changed, first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    for name, tensor in changed.items():
        assert torch.equal(second[name], tensor)
        assert second[name].dtype == tensor.dtype


def test_tensors_that_are_no_longer_tied_no_longer_share_a_copy(tmp_path: Path) -> None:
    tied, other = torch.randn(3), torch.randn(3)
    copies = copy_to_host({"a": tied, "b": other}, copy_to_host({"a": tied, "b": tied}))
    assert torch.equal(copies["a"], tied) and torch.equal(copies["b"], other)


def test_the_last_save_copies_nothing_and_is_whole_on_return(tmp_path: Path) -> None:
    model = runs.Net()
    saver = make_saver(tmp_path, model, runs.adamw(model))
    report = saver.save(1, {}, is_last=True)
    assert report.copied_bytes == 0
    checkpoint.verify(tmp_path / "checkpoints/step-000001")


def test_progress_may_change_after_the_save(tmp_path: Path) -> None:
    model = runs.Net()
    progress = {"epoch": 1.0}
    gate = Gate()
    with make_saver(tmp_path, model, runs.adamw(model), write_model=gate) as saver:
        saver.save(1, progress)
        progress["epoch"] = 2.0
        gate.opened.set()
    assert checkpoint.read_progress(tmp_path / "checkpoints/step-000001")["epoch"] == 1.0
    assert load_file(tmp_path / "checkpoints/step-000001/model.safetensors")


def test_memory_reserved_ahead_is_what_the_first_save_copies_into(tmp_path: Path) -> None:
    model = runs.Net()
    optimizer = runs.adamw(model)
    runs.train(model, optimizer, range(1, 2))
    with make_saver(tmp_path, model, optimizer) as saver:
        saver.reserve()
        runs.train(model, optimizer, range(2, 3))
        saver.wait()
        reserved = {name: tensor.data_ptr() for name, tensor in saver._buffers.items()}
        saver.save(2, {})
        saver.wait()
        assert {name: tensor.data_ptr() for name, tensor in saver._buffers.items()} == reserved
    runs.assert_same_bits((model, optimizer), runs.load(tmp_path / "checkpoints/step-000002"))
