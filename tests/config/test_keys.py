"""An unknown key is refused at every depth, with the place where it stands and the nearest real key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from optune.config import LoraSection, RunConfig, option
from tests.config.helpers import refuse, write


@dataclass
class LoraConfig(RunConfig):
    lora: LoraSection = option(LoraSection)


@pytest.mark.parametrize(
    ("text", "line", "unknown", "meant"),
    [
        ("gradient_acumulation_steps: 8\n", 3, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("\nschedule:\n  warm_up_steps: 3\n", 5, "schedule.warm_up_steps", "schedule.warmup_steps"),
        ("checkpoint: {keep_lsat: 1}\n", 3, "checkpoint.keep_lsat", "checkpoint.keep_last"),
        ("lr: 1e-5\n", 3, "lr", "optimizer.lr"),
        ("packing: true\n", 3, "packing", "data.packing"),
        ("dataset: {pakced: true}\n", 3, "dataset", "data"),
        ("learning_rate: 1e-5\n", 3, "learning_rate", "optimizer.lr"),
        ("lora: {rnak: 8}\n", 3, "lora.rnak", "lora.rank"),
    ],
)
def test_unknown_key_in_yaml_is_named_with_line_and_nearest_key(
    tmp_path: Path, text: str, line: int, unknown: str, meant: str
) -> None:
    (error,) = refuse(tmp_path, text, schema=LoraConfig)
    assert error.where is not None
    assert error.where.endswith(f"c.yaml:{line}")
    assert f"unknown key {unknown!r}" in str(error)
    assert error.hint == f"did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("argument", "unknown", "meant"),
    [
        ("optimzer.lr=1e-3", "optimzer", "optimizer"),
        ("data.pakced=true", "data.pakced", "data.packing"),
        ("+data.shufle=true", "data.shufle", "data.shuffle"),
        ("++modle.path=x", "modle", "model"),
        ("data.train=[{path: a.jsonl, fromat: text}]", "data.train[0].fromat", "data.train[0].format"),
    ],
)
def test_unknown_key_in_an_override_is_named_with_the_argument(
    tmp_path: Path, argument: str, unknown: str, meant: str
) -> None:
    (error,) = refuse(tmp_path, "", argument)
    assert error.where == argument
    assert f"unknown key {unknown!r}" in str(error)
    assert error.hint == f"did you mean {meant!r}?"


def test_unknown_key_inside_a_list_is_found(tmp_path: Path) -> None:
    text = "model: {path: m0}\ndata:\n  train:\n    - a.jsonl\n    - path: b.jsonl\n      pth: c.jsonl\n"
    (error,) = refuse(tmp_path, base=text)
    assert str(error).endswith("c.yaml:6: unknown key 'data.train[1].pth'")
    assert error.hint == "did you mean 'data.train[1].path'?"


def test_key_like_no_other_lists_those_that_there_are(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "checkpoint: {zzz: 1}\n")
    assert error.hint == "the keys here are keep_last, save_every_steps"


def test_messages_name_the_file_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", "sede: 1\n", "x.yaml")
    from optune.config import ConfigProblemsError, load

    with pytest.raises(ConfigProblemsError) as caught:
        load(RunConfig, "configs/x.yaml", [])
    assert "configs/x.yaml:1: unknown key 'sede'" in str(caught.value).splitlines()
