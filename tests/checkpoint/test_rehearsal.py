"""What would fail at the first save fails before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optune import checkpoint
from optune.checkpoint.rehearsal import estimate_state_bytes
from optune.errors import CheckpointError
from tests.checkpoint import runs
from tests.checkpoint.test_writing import file_size_limit

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW fused, rate tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
}


def rehearse(run_dir: Path, model: runs.Net, optimizer: torch.optim.Optimizer, **settings: Any) -> checkpoint.Rehearsal:
    return checkpoint.rehearse(
        run_dir,
        write_model=lambda folder: runs.write_tensors(folder, dict(model.named_parameters())),
        optimizer=optimizer,
        named_parameters=model.named_parameters(),
        **settings,
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_predicted_size_is_that_of_the_real_checkpoint(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = runs.Net(dtype=dtype)
    optimizer = MAKERS[name](model.parameters())
    predicted = rehearse(tmp_path, model, optimizer).checkpoint_bytes
    assert not optimizer.state
    runs.train(model, optimizer, range(1, 2))
    folder = runs.save(tmp_path, 1, model, optimizer)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert predicted == pytest.approx(size, rel=0.1)
    assert estimate_state_bytes(optimizer) == 0 or name == "SGD"


def test_a_rehearsal_leaves_nothing_behind(tmp_path: Path) -> None:
    model = runs.Net()
    told = str(rehearse(tmp_path, model, runs.adamw(model), saves=10, keep_last=2))
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert "KiB each, up to" in told and "free" in told


def test_an_optimizer_that_cannot_be_copied_is_taken_for_adam() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, secret: int) -> None:
            super().__init__(parameters, lr=0.1)

    assert estimate_state_bytes(Odd([torch.nn.Parameter(torch.zeros(100))], 1)) == 800


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"saves": 1}, 1),
        ({"saves": 10, "keep_last": 2}, 3),
        ({"saves": 10, "keep_last": 2, "keep_best": True}, 4),
        ({"saves": 2, "keep_last": 5}, 2),
        ({"saves": 10, "keep_last": None}, 10),
    ],
)
def test_a_disk_that_is_too_small_is_refused_with_the_numbers(
    tmp_path: Path, settings: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs.Net()
    size = rehearse(tmp_path, model, runs.adamw(model)).checkpoint_bytes
    usage = shutil.disk_usage(tmp_path)
    # progress.json holds the time, so the size may differ by a byte.
    for free, fits in ((count * (size + 8), True), (count * (size - 8) - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if fits:
            assert rehearse(tmp_path, model, runs.adamw(model), **settings).peak_bytes == pytest.approx(
                count * size, abs=8 * count
            )
        else:
            with pytest.raises(CheckpointError, match=r"the checkpoints need .* more \(.* each\), .* are free"):
                rehearse(tmp_path, model, runs.adamw(model), **settings)


def test_checkpoints_that_are_there_already_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = runs.make_run(tmp_path, 2)
    size = rehearse(tmp_path, model, optimizer).checkpoint_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size + 8))
    rehearse(tmp_path, model, optimizer, saves=10, keep_last=2)


@pytest.mark.parametrize("limit", [0, 17_000])
def test_a_write_that_fails_is_told_before_the_first_step(tmp_path: Path, limit: int) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)
    with file_size_limit(limit), pytest.raises(CheckpointError, match="a checkpoint cannot be written there"):
        rehearse(tmp_path, model, optimizer)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_writer_that_fails_is_told_before_the_first_step(tmp_path: Path) -> None:
    model = runs.Net()

    def fail(folder: Path) -> None:
        raise ValueError("no such tensor")

    with pytest.raises(CheckpointError, match="cannot be written there: no such tensor"):
        checkpoint.rehearse(
            tmp_path, write_model=fail, optimizer=runs.adamw(model), named_parameters=model.named_parameters()
        )


def test_low_bit_state_is_predicted_as_small_as_it_is_and_nothing_is_compiled() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    optimizer = low_bit.AdamW8bit([weight], lr=0.01)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    predicted = estimate_state_bytes(optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    weight.grad = torch.ones_like(weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    parts = [getattr(value, part) for value in optimizer.state[weight].values() for part in ("codes", "scale", "qmap")
             if hasattr(value, part)]  # fmt: skip
    assert predicted == pytest.approx(sum(part.nbytes for part in parts), rel=0.1)
