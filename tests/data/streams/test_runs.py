"""Streaming through the command line: a resumed run is the straight run, bit for bit, and reads on from its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optune.data.streams import windows
from tests import fixtures
from tests.recipes.running import Finished, run, write_inputs
from tune_cli.main import main

STREAM = ("data.streaming=true", "data.shuffle_window=8", "max_steps=14", "epochs=1", "checkpoint.keep_last=20")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optune.data.streams.blocks._BLOCK", 3)
    monkeypatch.setattr("optune.data.streams.blocks._PACKED_BLOCK", 6)
    # As without the plots extra: drawing takes longer than the runs themselves.
    monkeypatch.setattr("optune.metrics.run_log.draw_plot", lambda run_dir: None)


def assert_goes_on_as(resumed: Finished, straight: Finished, cut: int) -> None:
    for kind in ("weights", "optimizer_state"):
        ours, theirs = getattr(resumed, kind), getattr(straight, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    keys = ("step", "loss", "epoch", "targets", "tokens", "lr")
    tails = [[{key: line[key] for key in keys} for line in each.metrics[-14 + cut :]] for each in (resumed, straight)]
    assert tails[0] == tails[1]
    progress = [json.loads((each.checkpoints[-1] / "optune/progress.json").read_text()) for each in (resumed, straight)]
    for key in ("cursor", "rows_seen", "targets_seen", "tokens_seen"):
        assert progress[0][key] == progress[1][key]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("data.packing=true", "batch_size=1"), ("data.shuffle=false",)])
def test_a_resumed_stream_is_the_straight_run_bit_for_bit(tmp_path: Path, options: tuple[str, ...]) -> None:
    config = write_inputs(tmp_path, rows=21)  # 21 rows, 2 a step: the runs pass the end of an epoch
    rows = "\n".join(json.dumps(row) for row in fixtures.numbered_rows(30)[21:])
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    train = f"data.train=[{tmp_path}/train.jsonl,{{path: {tmp_path}/more.jsonl.gz, weight: 1.5}}]"
    words = [train, *STREAM, *options]
    if "data.shuffle=false" in options:
        words.remove("data.shuffle_window=8")
    straight = run("full_finetune", config, tmp_path / "straight", *words, "checkpoint.save_every_steps=1")
    assert straight.metrics[-1]["epoch"] > 0.5
    for cut in (5, 11):
        checkpoint = tmp_path / f"straight/checkpoints/step-{cut:06d}"
        resumed = run("full_finetune", config, tmp_path / f"from{cut}", *words, f"resume={checkpoint}")
        assert [line["step"] for line in resumed.metrics] == list(range(cut + 1, 15))
        assert_goes_on_as(resumed, straight, cut)


def test_resuming_reads_no_row_before_the_window_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_inputs(tmp_path, rows=60)
    words = ["data.streaming=true", "data.shuffle_window=8", "epochs=1"]
    first = run("lora_finetune", config, tmp_path / "out", *words, "max_steps=20")
    shown = " ".join(capsys.readouterr().err.split())
    assert "streamed, shuffled among 8 rows" in shown
    assert "20 steps of 2 rows optimizer" in shown
    assert "rows read 40 of 40 rows" in shown
    assert first.metrics[-1]["epoch"] == pytest.approx(40 / 60, abs=0.05)

    read: list[int] = []
    find = windows.read_records

    def watch(*arguments: Any) -> Any:
        for record in find(*arguments):
            read.append(record.number)
            yield record

    monkeypatch.setattr(windows, "read_records", watch)
    assert main(["resume", str(tmp_path / "out"), "max_steps=23"]) == 0
    # The first step is looked at for its memory; the place of the 21st is the end of the window that begins at line 33.
    assert set(read) == {*range(1, 10), *range(33, 50)}


def test_what_a_stream_lacks_is_asked_for_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_inputs(tmp_path)

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("optune.models.weights.read_tensor", refuse)

    def fail(*words: str) -> str:
        command = ["run", "full_finetune", "--config", str(config), "data.streaming=true", f"output_dir={tmp_path}/out"]
        assert main([*command, *words]) == 2
        return capsys.readouterr().err

    assert "error: epochs: is 2" in fail("max_steps=3")
    assert "error: max_steps: is null" in fail("epochs=1")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("{\n")
    assert f"error: {tmp_path}/train.jsonl:13: not JSON" in fail("epochs=1", "max_steps=3")
    assert not (tmp_path / "out").exists()


def test_a_broken_row_far_in_a_stream_ends_the_run_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_inputs(tmp_path, rows=40)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*lines[:29], "[]", *lines[29:]]))
    words = ["data.streaming=true", "data.shuffle=false", "epochs=1", "max_steps=30", f"output_dir={tmp_path}/out"]
    code = main(["run", "full_finetune", "--config", str(config), *words, "checkpoint.save_every_steps=5"])
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert f"error: {tmp_path}/train.jsonl:30: found a list, wanted an object" in error
    assert "Traceback" not in error
    finished = Finished(tmp_path / "out")
    assert len(finished.losses) == 13  # rows 1 to 26; the block of row 30 begins at row 28
    assert finished.checkpoints[-1].name == "step-000010"


def test_optune_data_shows_the_rows_that_a_stream_trains_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_inputs(tmp_path, rows=40)
    for options in ((), ("data.packing=true", "batch_size=1")):
        words = ["full_finetune", "--config", str(config), "data.streaming=true", "data.shuffle_window=8", "epochs=1"]
        words += ["max_steps=2", *options]
        assert main(["data", *words, "--json", "--step", "2"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["rows"]["read"] == 8 if not options else shown["rows"]["kept"] == 8
        run("full_finetune", config, tmp_path / f"out{len(options)}", *words[3:])
        line = Finished(tmp_path / f"out{len(options)}").metrics[1]
        assert sum(sum(unit["trained"]) for unit in shown["units"]) == line["targets"]
        assert sum(len(unit["ids"]) - sum(unit["padding"]) for unit in shown["units"]) == line["tokens"]
        capsys.readouterr()
