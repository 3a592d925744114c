"""Disks that are full, broken or read-only, damaged checkpoints, two processes, a clock that goes back: through
`optune run` and `optune resume`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optune import checkpoint, files
from tests.recipes.running import Finished
from tests.reliability.interrupting import EVERY_STEP, Place, Result, all_metrics, assert_same_end, at_call, cut


def names(run_dir: Path) -> list[str]:
    return [folder.name for folder in checkpoint.list_checkpoints(run_dir)]


def assert_whole(run_dir: Path, newest: str) -> None:
    """All checkpoints are whole, the newest one is that, and nothing half-written lies about."""
    assert names(run_dir)[-1] == newest
    assert [checkpoint.check(folder) for folder in checkpoint.list_checkpoints(run_dir)] == [[]] * len(names(run_dir))
    assert sorted(run_dir.rglob(f"{files.ASIDE}*")) == []


def wait_for_save() -> None:
    """Steps are faster than a save in the background: what goes wrong shall go wrong in the next one."""
    for thread in threading.enumerate():
        if thread.name == "optune-save":
            thread.join()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def run_in(place: Place, output: Path, *overrides: str) -> Result:
    return place.call("run", "full_finetune", "--config", str(place.config), f"output_dir={output}", *overrides)


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_before_the_first_step(
    place: Place, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 1, lambda: pytest.fail("a step was taken"))
        refused = run_in(place, small_disk / "run", EVERY_STEP)
    assert refused.code == 1
    assert re.search(r"the checkpoints need 3\.[34]\d MiB more \(289 KiB each\)", refused.errors[0]), refused.errors
    assert "keep_last" in refused.err
    assert run_in(place, small_disk / "run").code == 0


def test_a_disk_that_fills_up_ends_the_run_at_the_next_step_and_the_run_goes_on_when_there_is_room(
    place: Place, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, filler = small_disk / "run", small_disk / "filler"
    settings = "checkpoint={save_every_steps: 2, keep_last: 2}"

    def fill() -> None:
        wait_for_save()
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"x" * 4096)
        # Lines of metrics still fit; checkpoints do not.
        os.truncate(filler, filler.stat().st_size - 65536)

    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 6, fill)
        full = run_in(place, run_dir, settings)
    assert full.code == 1
    assert "step-000006: the checkpoint could not be written: No space left on device" in full.errors[0]
    assert "make room, or lower checkpoint.keep_last" in full.err
    assert len(Finished(run_dir).metrics) <= 8
    assert_whole(run_dir, "step-000004")
    refused = place.call("resume", str(run_dir))
    assert refused.code == 1
    # Each holds all keys of the config, so it grows with their number.
    room = r"the checkpoints need 60\d KiB more \(30\d KiB each\), 64\.0 KiB are free"
    assert re.search(room, refused.errors[0]), refused.errors
    filler.unlink()
    assert place.call("resume", str(run_dir)).code == 0
    assert_same_end(Finished(run_dir), place.straight(settings))


def test_a_disk_without_room_for_a_line_ends_the_run_by_the_files_name(
    place: Place, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = small_disk / "run"

    def fill() -> None:
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        # The rest of the page that the metrics end in.
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b" " * (-file.tell() % 4096))

    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 6, fill)
        full = run_in(place, run_dir, "checkpoint.save_every_steps=3")
    assert full.code == 1
    assert f"{run_dir / 'metrics.jsonl'}: it cannot be written: No space left on device" in full.errors[0]
    (small_disk / "filler").unlink()
    assert place.call("resume", str(run_dir)).code == 0
    assert_same_end(Finished(run_dir), place.straight("checkpoint.save_every_steps=3"))


def test_a_file_size_limit_is_told_with_what_stays(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        wait_for_save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))

    with monkeypatch.context() as patch:
        at_call(patch, "optune.train.train_step", 6, limit)
        try:
            limited = run_in(place, tmp_path / "run", "checkpoint.save_every_steps=2")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert limited.code == 1
    assert "step-000006: the checkpoint could not be written" in limited.errors[0]
    assert "earlier checkpoints are as they were (step-000002, step-000004)" in limited.err
    assert_whole(tmp_path / "run", "step-000004")
    assert place.call("resume", str(tmp_path / "run")).code == 0
    assert_same_end(Finished(tmp_path / "run"), place.straight("checkpoint.save_every_steps=2"))


CALLS = {
    "open": "optune.checkpoint.writing.write_optimizer",
    "sync": "optune.files.sync_file",
    "sums": "optune.files.hash_file",
    "rename": "optune.files.replace_folder",
    "prune": "optune.files.remove_tree",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_breaks_in_a_save_ends_the_run_at_the_next_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """EIO, from the step-6 save on."""
    straight = place.straight("checkpoint.save_every_steps=2")
    is_broken = False

    def breaks() -> None:
        nonlocal is_broken
        wait_for_save()
        is_broken = True

    with monkeypatch.context() as patch:
        owner, _, name = CALLS[call].rpartition(".")
        original: Callable[..., Any] = getattr(pytest.importorskip(owner), name)

        def broken(*arguments: Any, **keywords: Any) -> Any:
            if is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*arguments, **keywords)

        patch.setattr(CALLS[call], broken)
        at_call(patch, "optune.train.train_step", 6, breaks)
        result = run_in(place, tmp_path / "run", "checkpoint.save_every_steps=2")
    assert result.code == 1
    assert "Input/output error" in result.errors[0]
    assert len(Finished(tmp_path / "run").metrics) <= 8
    # Pruning comes after the new one is whole.
    assert names(tmp_path / "run")[-1] == ("step-000006" if call == "prune" else "step-000004")
    assert place.call("resume", str(tmp_path / "run")).code == 0
    assert_same_end(Finished(tmp_path / "run"), straight)


def test_a_write_that_takes_a_part_is_finished_or_taken_back(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = os.write, 0

    def short(descriptor: int, data: bytes) -> int:
        nonlocal count
        count += data.startswith(b"{")
        return write(descriptor, data[: len(data) // 2] if data.startswith(b"{") and count % 3 == 1 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        assert run_in(place, tmp_path / "run").code == 0
    assert count > 15
    assert_same_end(Finished(tmp_path / "run"), place.straight())


def test_a_run_folder_on_a_read_only_disk_is_one_clear_error(place: Place, small_disk: Path) -> None:
    run_dir = small_disk / "run"
    assert run_in(place, run_dir, "max_steps=6", "checkpoint.keep_last=1").code == 0
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    for result in (place.call("resume", str(run_dir), "max_steps=8"), run_in(place, small_disk / "other")):
        assert result.code == 2
        assert "cannot be written" in result.errors[0]


def test_a_second_process_is_refused_while_the_first_one_runs_and_harms_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    seconds: list[Result] = []

    def come_second() -> None:
        seconds.append(place.call("resume", str(run_dir)))
        seconds.append(run_in(place, run_dir, "resume=auto"))
        seconds.append(run_in(place, run_dir))

    with monkeypatch.context() as patch:
        at_call(patch, "optune.models.load", 2, lambda: pytest.fail("the model was loaded"))
        at_call(patch, "optune.train.train_step", 6, come_second)
        assert run_in(place, run_dir, "checkpoint.save_every_steps=2").code == 0
    for second in seconds[:2]:
        assert second.code == 2
        assert f"is in use by process {os.getpid()} on " in second.errors[0]
    assert seconds[2].code == 2
    assert_same_end(Finished(run_dir), place.straight("checkpoint.save_every_steps=2"))


def test_the_newest_checkpoint_is_the_one_of_the_last_step_whatever_the_clock_says(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = place.straight(EVERY_STEP)
    folder = cut(straight, 9, tmp_path / "run")
    for age, saved in enumerate(checkpoint.list_checkpoints(folder)):
        for path in (saved, *saved.rglob("*")):
            os.utime(path, (2e9 - 1e6 * age, 2e9 - 1e6 * age))
    now = [time.time()]

    def backwards() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    result = place.call("resume", str(folder))
    assert result.code == 0
    assert f"goes on after step 9 from {folder / 'checkpoints' / 'step-000009'}" in result.err
    assert_same_end(Finished(folder), straight)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lose_last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, share: float) -> None:
    """One bit of the byte that lies at `share` of the file."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": empty,
    "cut": cut_in_half,
    "short by a byte": lose_last_byte,
    "first byte flipped": lambda path: flip(path, 0.0),
    "middle byte flipped": lambda path: flip(path, 0.5),
    "last byte flipped": lambda path: flip(path, 1.0),
}
FILES = (
    "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "optune/optimizer.safetensors", "optune/optimizer.json", "optune/progress.json",
    "optune/manifest.json",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    place: Place, tmp_path: Path, name: str
) -> None:
    straight = place.straight(EVERY_STEP)
    held = {str(path.relative_to(straight.checkpoints[-1])) for path in files.walk(straight.checkpoints[-1])}
    assert held == set(FILES)
    for number, (damage, do) in enumerate(DAMAGES.items()):
        folder = cut(straight, 11, tmp_path / str(number))
        newest, before = (folder / "checkpoints" / f"step-0000{step}" for step in (11, 10))
        do(newest / name)
        result = place.call("resume", str(folder))
        assert result.code == 0, (damage, result.err)
        (skipped,) = [line for line in result.err.splitlines() if line.startswith("warning: skipped")]
        assert str(newest) in skipped and name in skipped, damage
        assert f"warning: going back to {before}" in result.err
        assert f"goes on after step 10 from {before}" in result.err
        shutil.rmtree(folder / "checkpoints" / "set-aside")  # where the damaged one is kept
        assert_same_end(Finished(folder), straight)


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_no_checkpoint_is_whole_nothing_is_begun_anew(place: Place, tmp_path: Path, damage: str) -> None:
    folder = cut(place.straight(EVERY_STEP), 3, tmp_path / "run")
    wanted = ["optune/optimizer.safetensors", "model.safetensors", "optune/manifest.json"]
    for saved, name in zip(checkpoint.list_checkpoints(folder), wanted, strict=True):
        DAMAGES[damage](saved / name)
    before = {path: path.read_bytes() for path in files.walk(folder)}
    for words in (("resume", str(folder)), ("run", "full_finetune", "--config", str(place.config), "resume=auto")):
        result = place.call(*words, *([f"output_dir={folder}"] if words[0] == "run" else []))
        assert result.code == 1
        assert "no checkpoint is whole" in result.errors[0]
        for name in wanted:
            assert name in result.err
    assert {path: path.read_bytes() for path in files.walk(folder)} == before


def test_a_checkpoint_named_by_its_folder_is_checked_too(place: Place, tmp_path: Path) -> None:
    folder = cut(place.straight(EVERY_STEP), 3, tmp_path / "run")
    flip(folder / "checkpoints" / "step-000003" / "model.safetensors", 0.7)
    result = run_in(place, tmp_path / "other", f"resume={folder / 'checkpoints' / 'step-000003'}")
    assert result.code == 1
    assert "model.safetensors is damaged" in result.errors[0]
    assert not (tmp_path / "other").exists()


def test_a_damaged_config_or_metrics_file_is_told(place: Place, tmp_path: Path) -> None:
    straight = place.straight(EVERY_STEP)
    folder = cut(straight, 9, tmp_path / "run")
    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    whole = config.read_text()
    config.write_text(whole.replace("lr: 0.01", "lr: 0.03"))
    changed = place.call("resume", str(folder))
    assert changed.code == 2
    assert "optimizer.lr: 0.01 → 0.03" in changed.err
    config.unlink()
    assert "it holds no config.yaml" in place.call("resume", str(folder)).errors[0]
    config.write_text(whole)
    with metrics.open("a") as file:
        file.write('{"step": 12, "lo')
    assert place.call("resume", str(folder)).code == 0
    assert all_metrics(Finished(folder)) == all_metrics(straight)
    assert_same_end(Finished(folder), straight)
