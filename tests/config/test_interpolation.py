"""Environment variables and references: text comes through as it is, what is not set is an error with key and name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.helpers import read, refuse, say


@pytest.mark.parametrize("value", ["144e16", "007", "6e1234", "x y", "1_000", "yes", "a$b", "null-ish", "${x}"])
def test_variable_keeps_its_characters_in_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TAG", value)
    assert read(tmp_path, "device: ${oc.env:TAG}\n").device == value
    assert read(tmp_path, "device: run-${oc.env:TAG}\n").device == f"run-{value}"
    assert read(tmp_path, "", "device=${oc.env:TAG}").device == value


@pytest.mark.parametrize("default", ["144e16", "007", "1e5", "/data/x y", "a.b", "'144e16'"])
def test_default_keeps_its_characters(tmp_path: Path, default: str) -> None:
    assert read(tmp_path, f'device: "${{oc.env:NOT_SET,{default}}}"\n').device == default.strip("'")


def test_variable_may_give_a_number_or_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "1e-5")
    assert read(tmp_path, 'optimizer: {lr: "${oc.env:RATE}"}\n').optimizer["lr"] == 1e-5
    assert read(tmp_path, "max_steps: ${oc.env:NOT_SET,null}\n").max_steps is None
    assert read(tmp_path, "seed: ${oc.env:NOT_SET,${oc.env:NOT_SET_EITHER,5}}\n").seed == 5


def test_unset_variable_without_default_is_an_error_with_variable_and_key(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "output_dir: ${oc.env:RUN_ROOT}/a\n")
    assert str(error).endswith("c.yaml:3: output_dir needs the environment variable RUN_ROOT, which is not set")
    assert "${oc.env:RUN_ROOT,default}" in say(error)


def test_empty_variable_is_an_empty_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_ROOT", "")
    assert read(tmp_path, "output_dir: ${oc.env:RUN_ROOT}/a\n").output_dir == "/a"
    (error,) = refuse(tmp_path, "output_dir: ${oc.env:RUN_ROOT}\n")
    assert "output_dir must be a path, not empty" in str(error)


def test_keys_may_refer_to_each_other(tmp_path: Path) -> None:
    cfg = read(tmp_path, "output_dir: runs/seed-${seed}-${model.path}\n", "seed=7")
    assert cfg.output_dir == "runs/seed-7-m0"


def test_reference_to_a_list_is_the_list(tmp_path: Path) -> None:
    from optune.config import RunConfig, load
    from tests.config.helpers import write

    text = "model: {path: m0}\ndata:\n  train: [a.jsonl, b.jsonl]\n  validation: ${data.train}\n"
    assert load(RunConfig, write(tmp_path, text), []).data.validation == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${nope}", "refers to ${nope}, and the config has no such key"),
        ("${HOME}", "${oc.env:HOME}"),
        ("${oc.evn:HOME}", "did you mean 'oc.env'?"),
        ("${now:%Y}", "not known"),
        ("${oc.env:HOME", "cannot be read"),
        ("${device}", "cannot be resolved"),
    ],
)
def test_broken_interpolation_is_refused_with_key_and_line(tmp_path: Path, text: str, words: str) -> None:
    (error,) = refuse(tmp_path, f'device: "{text}"\n')
    assert error.where is not None
    assert error.where.endswith("c.yaml:3")
    assert "device" in str(error)
    assert words in say(error)


def test_backslash_keeps_an_interpolation_a_text(tmp_path: Path) -> None:
    assert read(tmp_path, "device: '\\${x}'\n").device == "${x}"


def test_home_and_variables_expand_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("ROOT", "/data")
    cfg = read(tmp_path, "", "output_dir=~/o1", "model.path=$ROOT/m0", "data.train=[~/a.jsonl,\\${ROOT}/b.jsonl,'$$x']")
    assert cfg.output_dir == "/home/me/o1"
    assert cfg.model.path == "/data/m0"
    assert cfg.data.train == ["/home/me/a.jsonl", "/data/b.jsonl", "$x"]
    assert read(tmp_path, "device: ~x$ROOT\n").device == "~x$ROOT"


@pytest.mark.parametrize(("path", "words"), [("$NOT_SET/a", "NOT_SET is not set"), ("~nobody_here/a", "no such user")])
def test_path_that_cannot_be_expanded_is_refused(tmp_path: Path, path: str, words: str) -> None:
    (error,) = refuse(tmp_path, "", f"output_dir={path}")
    assert words in str(error)
