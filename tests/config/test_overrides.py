"""Overrides follow Hydra's grammar and reach every depth."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import DataSource, RunConfig, load
from tests.config.helpers import read, refuse, say, write


def test_overrides_reach_into_sections_and_lists(tmp_path: Path) -> None:
    cfg = read(tmp_path, "", "data.train=[a.jsonl,b.jsonl]", "data.train.1=c.jsonl", "data.packing=true")
    assert cfg.data.train == ["a.jsonl", "c.jsonl"]
    assert cfg.data.packing is True
    cfg = read(tmp_path, "", "data.train.0.path=x.jsonl")
    assert cfg.data.train == [DataSource("x.jsonl")]
    cfg = read(tmp_path, "", "data.train[0].format=text")
    assert cfg.data.train == [DataSource("a.jsonl", "text")]


def test_item_that_is_not_there_is_refused_with_the_count(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "", "data.train.3=x.jsonl")
    assert "data.train is a list of 1, so '3' names no item of it" in str(error)


@pytest.mark.parametrize("argument", ["output_dir='a=b'", 'output_dir="a=b"'])
def test_quoted_values_may_hold_an_equals_sign(tmp_path: Path, argument: str) -> None:
    assert read(tmp_path, "", argument).output_dir == "a=b"


def test_unquoted_equals_sign_is_refused_with_a_hint_to_quote(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "", "output_dir=a=b")
    assert "quotes" in say(error)


@pytest.mark.parametrize("text", ["café/ü", "a#b", "x y", "runs/a;b", "<x>", "a&b", "日本", "a!b"])
def test_characters_that_the_grammar_does_not_know_are_kept(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, "", f"output_dir={text}").output_dir == text
    assert read(tmp_path, "", f"data.train=[{text},b]").data.train == [text, "b"]


def test_mapping_merges_and_list_replaces(tmp_path: Path) -> None:
    cfg = read(tmp_path, "checkpoint: {keep_last: 3}\n", "checkpoint={save_every_steps: 5}")
    assert (cfg.checkpoint.keep_last, cfg.checkpoint.save_every_steps) == (3, 5)


def test_later_override_wins(tmp_path: Path) -> None:
    assert read(tmp_path, "", "seed=1", "seed=2").seed == 2


TARGET = "{_target_: optune.data.formats.read_chosen}"


def test_later_override_wins_between_a_text_and_a_target(tmp_path: Path) -> None:
    for words, expected in (
        (("data.format=alpaca", f"data.format={TARGET}"), {"_target_": "optune.data.formats.read_chosen"}),
        ((f"data.format={TARGET}", "data.format=alpaca"), "alpaca"),
        (("data.format._target_=optune.data.formats.read_chosen", "data.format=alpaca"), "alpaca"),
        (("data.format=text", f"data.format={TARGET}", "data.format=alpaca"), "alpaca"),
        (("data={train: b.jsonl, format: alpaca}", f"data.format={TARGET}"), {"_target_": TARGET[11:-1]}),
    ):
        assert read(tmp_path, "", *words).data.format == expected
    both = ("optimizer._target_=torch.optim.Adagrad", "optimizer._target_=torch.optim.SGD")
    assert read(tmp_path, "", *both).optimizer["_target_"] == "torch.optim.SGD"
    # A target keeps the keywords that are given beside it, in front of it too.
    cfg = read(tmp_path, "", "optimizer.lr=0.5", "optimizer={_target_: torch.optim.SGD, momentum: 0.9}")
    assert cfg.optimizer == {"_target_": "torch.optim.SGD", "momentum": 0.9, "lr": 0.5}


@pytest.mark.parametrize("key", ["data.train", "data.train.0"])
def test_another_source_has_none_of_the_limits_of_the_old_one(tmp_path: Path, key: str) -> None:
    train = "{path: a.jsonl, max_rows: 5, split: 'train[:9]'}"
    base = f"data: {{train: {train if key == 'data.train' else f'[{train}]'}}}\nmodel: {{path: m0, dtype: fp32}}\n"
    path = write(tmp_path, base)
    assert load(RunConfig, path, [f"{key}={{path: b.jsonl}}"]).data.train == [DataSource("b.jsonl")]
    assert load(RunConfig, path, [f"{key}.path=b.jsonl"]).data.train == [
        DataSource("b.jsonl", None, 1.0, 5, "train[:9]")
    ]
    whole = load(RunConfig, path, ["data={train: {path: b.jsonl}}", "model={path: m1}"])
    assert (whole.data.train, whole.model.dtype) == ([DataSource("b.jsonl")], "fp32")


def test_plus_adds_and_refuses_what_is_there(tmp_path: Path) -> None:
    cfg = read(tmp_path, "", "+optimizer.betas=[0.9,0.95]", "+seed=4")
    assert cfg.optimizer["betas"] == [0.9, 0.95]
    assert cfg.seed == 4
    (error,) = refuse(tmp_path, "seed: 1\n", "+seed=4")
    assert "seed is set already" in str(error)
    assert read(tmp_path, "seed: 1\n", "++seed=4").seed == 4


def test_tilde_removes_a_key_so_that_its_default_counts(tmp_path: Path) -> None:
    assert read(tmp_path, "schedule: {name: linear}\n", "~schedule").schedule.name == "cosine"
    assert read(tmp_path, "checkpoint: {keep_last: 5}\n", "~checkpoint.keep_last").checkpoint.keep_last == 2
    (error,) = refuse(tmp_path, "", "~schedule")
    assert str(error) == "~schedule: schedule is not set in the config, so it cannot be removed"


@pytest.mark.parametrize("argument", ["seed", "=3", "seed =3", "a b=3", "--seed=3", ""])
def test_what_is_no_override_is_refused(tmp_path: Path, argument: str) -> None:
    (error,) = refuse(tmp_path, "", argument)
    assert "is not an override" in str(error)


@pytest.mark.parametrize("argument", ["seed=1,2", "seed=choice(1,2)", "seed=range(1,4)"])
def test_grid_without_multirun_is_refused_with_both_ways_out(tmp_path: Path, argument: str) -> None:
    (error,) = refuse(tmp_path, "", argument)
    assert "--multirun" in say(error)
    assert "seed=[…]" in say(error)


@pytest.mark.parametrize("argument", ["data.train=[a", "data.train={a", "output_dir='a", "seed=(1)"])
def test_broken_grammar_is_refused_with_the_argument(tmp_path: Path, argument: str) -> None:
    (error,) = refuse(tmp_path, "", argument)
    assert error.where == argument
    assert "ZQ" not in str(error)


def test_value_of_a_mapping_in_an_override_keeps_its_characters(tmp_path: Path) -> None:
    cfg = read(tmp_path, "", "data.train=[{path: 007, format: text}]")
    assert cfg.data.train == [DataSource("007", "text")]
