"""Cases A01 to A07 and the list of bad inputs, through the command line and the shipped recipes."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import fixtures
from tests.tune_cli.conftest import Optune

CONFIG = """\
model: {path: m0, dtype: fp32}
data: {train: a.jsonl, shuffle: false}
batch_size: 2
schedule: {name: constant}
output_dir: out
device: cpu
"""
FULL = ("run", "full_finetune", "--config", "c.yaml")
LORA = ("run", "lora_finetune", "--config", "c.yaml")


@pytest.fixture
def workspace(folder: Path) -> Path:
    """M0, six rows and a config, in the current directory."""
    fixtures.write_model(folder / "m0")
    fixtures.write_rows(folder / "a.jsonl", fixtures.numbered_rows(6))
    (folder / "c.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def rates(folder: Path) -> set[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["lr"] for entry in map(json.loads, lines) if "lr" in entry}


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.slow
def test_a01_every_spelling_of_a_rate_trains_the_same(optune: Optune, workspace: Path) -> None:
    (workspace / "y.yaml").write_text(CONFIG + "optimizer: {lr: 1e-5}\n", encoding="utf-8")
    assert optune("run", "full_finetune", "--config", "y.yaml", "output_dir=yaml").code == 0
    for index, spelling in enumerate(("1e-5", "1E-5", ".00001")):
        result = optune(*FULL, f"optimizer.lr={spelling}", f"output_dir=o{index}")
        assert result.code == 0, result.err
        assert rates(workspace / f"o{index}") == {1e-5}
        assert_same_weights(workspace / f"o{index}", workspace / "yaml")
    moved = (weights(workspace / "yaml")[name] - tensor for name, tensor in load_file("m0/model.safetensors").items())
    assert max(float(difference.abs().max()) for difference in moved) > 0


@pytest.mark.slow
def test_a02_null_is_off_in_every_spelling_and_pythons_is_refused(optune: Optune, workspace: Path) -> None:
    (workspace / "y.yaml").write_text(CONFIG + "max_grad_norm:\n", encoding="utf-8")
    assert optune("run", "full_finetune", "--config", "y.yaml", "output_dir=yaml").code == 0
    for index, spelling in enumerate(("null", "~")):
        assert optune(*FULL, f"max_grad_norm={spelling}", f"output_dir=o{index}").code == 0
        assert "max_grad_norm: null\n" in (workspace / f"o{index}/config.yaml").read_text(encoding="utf-8")
        assert_same_weights(workspace / f"o{index}", workspace / "yaml")
    for spelling in ("None", "none", ""):
        result = optune(*FULL, f"max_grad_norm={spelling}")
        assert result.code == 2
        assert "max_grad_norm" in result.err
        assert "null" in result.err


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        ("optimzer.lr=1e-3", "optimizer"),
        ("gradient_acumulation_steps=8", "gradient_accumulation_steps"),
        ("data.pakced=true", "data.packing"),
        ("optimizer.weight_decy=1", "optimizer.weight_decay"),
    ],
)
def test_a03_misspelt_key_is_refused_and_nothing_is_written(
    optune: Optune, workspace: Path, argument: str, suggestion: str
) -> None:
    result = optune(*FULL, argument)
    assert result.code == 2
    assert argument.split("=")[0].split(".")[-1] in result.err
    assert f"did you mean '{suggestion}'?" in result.err
    assert not (workspace / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "modules"),
    [
        ("q_proj", ["q_proj"]),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("'[q_proj, v_proj]'", ["q_proj", "v_proj"]),
    ],
)
def test_a04_targets_are_the_modules_that_were_named(
    optune: Optune, workspace: Path, value: str, modules: list[str]
) -> None:
    (workspace / "y.yaml").write_text(CONFIG + f"lora: {{targets: {value}}}\n", encoding="utf-8")
    assert optune(*LORA, f"lora.targets={value}", "output_dir=cli").code == 0
    assert optune("run", "lora_finetune", "--config", "y.yaml", "output_dir=yaml").code == 0
    for run in ("cli", "yaml"):
        saved = json.loads((workspace / run / "model/adapter_config.json").read_text(encoding="utf-8"))
        assert sorted(saved["target_modules"]) == modules


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["144e16", "007", "x y"])
def test_a05_folder_is_called_what_the_variable_says(
    optune: Optune, workspace: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    (workspace / "c.yaml").write_text(CONFIG.replace("output_dir: out", "output_dir: ${oc.env:TAG}"), encoding="utf-8")
    monkeypatch.setenv("TAG", tag)
    assert optune(*FULL).code == 0
    assert (workspace / tag / "model/model.safetensors").is_file()


def test_a07_data_file_that_is_not_there_is_looked_up_on_disk_alone(optune: Optune, workspace: Path) -> None:
    began = time.monotonic()
    result = optune(*FULL, "data.train=data/trian.jsonl")
    assert time.monotonic() - began < 10
    assert result.code == 2
    assert str(workspace / "data/trian.jsonl") in result.err


def test_a07_local_run_makes_no_network_call(optune: Optune, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"the network was called: {arguments[1:]}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    result = optune(*FULL)
    assert result.code == 0, result.err


BAD_INPUTS = {
    "unknown recipe": (("full_finetun", "--config", "c.yaml"), "unknown recipe 'full_finetun'"),
    "unknown key": (("full_finetune", "--config", "c.yaml", "data.trian=x"), "unknown key 'data.trian'"),
    "wrong type": (("full_finetune", "--config", "c.yaml", "batch_size=two"), "batch_size must be a whole number"),
    "missing config": (("full_finetune", "--config", "d.yaml"), "{folder}/d.yaml: there is no such config file"),
    "missing data": (("full_finetune", "--config", "c.yaml", "data.train=b.jsonl"), "{folder}/b.jsonl"),
    "missing model": (("full_finetune", "--config", "c.yaml", "model.path=./m1"), "{folder}/m1"),
    "hub id without network": (("full_finetune", "--config", "c.yaml", "model.path=owner/name"), "owner/name"),
    "unreadable yaml": (("full_finetune", "--config", "broken.yaml"), "broken.yaml:2: cannot be read as YAML"),
    "another run in the folder": (("full_finetune", "--config", "c.yaml", "output_dir=used"), "already holds a run"),
    "target outside": (
        ("full_finetune", "--config", "c.yaml", "optimizer._target_=os.system"),
        "outside the allowed packages",
    ),
    "template that raises": (
        ("full_finetune", "--config", "c.yaml", "data.chat_template=raises.jinja"),
        "only users may speak",
    ),
    "device that is not there": (("full_finetune", "--config", "c.yaml", "device=cuda:7"), "'cuda:7' is not there"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_clear_error_before_weights_load(
    optune: Optune, workspace: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from optune import models

    def load(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(models, "load", load)
    (workspace / "broken.yaml").write_text("seed: 1\nmodel: path: m0\n", encoding="utf-8")
    (workspace / "raises.jinja").write_text("{{ raise_exception('only users may speak') }}", encoding="utf-8")
    (workspace / "used").mkdir()
    (workspace / "used/metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    before = sorted(workspace.rglob("*"))
    words, message = BAD_INPUTS[name]
    result = optune("run", *words)
    assert result.code == 2, result.err
    assert message.format(folder=workspace) in result.err
    assert result.err.startswith("error: ")
    assert result.err.count("error: ") == 1
    assert "Traceback" not in result.err
    assert [
        path for path in sorted(workspace.rglob("*")) if path not in before and "__pycache__" not in str(path)
    ] == []
