"""A run folder belongs to one run and one process, and keeps what was said in it."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tqdm import tqdm

from optune import files
from optune.errors import ConfigError, OptuneError, TrainingError
from optune.run_folder import check_output, open_run

CONFIG = "seed: 0\n"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions do not bind root; the tests may run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def finish_a_step(run_dir: Path) -> None:
    with open_run(run_dir, CONFIG):
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_new_folder_holds_the_config_and_an_empty_place_for_checkpoints(tmp_path: Path) -> None:
    with open_run(tmp_path / "a" / "run", CONFIG) as run:
        assert run.path == tmp_path / "a" / "run"
        assert (run.path / "config.yaml").read_text() == CONFIG
        assert list(run.checkpoints.iterdir()) == []


def test_checking_the_output_creates_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    finish_a_step(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"output_dir: .*run already holds a run \(config\.yaml, metrics") as caught:
        open_run(tmp_path / "run", "seed: 1\n")
    assert caught.value.hint is not None
    assert "optune resume" in caught.value.hint and "another output_dir" in caught.value.hint
    assert (tmp_path / "run" / "config.yaml").read_text() == CONFIG


@pytest.mark.parametrize("name", ["checkpoints/step-000001", "model"])
def test_a_folder_with_a_checkpoint_or_a_result_is_refused(tmp_path: Path, name: str) -> None:
    with open_run(tmp_path / "run", CONFIG):
        (tmp_path / "run" / name).mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        check_output(tmp_path / "run")


def test_a_run_that_never_stepped_may_be_started_again(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG):
        (tmp_path / "run" / "metrics.jsonl").touch()
        (tmp_path / "run" / "checkpoints" / f"{files.ASIDE}step-000001").mkdir()
    with open_run(tmp_path / "run", "seed: 1\n"):
        assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"


def test_a_config_file_that_no_run_wrote_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine\n")
    with pytest.raises(ConfigError, match="already holds"):
        open_run(tmp_path, CONFIG)
    assert (tmp_path / "config.yaml").read_text() == "mine\n"


def test_resume_takes_the_folder_and_keeps_what_was_logged(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG):
        sys.stderr.write("first\n")
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with open_run(tmp_path / "run", "seed: 1\n", resume=True):
        sys.stderr.write("second\n")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "first" in log and "second" in log
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"


def test_a_second_process_is_refused_with_the_first_ones_number(tmp_path: Path) -> None:
    code = "import sys; from optune.run_folder import open_run; open_run(sys.argv[1], 'x: 1', resume=True)"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with open_run(tmp_path / "run", CONFIG):
        second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"is in use by process {os.getpid()} on " in second.stderr
    assert (tmp_path / "run" / "config.yaml").read_text() == CONFIG
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from optune.run_folder import open_run; "
        "run = open_run(sys.argv[1], 'x: 1'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, check=False)
    assert killed.returncode == -9
    open_run(tmp_path / "run", CONFIG, resume=True).close()


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_permission_is_one_clear_error(mode: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        locked = Path(parent) / "locked"
        locked.mkdir()
        locked.chmod(mode)
        for take in (check_output, lambda path: open_run(path, CONFIG)):
            with as_nobody(), pytest.raises(ConfigError, match=r"output_dir: .*run cannot be written: .*permission"):
                take(locked / "run")
        locked.chmod(0o755)
        assert list(locked.iterdir()) == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match=r"output_dir: .*run cannot be written: file too large"):
            open_run(tmp_path / "run", CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    open_run(tmp_path / "run", CONFIG).close()


def test_of_two_processes_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from optune.run_folder import open_run\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "run = open_run(sys.argv[1], 'x: 1'); (run.path / 'metrics.jsonl').write_text('line'); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(time.time() + 2)]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    time.sleep(3)
    ends = [process.communicate("") for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1, 1]
    assert sum("already holds a run" in end[1] or "is in use by" in end[1] for end in ends) == 2


def test_a_file_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_output(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot be made: .*run is a file"):
        check_output(tmp_path / "run" / "deeper")


def make_checkpoint(run_dir: Path, content: bytes) -> Path:
    folder = run_dir / "checkpoints" / "step-000002"
    (folder / "optune").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    (folder / "optune" / "progress.json").write_text("{}")
    return folder


def test_the_result_is_the_model_files_alone_linked_to_the_checkpoint(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as run:
        checkpoint = make_checkpoint(run.path, b"weights")
        model = run.publish_model(checkpoint)
        assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
        assert (model / "model.safetensors").samefile(checkpoint / "model.safetensors")
        # People edit small files: an edit must not reach into the checkpoint, whose sums it would break.
        assert not (model / "config.json").samefile(checkpoint / "config.json")


def test_the_result_is_copied_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with open_run(tmp_path / "run", CONFIG) as run:
        model = run.publish_model(make_checkpoint(run.path, b"weights"))
    assert (model / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_new_result_replaces_the_old_one_whole(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    with open_run(tmp_path / "run", CONFIG) as run:
        model = run.publish_model(make_checkpoint(run.path, b"old"))
        (model / "left_over.json").touch()
        run.publish_model(make_checkpoint(run.path, b"new"))
        assert (model / "model.safetensors").read_bytes() == b"new"
        assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
        assert not [path for path in run.path.iterdir() if path.name.startswith(files.ASIDE)]


def test_a_result_that_cannot_be_written_says_where_the_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "link_or_copy", refuse)
    with open_run(tmp_path / "run", CONFIG) as run:
        checkpoint = make_checkpoint(run.path, b"weights")
        with pytest.raises(OptuneError, match="no space left on device") as caught:
            run.publish_model(checkpoint)
        assert str(checkpoint) in str(caught.value.hint)
        assert not run.model.exists()


def test_what_is_shown_is_logged_with_the_time_and_stderr_is_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stderr
    with open_run(tmp_path / "run", CONFIG) as run:
        print("warning: \x1b[31mred\x1b[0m", file=sys.stderr)
        sys.stderr.write("\rhalf\rdone\n")
    assert sys.stderr is before
    assert capsys.readouterr().err == "warning: \x1b[31mred\x1b[0m\n\rhalf\rdone\n"
    stamps, texts = zip(
        *((line[:19], line[20:]) for line in (run.path / "log.txt").read_text().splitlines()), strict=True
    )
    assert texts == ("warning: red", "done")
    assert all(stamp[4] == "-" and stamp[13] == ":" for stamp in stamps)


def test_a_message_does_not_tear_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_run(tmp_path / "run", CONFIG) as run, tqdm(total=3, file=terminal, mininterval=0) as bar:
        bar.update()
        print("a", "message", file=sys.stderr)
        bar.update()
    last_screen = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert "a message" in last_screen
    assert "message" in (run.path / "log.txt").read_text()
    assert "it/s" not in (run.path / "log.txt").read_text()


def test_the_cause_of_a_failure_stands_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(TrainingError), open_run(tmp_path / "run", CONFIG):
        raise TrainingError("the loss is not finite", where="step 3", hint="lower optimizer.lr")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "error: step 3: the loss is not finite" in log and "hint: lower optimizer.lr" in log
    assert "Traceback" not in log
    with pytest.raises(ZeroDivisionError), open_run(tmp_path / "run", CONFIG):
        _ = 1 / 0
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_whole(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync", refuse)
        with pytest.raises(OSError, match="Input/output"):
            files.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
