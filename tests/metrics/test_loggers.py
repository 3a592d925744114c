"""Loggers write what was logged, read back with the tools' own readers, and never a secret."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from optune.errors import ConfigError, OptuneError
from optune.metrics import RunLog, TensorBoard, WandB
from optune.metrics.loggers import hide_secrets, tag


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda _: None)


CONFIG = {
    "seed": 0,
    "data": {"max_length": 2048},
    "loggers": [{"_target_": "optune.metrics.WandB", "api_key": "sk-very-secret"}],
    "hub": {"token": "hf_very_secret", "password": "very-secret", "HF_TOKEN": "very-secret"},
}


def train(run_dir: Path, logger: Any, first: int, last: int) -> None:
    with RunLog(run_dir, 8, loggers=[logger], config=CONFIG, first_step=first - 1) as log:
        for step in range(first, last + 1):
            log.step(step, loss=4.0 / step, targets=8, tokens=16, lr=step / 8, epoch=step / 4, grad_norm=2.0**step)
            if step % 2 == 0:
                log.validation(step, loss=5.0 / step, epoch=step / 4)


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def test_tensorboard_reads_back_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, TensorBoard(), 1, 8)
    events = read_events(tmp_path / "tensorboard")

    def series(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert series("train/grad_norm") == [(step, 2.0**step) for step in range(1, 9)]
    assert series("train/lr") == [(step, step / 8) for step in range(1, 9)]
    assert [step for step, _ in series("train/loss")] == list(range(1, 9))
    assert [value for _, value in series("train/loss")] == pytest.approx([4.0 / step for step in range(1, 9)])
    assert [step for step, _ in series("validation/loss")] == [2, 4, 6, 8]
    assert {"speed/tokens_per_s", "speed/step_s", "memory/peak_memory_gib"} <= set(events.Tags()["scalars"])
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "data.max_length: 2048" in text


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, TensorBoard(), 1, 6)
    train(tmp_path, TensorBoard(), 5, 8)
    events = read_events(tmp_path / "tensorboard")
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


@pytest.mark.parametrize("log_dir", ["/proc/x", "{file}", "{file}/below"])
def test_a_log_dir_that_cannot_be_written_is_refused_when_the_logger_is_made(tmp_path: Path, log_dir: str) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^loggers: TensorBoard: log_dir: cannot write to "):
        TensorBoard(log_dir=log_dir.format(file=tmp_path / "file"))


def test_wandb_that_cannot_start_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("no API key configured.\n  Use wandb login")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(OptuneError, match=r"^loggers: WandB: cannot start: no API key configured. Use") as caught:
        WandB().start(tmp_path, {}, 0)
    assert "mode: offline" in str(caught.value.hint)


def test_a_log_dir_is_checked_without_leaving_anything(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    TensorBoard(log_dir=str(tmp_path / "new" / "logs"))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_writes_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, TensorBoard(log_dir=str(tmp_path / "elsewhere")), 1, 2)
    assert read_events(tmp_path / "elsewhere").Scalars("train/loss")
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("make", [TensorBoard, WandB])
def test_a_missing_library_is_told_when_the_logger_is_made(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = make.__name__.lower()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"{name} is not installed") as caught:
        make()
    assert caught.value.hint == f"pip install 'optune[{name}]'"


def read_wandb(file: Path) -> tuple[list[dict[str, Any]], str]:
    """The logged lines and the run's id in an offline run's file: records in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    lines, run_id, at, data = [], "", 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # The first or a middle part of a record.
            continue
        record, data = Record.FromString(data), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            lines.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
    return lines, run_id


def wait_for_wandb(file: Path) -> tuple[list[dict[str, Any]], str]:
    """As `read_wandb`; a process of wandb's own writes the file, and on a busy machine it comes late."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(struct.error, DecodeError):
            lines, run_id = read_wandb(file)
            if run_id or time.monotonic() > deadline:
                return lines, run_id
        time.sleep(0.1)


@pytest.mark.slow
def test_wandb_offline_holds_every_number_and_goes_on_in_the_same_run(tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("wandb")
    train(tmp_path, WandB(mode="offline", name="a name", tags=["b"]), 1, 4)
    train(tmp_path, WandB(mode="offline"), 3, 8)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))  # their names begin with the time
    (first, first_id), (second, second_id) = map(wait_for_wandb, files)
    assert first_id == second_id == (tmp_path / "wandb-id.txt").read_text().strip()
    losses = [(line["step"], line["train/loss"]) for line in first if "train/loss" in line]
    assert losses == [(step, 4.0 / step) for step in range(1, 5)]
    assert [line["step"] for line in second if "train/loss" in line] == list(range(3, 9))
    assert [line["validation/loss"] for line in first if "validation/loss" in line] == [5.0 / 2, 5.0 / 4]
    assert capfd.readouterr().out == ""
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"very-secret" not in written and b"very_secret" not in written and b"max_length" in written


def test_wandb_refuses_a_mode_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"loggers: WandB: mode: 'off' is not online, offline"):
        WandB(mode="off")


def test_no_logger_writes_a_secret(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, TensorBoard(), 1, 2)
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"max_length: 2048" in written
    assert b"very-secret" not in written and b"very_secret" not in written


def test_only_values_of_keys_that_look_like_secrets_are_hidden() -> None:
    shown = {"max_tokens": 3, "keyword": "a", "monkey": "b", "token": None, "key_size": "c", "lr": 0.1}
    assert hide_secrets(shown) == shown
    hidden = {"token": "a", "api_key": "b", "w.api-key": "c", "PASSWORD": "d", "client_secret": "e", "hf_token": "f"}
    assert hide_secrets(hidden) == dict.fromkeys(hidden, "***")


def test_metrics_stand_in_groups() -> None:
    assert [tag(key) for key in ("loss", "lr", "validation_loss", "tokens_per_s", "peak_memory_gib")] == [
        "train/loss",
        "train/lr",
        "validation/loss",
        "speed/tokens_per_s",
        "memory/peak_memory_gib",
    ]


def test_reading_the_metrics_module_waits_for_no_heavy_library() -> None:
    code = (
        "import optune.metrics, sys; "
        "print([name for name in ('torch', 'matplotlib', 'tensorboard', 'wandb') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
