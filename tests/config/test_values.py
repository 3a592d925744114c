"""A key's declared type decides what its characters mean, the same way in YAML and on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune.config import DataSource, RunConfig, ScheduleSection, option, sections
from optune.config.options import rules_of
from optune.data.sources import entries
from optune.data.streams import blocks
from tests.config.helpers import read, refuse, say


@dataclass
class Inner:
    number: int = 3


@dataclass
class Config(RunConfig):
    text: str = ""
    maybe: str | None = None
    number: float = 0.0
    flag: bool = False
    names: list[str] = option([])
    either: int | str = 0
    inner: Inner | None = None
    free: dict[str, Any] = option({})
    choice: Literal["a", "b"] | None = None
    number_or_word: int | Literal["auto"] = option("auto", minimum=1)


def both(folder: Path, key: str, spelling: str) -> list[Any]:
    """The value from YAML and from an override."""
    return [
        getattr(read(folder, f"{key}: {spelling}\n", schema=Config), key),
        getattr(read(folder, "", f"{key}={spelling}", schema=Config), key),
    ]


@pytest.mark.parametrize("spelling", ["1e-5", "1E-5", ".00001", "0.00001", "1.e-5", "+1e-5", "0.000_01"])
def test_every_spelling_of_a_number_is_that_number(tmp_path: Path, spelling: str) -> None:
    assert both(tmp_path, "number", spelling) == [1e-5, 1e-5]
    assert read(tmp_path, f"optimizer: {{lr: {spelling}}}").optimizer["lr"] == 1e-5
    assert read(tmp_path, "", f"optimizer.lr={spelling}").optimizer["lr"] == 1e-5


@pytest.mark.parametrize(
    "spelling", ["fast", "1,5", "1e", "--1", "0x10", "1:30", "inf", ".inf", ".nan", "1e999", "[1]", "{a: 1}"]
)
def test_text_that_is_no_number_is_refused_with_key_and_value(tmp_path: Path, spelling: str) -> None:
    (error,) = refuse(tmp_path, f"optimizer:\n  lr: {spelling}\n")
    assert error.where is not None
    assert error.where.endswith("c.yaml:4")
    assert "optimizer.lr must be a" in str(error)


def test_number_with_a_decimal_comma_is_shown_with_a_point(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "max_grad_norm: 0,5\n")
    assert error.hint == "write 0.5"


@pytest.mark.parametrize("spelling", ["1.5", "four", "1e3", "010", "4.0", "true", "null", "''"])
def test_whole_numbers_take_nothing_else(tmp_path: Path, spelling: str) -> None:
    (error,) = refuse(tmp_path, f"batch_size: {spelling}\n")
    assert "batch_size must be a whole number of at least 1, not" in str(error)
    (error,) = refuse(tmp_path, "", f"batch_size={spelling}")
    assert error.where == f"batch_size={spelling}"


@pytest.mark.parametrize(
    "spelling", ["007", "144e16", "yes", "1e5", "1_000", "on", "0x1f", "12:30:00", "2024-01-01", "true", "1.0", "-0"]
)
def test_text_keeps_the_characters_typed(tmp_path: Path, spelling: str) -> None:
    assert both(tmp_path, "text", spelling) == [spelling, spelling]
    assert both(tmp_path, "maybe", spelling) == [spelling, spelling]
    assert read(tmp_path, f"output_dir: {spelling}\n").output_dir == spelling
    (item,) = read(tmp_path, f"names: [{spelling}]\n", schema=Config).names
    assert item == spelling


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=12))
def test_any_quoted_text_comes_through_an_override_unchanged(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    from optune.config.emit import write_override

    folder = tmp_path_factory.mktemp("override")
    assert read(folder, "", write_override("text", text), schema=Config).text == text


@pytest.mark.parametrize("spelling", ["null", "~", "Null", "NULL"])
def test_spellings_of_null_are_null(tmp_path: Path, spelling: str) -> None:
    assert both(tmp_path, "max_grad_norm", spelling) == [None, None]
    assert both(tmp_path, "maybe", spelling) == [None, None]
    assert read(tmp_path, "max_grad_norm:\n").max_grad_norm is None


@pytest.mark.parametrize("spelling", ["None", "none", "NONE"])
@pytest.mark.parametrize("key", ["max_grad_norm", "maybe", "inner", "max_steps"])
def test_pythons_null_is_an_error_that_says_null(tmp_path: Path, key: str, spelling: str) -> None:
    for error in (
        *refuse(tmp_path, f"{key}: {spelling}\n", schema=Config),
        *refuse(tmp_path, "", f"{key}={spelling}", schema=Config),
    ):
        assert f"{key} must be" in str(error)
        assert key == "inner" or error.hint == "write null"


def test_pythons_null_is_refused_where_no_type_is_declared_and_for_plain_texts(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "optimizer: {betas: None}\n")
    assert "optimizer.betas" in str(error)
    (error,) = refuse(tmp_path, "text: None\n", schema=Config)
    assert "text must be a text" in str(error)
    assert read(tmp_path, "text: 'None'\n", schema=Config).text == "None"


def test_empty_override_is_an_empty_text_and_no_number(tmp_path: Path) -> None:
    assert read(tmp_path, "", "text=", schema=Config).text == ""
    (error,) = refuse(tmp_path, "", "max_grad_norm=")
    assert str(error) == "max_grad_norm=: max_grad_norm must be a number above 0 or null, not empty"
    assert error.hint == "null is no clipping"


def test_what_null_stands_for_is_said_of_every_key_that_takes_it(tmp_path: Path) -> None:
    """It is not always off, so each key says it in its own words."""
    nullable = {
        f"{section.__name__}.{field.name}": rules_of(field).null
        for section in vars(sections).values()
        if dataclasses.is_dataclass(section) and isinstance(section, type) and section.__module__ == sections.__name__
        for field in dataclasses.fields(section)
        if type(None) in get_args(get_type_hints(section)[field.name])
    }
    assert len(nullable) > 15
    assert all(nullable.values()), nullable
    (error,) = refuse(tmp_path, "", "data.shuffle_window=0")
    assert error.hint == f"null is a window of {blocks.DEFAULT_WINDOW:,} rows"
    (error,) = refuse(tmp_path, "", "data.max_length=1")
    assert error.hint == "null is no limit"


def test_a_weight_that_no_memory_could_hold_is_refused(tmp_path: Path) -> None:
    for weight in ("1e9", "nan", "0"):
        (error,) = refuse(tmp_path, "", f"data.train=[{{path: a.jsonl, weight: {weight}}}]")
        assert "data.train[0].weight must be a number above 0 and of at most 10,000" in str(error)
    assert sections.MOST_WEIGHT == entries.MOST_WEIGHT


@pytest.mark.parametrize(("spelling", "meant"), [("yes", "true"), ("on", "true"), ("1", "true"), ("off", "false")])
def test_truth_values_are_true_and_false_alone(tmp_path: Path, spelling: str, meant: str) -> None:
    assert both(tmp_path, "flag", "true") == [True, True]
    (error,) = refuse(tmp_path, f"flag: {spelling}\n", schema=Config)
    assert say(error).endswith(f"flag must be true or false, not '{spelling}' | write {meant}")


@pytest.mark.parametrize("spelling", ["q_proj", "[q_proj]", "'[q_proj]'", '"[ q_proj ]"'])
def test_one_text_is_a_list_of_one(tmp_path: Path, spelling: str) -> None:
    assert both(tmp_path, "names", spelling) == [["q_proj"], ["q_proj"]]


@pytest.mark.parametrize("spelling", ["[q_proj,v_proj]", "[q_proj, v_proj]", "'[q_proj, v_proj]'", '"[q_proj,v_proj]"'])
def test_three_spellings_of_a_list_agree(tmp_path: Path, spelling: str) -> None:
    assert both(tmp_path, "names", spelling) == [["q_proj", "v_proj"]] * 2


def test_pattern_that_begins_with_a_bracket_stays_a_text(tmp_path: Path) -> None:
    assert read(tmp_path, "names: '[qk]_proj'\n", schema=Config).names == ["[qk]_proj"]


def test_null_is_no_list(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "names: null\n", schema=Config)
    assert error.hint == "an empty list is written []"


def test_choice_is_one_of_its_words(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "optimizer_step: in_backwards\n")
    assert "after_backward, in_backward, immediate" in str(error)
    assert error.hint == "did you mean 'in_backward'?"
    assert read(tmp_path, "choice: a\n", schema=Config).choice == "a"


def test_null_turns_a_choice_off_that_has_a_word_for_it(tmp_path: Path) -> None:
    assert both(tmp_path, "activation_checkpointing", "null") == ["none", "none"]


def test_unions_go_by_shape(tmp_path: Path) -> None:
    cfg = read(tmp_path, "either: 5\ninner: {number: 4}\n", schema=Config)
    assert cfg.inner == Inner(4)
    (error,) = refuse(tmp_path, "inner: 5\n", schema=Config)
    assert "inner must be a mapping, not '5'" in str(error)
    assert isinstance(read(tmp_path, "schedule: {name: linear}\n").schedule, ScheduleSection)


def test_values_without_a_declared_type_go_by_their_plain_spelling(tmp_path: Path) -> None:
    text = "free: {a: 1, b: 1e5, c: true, d: ~, e: yes, f: '1', g: [1, x], h: {i: 0.5}, j: 007, k: '', l: 1_0}\n"
    assert read(tmp_path, text, schema=Config).free == {
        "a": 1, "b": 1e5, "c": True, "d": None, "e": "yes", "f": "1", "g": [1, "x"], "h": {"i": 0.5}, "j": "007",
        "k": "", "l": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lr: -1}", "optimizer.lr must be a number of at least 0"),
        ("batch_size: 0", "batch_size must be a whole number of at least 1"),
        ("schedule: {min_lr_ratio: 1.1}", "schedule.min_lr_ratio must be a number from 0 to 1"),
        ("max_grad_norm: 0", "max_grad_norm must be a number above 0 or null"),
        ("epochs: 0", "epochs must be"),
        ("checkpoint: {keep_last: 0}", "checkpoint.keep_last must be"),
        ("output_dir: ''", "output_dir must be a path, not empty"),
        ("data: {train: []}", "data.train must name at least one"),
    ],
)
def test_values_out_of_bounds_are_refused_with_the_rule(tmp_path: Path, text: str, message: str) -> None:
    base = "model: {path: m0}\n" + ("" if text.startswith("data") else "data: {train: a.jsonl}\n")
    (error,) = refuse(tmp_path, f"{text}\n", base=base)
    assert message in str(error)


def test_rate_of_zero_is_legal(tmp_path: Path) -> None:
    assert read(tmp_path, "optimizer: {lr: 0}\n").optimizer["lr"] == 0


def test_data_takes_a_path_a_list_or_mappings(tmp_path: Path) -> None:
    assert read(tmp_path).data.train == ["a.jsonl"]
    mixed = "data: {train: [a.jsonl, {path: b.json, format: text}], validation: v.jsonl}\n"
    cfg = read_alone(tmp_path, mixed)
    assert cfg.data.train == ["a.jsonl", DataSource("b.json", "text")]
    assert cfg.data.validation == ["v.jsonl"]
    assert read_alone(tmp_path, "data: {train: {path: b.json}}\n").data.train == [DataSource("b.json")]


def read_alone(folder: Path, text: str) -> RunConfig:
    from optune.config import load
    from tests.config.helpers import write

    return load(RunConfig, write(folder, "model: {path: m0}\n" + text), [])


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    errors = refuse(tmp_path, "batch_size: x\nepochs: 1.5\nsede: 1\noptimizer: {lr: fast}\n", "device=[a]", "foo=1")
    messages = "\n".join(map(str, errors))
    for key in ("batch_size", "epochs", "sede", "optimizer.lr", "device", "foo"):
        assert key in messages
    assert len(errors) == 6


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    errors = refuse(tmp_path, base="seed: 1\n")
    assert sorted(str(error).split(": ")[-1] for error in errors) == ["data.train is missing", "model.path is missing"]


def test_secrets_are_not_shown_in_messages(tmp_path: Path) -> None:
    @dataclass
    class Secretive(RunConfig):
        api_key: int = 0

    for error in (
        *refuse(tmp_path, "api_key: hunter2\n", schema=Secretive),
        *refuse(tmp_path, "", "api_key=hunter2", schema=Secretive),
        *refuse(tmp_path, "", "loggers=[{_target_: os.system, wandb_api_key: hunter2, x: [}]"),
        *refuse(tmp_path, "", "lodgers=[{wandbToken: hunter2}]"),
    ):
        assert "hunter2" not in say(error)


def test_a_wrong_value_under_a_key_that_looks_secret_is_told_without_stars(tmp_path: Path) -> None:
    @dataclass
    class Keyed(RunConfig):
        my_key: int = 0

    (error,) = refuse(tmp_path, "my_key: hunter2\n", schema=Keyed)
    assert say(error).endswith(":3: my_key must be a whole number, not the text that is given | None")
    (error,) = refuse(tmp_path, "", "my_key=1.5", schema=Keyed)
    assert say(error) == "my_key=1.5: my_key must be a whole number, not '1.5' | None"


def test_a_number_may_have_a_word_in_its_place(tmp_path: Path) -> None:
    assert both(tmp_path, "number_or_word", "auto") == ["auto", "auto"]
    assert both(tmp_path, "number_or_word", "4") == [4, 4]
    for spelling in ("0", "atuo", "null"):
        (error,) = refuse(tmp_path, f"number_or_word: {spelling}\n", schema=Config)
        assert "must be a whole number of at least 1 or auto" in say(error)
