"""Which checkpoint a run goes on from, and which ones stay."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from optune import checkpoint
from optune.checkpoint.manifest import MANIFEST
from optune.errors import CheckpointError, ConfigError
from tests.checkpoint import runs


def names(run_dir: Path) -> list[str]:
    return [folder.name for folder in checkpoint.list_checkpoints(run_dir)]


def fake(run_dir: Path, step: int, **progress: float | None) -> Path:
    """A checkpoint without an optimizer: made in a millisecond."""
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "optune").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "optune/progress.json").write_text(json.dumps({"step": step, **progress}))
    checkpoint.manifest.write_manifest(folder)
    return folder


def test_the_newest_is_found_by_number_not_by_text(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 2):
        fake(tmp_path, step)
    assert names(tmp_path) == ["step-000002", "step-999999", "step-1000000"]
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints/step-1000000"


def test_other_names_are_never_taken_for_checkpoints(tmp_path: Path) -> None:
    fake(tmp_path, 1)
    for name in ("step-2", "step-000003-copy", "step-000004.bak", ".tmp-step-000005", "step-", "step-00000²"):
        shutil.copytree(tmp_path / "checkpoints/step-000001", tmp_path / "checkpoints" / name)
    assert names(tmp_path) == ["step-000001"]


def test_a_run_without_checkpoints_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path) is None
    assert checkpoint.resolve("auto", tmp_path) is None
    assert checkpoint.resolve(None, tmp_path) is None


def test_a_save_that_never_finished_is_not_a_silent_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/.tmp-step-000001").mkdir(parents=True)
    said: list[str] = []
    assert checkpoint.find(tmp_path, say=said.append) is None
    assert "a save was cut short" in said[0]


@pytest.mark.parametrize("damage", ["half weights", "no optimizer", "empty files", "no manifest"])
def test_a_broken_newest_is_skipped_aloud_by_name(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.make_run(tmp_path, 4)
    good, broken = tmp_path / "checkpoints/step-000004", tmp_path / "checkpoints/step-000006"
    shutil.copytree(good, broken)
    if damage == "half weights":
        content = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif damage == "no optimizer":
        (broken / "optune/optimizer.safetensors").unlink()
    elif damage == "empty files":
        for path in broken.rglob("*.safetensors"):
            path.write_bytes(b"")
    else:
        (broken / MANIFEST).unlink()
    assert checkpoint.find(tmp_path) == good
    said = capsys.readouterr().err
    named = {
        "half weights": "model.safetensors has",
        "no optimizer": "optune/optimizer.safetensors is missing",
        "empty files": "model.safetensors has 0 bytes instead of",
        "no manifest": "the save was never finished",
    }
    assert "warning: skipped" in said and "step-000006" in said and named[damage] in said
    assert f"going back to {good}" in said


def test_a_copy_under_another_step_is_not_that_step(tmp_path: Path) -> None:
    shutil.copytree(fake(tmp_path, 4), tmp_path / "checkpoints/step-000006")
    assert checkpoint.check(tmp_path / "checkpoints/step-000006") == ["optune/progress.json is of step 4"]


def test_when_nothing_is_whole_the_run_is_not_started_afresh(tmp_path: Path) -> None:
    for step in (1, 2):
        (fake(tmp_path, step) / "model.safetensors").write_bytes(b"wejghts")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resolve("auto", tmp_path)
    assert "step-000001: model.safetensors is damaged" in str(caught.value)
    assert "step-000002: model.safetensors is damaged" in str(caught.value)


def test_resume_takes_a_checkpoint_or_a_run_folder(tmp_path: Path) -> None:
    folder = fake(tmp_path, 1)
    assert checkpoint.resolve(str(folder), tmp_path / "other") == folder
    assert checkpoint.resolve(str(tmp_path), tmp_path / "other") == folder
    with pytest.raises(ConfigError, match=r"resume: .*nowhere is not a folder"):
        checkpoint.resolve(str(tmp_path / "nowhere"), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001: model\.safetensors is missing"):
        checkpoint.resolve(str(folder), tmp_path)


def test_every_sampled_flip_cut_and_loss_is_named_by_its_file(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1)
    folder = tmp_path / "checkpoints/step-000001"
    assert checkpoint.check(folder) == []
    generator = random.Random(0)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) == 6
    for path in files:
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        last = len(content) - 1
        offsets = {0, 7, 8, last, *(generator.randint(0, last) for _ in range(40))}
        broken = [
            content[:at] + bytes([content[at] ^ (1 << generator.randrange(8))]) + content[at + 1 :] for at in offsets
        ]
        broken += [content[:at] for at in (0, last, *(generator.randint(1, last) for _ in range(5)))]
        broken += [content + b"\0"]
        for wrong in broken:
            path.write_bytes(wrong)
            faults = checkpoint.check(folder)
            assert len(faults) == 1 and faults[0].startswith(f"{name} "), (name, faults)
        path.unlink()
        assert checkpoint.check(folder)[0].startswith(f"{name} is missing")
        path.write_bytes(content)
    checkpoint.verify(folder)


def test_all_broken_files_are_named_at_once(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1)
    folder = tmp_path / "checkpoints/step-000001"
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config\.json is missing; model\.safetensors has 0 bytes"):
        checkpoint.verify(folder)


def test_a_newer_format_is_said_to_be_newer(tmp_path: Path) -> None:
    folder = fake(tmp_path, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    assert checkpoint.check(folder) == ["optune/manifest.json has format 2; this optune reads format 1"]


def test_pruning_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11, 12, 100):
        fake(tmp_path, step)
    removed = checkpoint.prune(tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-000012", "step-000100"]
    assert [folder.name for folder in removed] == ["step-000008", "step-000009", "step-000010", "step-000011"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names(tmp_path)


def test_pruning_keeps_the_best_by_validation_loss(tmp_path: Path) -> None:
    for step, loss in enumerate((3.0, float("nan"), 1.0, 1.5, None, 2.0), start=1):
        fake(tmp_path, step, validation_loss=loss)
    checkpoint.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000003", "step-000006"]
    checkpoint.prune(tmp_path, keep_last=1, keep_best=False)
    assert names(tmp_path) == ["step-000006"]


def test_a_broken_checkpoint_never_counts_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        fake(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"checkpoints/step-{step:06d}/model.safetensors").unlink()
    checkpoint.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    fake(tmp_path, 4)
    checkpoint.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000004"]


def test_pruning_touches_nothing_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        fake(tmp_path, step)
    (tmp_path / "checkpoints/step-000001-backup").mkdir()
    (tmp_path / "checkpoints/notes.txt").touch()
    checkpoint.prune(tmp_path, keep_last=1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-000002",
        "step-000001-backup",
        "notes.txt",
    }


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(tmp_path: Path, keep_last: int) -> None:
    fake(tmp_path, 1)
    with pytest.raises(ConfigError, match=rf"checkpoint\.keep_last: {keep_last} would leave nothing"):
        checkpoint.prune(tmp_path, keep_last=keep_last)
    assert names(tmp_path) == ["step-000001"]


def test_null_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        fake(tmp_path, step)
    assert checkpoint.prune(tmp_path, keep_last=None) == []
    assert len(names(tmp_path)) == 3


def test_a_future_that_was_given_up_is_set_aside_not_taken_and_not_lost(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        for step in (4, 6, 8):
            if not (tmp_path / f"checkpoints/step-{step:06d}").exists():
                fake(tmp_path, step)
        checkpoint.set_aside_newer(tmp_path, 4, say=said.append)
        assert checkpoint.find(tmp_path) == tmp_path / "checkpoints/step-000004"
    aside = sorted(path.name for path in (tmp_path / "checkpoints/set-aside").iterdir())
    assert aside == ["step-000006", "step-000006-2", "step-000008", "step-000008-2"]
    assert "step-000008 is newer than step-000004" in said[1]
