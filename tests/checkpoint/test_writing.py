"""A checkpoint appears whole or not at all, and never with weights that are not finite."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optune import checkpoint, files
from optune.errors import CheckpointError
from tests.checkpoint import runs


def entries(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_is_the_model_files_and_four_of_its_own(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1)
    folder = tmp_path / "checkpoints/step-000001"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "config.json",
        "model.safetensors",
        "optune/manifest.json",
        "optune/optimizer.json",
        "optune/optimizer.safetensors",
        "optune/progress.json",
    ]
    assert entries(tmp_path) == ["step-000001"]
    assert len({path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}) == 1


def test_until_the_manifest_is_written_nothing_stands_under_the_name(tmp_path: Path) -> None:
    model = runs.Net()
    seen: list[list[str]] = []

    def write_model(folder: Path) -> None:
        seen.append(entries(tmp_path))
        runs.write_tensors(folder, dict(model.named_parameters()))

    checkpoint.save(
        tmp_path,
        step=1,
        write_model=write_model,
        optimizer=runs.adamw(model),
        named_parameters=model.named_parameters(),
        progress={},
    )
    assert seen == [[".tmp-step-000001"]]


@pytest.mark.parametrize("limit", [0, 100, 10_000, 17_000, 20_000, 33_000])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path: Path, limit: int) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)
    with file_size_limit(limit), pytest.raises(CheckpointError) as caught:
        runs.save(tmp_path, 2, model, optimizer)
    assert "could not be written" in str(caught.value) and "too large" in str(caught.value)
    assert "are free there" in str(caught.value.hint) and "step-000001" in str(caught.value.hint)
    assert entries(tmp_path) == ["step-000001"]
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints/step-000001"
    runs.save(tmp_path, 2, model, optimizer)
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints/step-000002"


@pytest.mark.parametrize("call", ["sync_file", "write_whole", "hash_file", "replace_folder"])
def test_an_error_of_the_disk_at_any_call_leaves_nothing_half_written(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, call, fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            runs.save(tmp_path, 2, model, optimizer)
    assert entries(tmp_path) == ["step-000001"]


def test_a_folder_without_permission_is_one_clear_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        run_dir.chmod(0o755)
        model, optimizer = runs.make_run(run_dir, 1)
        (run_dir / "checkpoints").chmod(0o555)
        user = os.geteuid()
        if user == 0:  # Permissions do not bind root.
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match="could not be written: Permission denied"):
                runs.save(run_dir, 2, model, optimizer)
        finally:
            if user == 0:
                os.seteuid(0)
            (run_dir / "checkpoints").chmod(0o755)
        assert entries(run_dir) == ["step-000001"]


def test_whatever_the_writer_raises_leaves_nothing_half_written(tmp_path: Path) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)

    def interrupt(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(
            tmp_path,
            step=2,
            write_model=interrupt,
            optimizer=optimizer,
            named_parameters=model.named_parameters(),
            progress={},
        )
    assert entries(tmp_path) == ["step-000001"]


def test_a_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    model = runs.Net()
    with pytest.raises(CheckpointError, match="no model file was written"):
        checkpoint.save(
            tmp_path,
            step=1,
            write_model=lambda _: None,
            optimizer=runs.adamw(model),
            named_parameters=model.named_parameters(),
            progress={},
        )


def test_leftovers_of_a_save_cut_short_are_cleared_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints/.tmp-step-000007/optune"
    leftover.mkdir(parents=True)
    (leftover / "optimizer.safetensors").write_bytes(b"half")
    runs.make_run(tmp_path, 1)
    assert entries(tmp_path) == ["step-000001"]


def test_a_step_saved_again_replaces_the_broken_one_of_its_name(tmp_path: Path) -> None:
    model, optimizer = runs.make_run(tmp_path, 1)
    weights = tmp_path / "checkpoints/step-000001/model.safetensors"
    weights.write_bytes(b"")
    runs.save(tmp_path, 1, model, optimizer)
    checkpoint.verify(weights.parent)
    assert torch.equal(load_file(weights)["scale"], model.scale.detach())


def test_weights_that_are_not_finite_at_the_first_save_are_refused_with_a_way_out(tmp_path: Path) -> None:
    model = runs.Net()
    with torch.no_grad():
        model.scale[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"scale \(1 values\)") as caught:
        runs.save(tmp_path, 1, model, runs.adamw(model))
    assert caught.value.hint == "lower optimizer.lr or set max_grad_norm"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    model = runs.Net(dtype=dtype)
    optimizer = runs.adamw(model)
    runs.save(tmp_path, 1, model, optimizer)
    with torch.no_grad():
        model.first["proj"].weight[3, 5] = bad
    with pytest.raises(CheckpointError, match=r"step 2: weights are not finite.*first\.proj\.weight \(1 values\)"):
        runs.save(tmp_path, 2, model, optimizer)
    assert entries(tmp_path) == ["step-000001"]


def test_a_row_that_was_poisoned_to_begin_with_may_be_saved_but_not_spread(tmp_path: Path) -> None:
    model = runs.Net()
    weight = model.first["proj"].weight
    with torch.no_grad():
        weight[7] = float("nan")
    known = checkpoint.count_nonfinite(model.named_parameters())
    assert known == {"first.proj.weight": 64}

    def save(step: int) -> Path:
        return checkpoint.save(
            tmp_path,
            step=step,
            write_model=lambda folder: runs.write_tensors(folder, dict(model.named_parameters())),
            optimizer=runs.adamw(model),
            named_parameters=model.named_parameters(),
            progress={},
            known_nonfinite=known,
        )

    save(1)
    with torch.no_grad():
        weight[8, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"65 values"):
        save(2)


def test_the_sums_are_those_of_the_system_tool(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1)
    folder = tmp_path / "checkpoints/step-000001"
    told = subprocess.run(["sha256sum", "model.safetensors"], cwd=folder, capture_output=True, text=True, check=True)
    assert told.stdout.split()[0] in (folder / "optune/manifest.json").read_text()


def test_loading_needs_nothing_but_safetensors_and_json(tmp_path: Path) -> None:
    """A tool that knows nothing of optune reads everything in the folder."""
    model, optimizer = runs.make_run(tmp_path, 2)
    code = (
        "import sys, json, pathlib; from safetensors.numpy import load_file; folder = pathlib.Path(sys.argv[1]); "
        "[json.loads(path.read_text()) for path in folder.rglob('*.json')]; "
        "print(load_file(folder / 'optune/optimizer.safetensors')['state.scale.exp_avg'].astype('f8').sum())"
    )
    folder = tmp_path / "checkpoints/step-000002"
    told = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert float(told.stdout) == pytest.approx(optimizer.state[model.scale]["exp_avg"].double().sum().item(), rel=1e-12)
