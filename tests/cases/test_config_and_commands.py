"""Cases A01 to A06: what a config says is what the run does, from YAML and from the command line alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import fixtures
from tests.cases.place import CONFIG, Place, assert_equal, largest, moved, shows, turns

ROWS = fixtures.numbered_rows(4)
RATES = ("1e-5", "1E-5", ".00001", "1.0e-05", "0.00001")


def test_every_spelling_of_a_rate_trains_the_same_weights(place: Place) -> None:
    """A01."""
    place.write(ROWS)
    first = place.train("optimizer.lr=0.00001")
    assert largest(moved(first, place.folder / "m0")) > 0
    for spelling in RATES:
        place.configure(CONFIG.replace("0.1", spelling), "rate.yaml")
        for run in (place.train(f"optimizer.lr={spelling}"), place.train(config="rate.yaml")):
            assert {line["lr"] for line in run.metrics} == {1e-5}, spelling
            assert_equal(run.weights, first.weights)


@pytest.mark.parametrize("value", ["fast", "1e-5x", "1e--5", "true", "nan", "-1e-5"])
def test_a_rate_that_is_no_rate_is_refused_with_key_and_value(place: Place, no_weights: None, value: str) -> None:
    """A01."""
    place.write(ROWS)
    place.configure(CONFIG.replace("lr: 0.1", f"lr: {value}"), "rate.yaml")
    by_argument = place.refuse(f"optimizer.lr={value}").err
    by_file = place.refuse(config="rate.yaml").err
    for message in (by_argument, by_file):
        assert "optimizer.lr" in message
        assert value in message
    assert "rate.yaml:4" in by_file


def test_null_in_every_spelling_turns_clipping_off(place: Place) -> None:
    """A02."""
    place.write(ROWS)
    without = place.train("optimizer.lr=1")
    assert any(line["grad_norm"] > 0.2 for line in without.metrics)
    clipped = place.train("optimizer.lr=1", "max_grad_norm=0.2")
    assert largest({n: t - without.weights[n] for n, t in clipped.weights.items()}) > 0
    for spelling in ("null", "~"):
        place.configure(CONFIG.replace("max_grad_norm: null", f"max_grad_norm: {spelling}"), "null.yaml")
        for run in (
            place.train("optimizer.lr=1", f"max_grad_norm={spelling}"),
            place.train("optimizer.lr=1", config="null.yaml"),
        ):
            assert_equal(run.weights, without.weights)
            assert "\nmax_grad_norm: null\n" in (run.folder / "config.yaml").read_text(encoding="utf-8")


NULLABLE = (
    "max_grad_norm", "max_steps", "data.max_length", "data.validation", "data.chat_template", "resume", "max_time",
    "checkpoint.save_every_steps", "checkpoint.keep_last", "validation_every_steps", "schedule.decay_steps",
)  # fmt: skip


@pytest.mark.parametrize("key", NULLABLE)
def test_pythons_none_is_refused_and_null_named(place: Place, no_weights: None, key: str) -> None:
    """A02, for every key that may be null, texts and paths among them."""
    place.write(ROWS)
    for spelling in ("None", "none", ""):
        message = place.refuse(f"{key}={spelling}").err
        assert key in message
        assert "null" in message


@pytest.mark.parametrize(
    ("argument", "wrong", "nearest"),
    [
        ("optimzer.lr=1e-3", "optimzer", "optimizer"),
        ("gradient_acumulation_steps=8", "gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("data.pakcing=true", "pakcing", "data.packing"),
        ("dataset.packed=true", "dataset", "data"),
        ("optimizer.momentun=0.9", "momentun", "momentum"),
        ("schedule.warmup_step=1", "warmup_step", "schedule.warmup_steps"),
        ("checkpoint.keep_lats=1", "keep_lats", "checkpoint.keep_last"),
        ("data.train=[{path: train.jsonl, fromat: alpaca}]", "fromat", "format"),
        ("+lerning_rate=1", "lerning_rate", "optimizer.lr"),
        ("~max_grad_nrom", "max_grad_nrom", "max_grad_norm"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest_key(
    place: Place, no_weights: None, argument: str, wrong: str, nearest: str
) -> None:
    """A03."""
    place.write(ROWS)
    message = place.refuse(argument).err
    assert wrong in message.splitlines()[0]
    assert nearest in message.split(wrong, 1)[1]


@pytest.mark.parametrize(
    ("old", "new", "where", "wrong", "nearest"),
    [
        ("batch_size: 1", "gradient_acumulation_steps: 8", 3, "gradient_acumulation_steps", "gradient_accumulation"),
        ("shuffle: false", "pakced: true", 2, "pakced", "data.packing"),
        ("lr: 0.1", "lr: 0.1, weight_decy: 1", 4, "weight_decy", "weight_decay"),
        ("train: train.jsonl", "train: [{path: train.jsonl, fromat: text}]", 2, "fromat", "format"),
        ("name: constant", "nmae: constant", 6, "nmae", "name"),
        ("device: cpu", "lora: {rank: 4, aplha: 8}", 8, "aplha", "lora.alpha"),
    ],
)
def test_a_misspelt_key_in_yaml_is_refused_with_its_line(
    place: Place, no_weights: None, old: str, new: str, where: int, wrong: str, nearest: str
) -> None:
    """A03, at every depth."""
    place.write(ROWS)
    place.configure(CONFIG.replace(old, new), "wrong.yaml")
    message = place.refuse(config="wrong.yaml", recipe="lora_finetune").err
    assert f"wrong.yaml:{where}" in message.splitlines()[0]
    assert wrong in message.splitlines()[0]
    assert nearest in message.split(wrong, 1)[1]


@pytest.mark.parametrize(
    ("spelling", "modules"),
    [
        ("q_proj", ["q_proj"]),
        ("[q_proj]", ["q_proj"]),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("'[q_proj, v_proj]'", ["q_proj", "v_proj"]),
    ],
)
def test_targets_are_the_layers_named_never_their_letters(place: Place, spelling: str, modules: list[str]) -> None:
    """A04."""
    place.write(ROWS)
    place.configure(f"{CONFIG}lora: {{targets: {spelling}}}\n", "targets.yaml")
    for run in (
        place.train(f"lora.targets={spelling}", recipe="lora_finetune"),
        place.train(recipe="lora_finetune", config="targets.yaml"),
    ):
        saved = json.loads((run.folder / "model/adapter_config.json").read_text(encoding="utf-8"))
        assert sorted(saved["target_modules"]) == modules
        assert {name.split(".")[-3] for name in run.weights} == set(modules)


@pytest.mark.parametrize("value", ["'q_proj,v_proj'", "3", "{a: b}", "[[q_proj]]"])
def test_targets_that_are_no_list_of_names_are_refused(place: Place, value: str) -> None:
    """A04."""
    place.write(ROWS)
    place.configure(f"{CONFIG}lora: {{targets: {value}}}\n", "targets.yaml")
    assert "lora.targets" in place.refuse(recipe="lora_finetune", config="targets.yaml").err


def test_an_unset_variable_is_an_error_with_its_name_and_key_in_every_command(
    place: Place, no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05."""
    place.write(ROWS)
    place.configure(CONFIG.replace("output_dir: out", "output_dir: ${oc.env:RUN_ROOT}/a"))
    monkeypatch.delenv("RUN_ROOT", raising=False)
    message = place.refuse().err
    assert "RUN_ROOT" in message
    assert "output_dir" in message


@pytest.mark.parametrize("value", ["144e16", "007", "6e1234", "x y", "0x1F", "true", "null", "1_0"])
def test_a_folder_is_called_what_the_variable_says(place: Place, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A05."""
    place.write(ROWS[:1])
    monkeypatch.setenv("TAG", value)
    place.configure(CONFIG.replace("output_dir: out", "output_dir: ${oc.env:TAG}"))
    validated = place.call("validate", "full_finetune", "--config", "config.yaml")
    assert validated.code == 0, validated.err
    place.configure(validated.out, "again.yaml")
    assert place.run().code == 0
    assert (place.folder / value / "model/model.safetensors").is_file()
    assert "already holds a run" in place.refuse(config="again.yaml").err
    place.configure(CONFIG.replace("output_dir: out", "output_dir: runs/${oc.env:TAG}-${oc.env:OTHER,b}"))
    assert place.run().code == 0
    assert (place.folder / f"runs/{value}-b/model").is_dir()


def test_an_empty_variable_never_sends_a_run_to_the_root_of_the_disk(
    place: Place, no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05."""
    place.write(ROWS)
    monkeypatch.setenv("RUN_ROOT", "")
    place.configure(CONFIG.replace("output_dir: out", "output_dir: ${oc.env:RUN_ROOT}"))
    assert "output_dir" in place.refuse().err


@pytest.mark.parametrize("spelling", ["~/o1", "$HOME/o1", "${HOME}/o1"])
def test_home_and_variables_expand_and_no_folder_is_called_tilde(
    place: Place, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """A06."""
    place.write(ROWS[:1])
    monkeypatch.setenv("HOME", str(place.folder / "home"))
    spelled = spelling.replace("${", "\\${")
    place.configure(CONFIG.replace("output_dir: out", f"output_dir: {spelled}"))
    assert place.run().code == 0
    assert (place.folder / "home/o1/model").is_dir()
    assert not [path for path in place.folder.iterdir() if path.name[0] in "~$"]


def test_relative_paths_stand_relative_to_the_launch_and_are_shown_absolute(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A06."""
    place.write([turns("ua", "w1", "w2")])
    (place.folder / "below/deep").mkdir(parents=True)
    place.configure(CONFIG.replace("path: m0", "path: ../m0").replace("train: train", "train: ../train"))
    monkeypatch.chdir(place.folder / "below")
    result = place.call("run", "full_finetune", "--config", "../config.yaml")
    assert result.code == 0, result.err
    assert (place.folder / "below/out/model").is_dir()
    for path in ("m0", "below/out", "train.jsonl"):
        assert shows(result.err, place.folder / path)
    monkeypatch.chdir(place.folder / "below/deep")
    refused = place.call("run", "full_finetune", "--config", "../../config.yaml")
    assert refused.code == 2
    assert shows(refused.err, place.folder / "below/m0")
    assert not list(Path.cwd().iterdir())
