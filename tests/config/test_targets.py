"""`_target_`: only allowed packages, nothing imported for others, keywords checked, the old target's ones dropped."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optune.config import RunConfig, load, resolve_target, to_yaml
from optune.errors import ConfigError
from tests.config.helpers import BASE, read, refuse, say, write


def test_replacing_a_target_drops_the_keywords_of_the_old_one(tmp_path: Path) -> None:
    text = "optimizer: {_target_: torch.optim.AdamW, lr: 1e-4, betas: [0.9, 0.95], weight_decay: 0.1}\n"
    cfg = read(tmp_path, text, "optimizer._target_=torch.optim.SGD")
    assert cfg.optimizer == {"_target_": "torch.optim.SGD", "lr": 1e-3}  # torch's own default, made visible


@pytest.mark.parametrize("order", [1, -1])
def test_keywords_beside_a_new_target_stay_in_either_order(tmp_path: Path, order: int) -> None:
    arguments = ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.5", "optimizer.momentum=0.9"][::order]
    cfg = read(tmp_path, "optimizer: {betas: [0.9, 0.95]}\n", *arguments)
    assert cfg.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9}


def test_naming_the_same_target_again_drops_nothing(tmp_path: Path) -> None:
    cfg = read(tmp_path, "optimizer: {lr: 1e-4}\n", "optimizer._target_=torch.optim.AdamW")
    assert cfg.optimizer == {"_target_": "torch.optim.AdamW", "lr": 1e-4, "weight_decay": 0.0}


def test_coming_back_to_the_default_target_brings_its_defaults_back(tmp_path: Path) -> None:
    cfg = read(
        tmp_path,
        "optimizer: {_target_: torch.optim.SGD, lr: 1, momentum: 0.9}\n",
        "optimizer._target_=torch.optim.AdamW",
    )
    assert cfg.optimizer == {"_target_": "torch.optim.AdamW", "lr": 2e-5, "weight_decay": 0.0}
    (tmp_path / "saved.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    assert load(RunConfig, tmp_path / "saved.yaml") == cfg


def test_yaml_with_another_target_than_the_default_starts_afresh(tmp_path: Path) -> None:
    assert read(tmp_path, "optimizer: {_target_: torch.optim.SGD, lr: 1}\n").optimizer == {
        "_target_": "torch.optim.SGD",
        "lr": 1.0,
    }


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (
            "optimizer: {lrr: 1e-4}\n",
            ":3",
            "torch.optim.AdamW does not take 'optimizer.lrr' | did you mean 'optimizer.lr'?",
        ),
        ("optimizer: {_target_: torch.optim.AdmaW}\n", ":3", "did you mean torch.optim.AdamW?"),
        ("optimizer: {_target_: torch.optim.Optimizer}\n", ":3", "is not an optimizer"),
        ("optimizer: {_target_: torch.optim.lr_scheduler.StepLR}\n", ":3", "is not an optimizer"),
        ("optimizer: {_target_: torch.optim}\n", ":3", "is not a class or a function"),
        ("optimizer: {_target_: AdamW}\n", ":3", "must be a dotted name"),
        ("optimizer: {_target_: torchao.optim.Adam9bit}\n", ":3", "does not exist"),
        ("optimizer: {_target_: torch.optim.AdamW, lr: 1, _args_: [1]}\n", ":3", "_args_"),
        ("\n\noptimizer:\n  lr: 1\n  bteas: [0, 1]\n", ":7", "did you mean 'optimizer.betas'?"),
        ("optimizer: {_target_: torch.optim.AdamW, lr: 1}\n~optimizer._target_: 1\n", ":4", "unknown key"),
        ("loggers: [{_target_: optune.metrics.TensorBoard}, {project: x}]\n", ":3", "loggers[1]._target_ is missing"),
        ("loggers: [{_target_: optune.metrics.RunLog}]\n", ":3", "is not a logger"),
        ("loggers: [{_target_: optune.metrics.TensorBoard, dir: x}]\n", ":3", "did you mean 'loggers[0].log_dir'?"),
        ("schedule: {_target_: torch.optim.AdamW}\n", ":3", "is not a learning-rate scheduler"),
        ("schedule: {_target_: torch.optim.lr_scheduler.StepLR}\n", ":3", "needs schedule.step_size"),
        ("parameter_groups: [{lr: 0}]\n", ":3", "parameter_groups[0].match is missing"),
        ("parameter_groups:\n  - {match: '*', lrr: 0}\n", ":4", "did you mean 'parameter_groups[0].lr'?"),
    ],
)
def test_wrong_target_or_keyword_is_refused_with_its_line(tmp_path: Path, text: str, where: str, words: str) -> None:
    (error,) = refuse(tmp_path, text)
    assert error.where is not None
    assert error.where.endswith(f"c.yaml{where}")
    assert words in say(error)


def test_keyword_from_an_override_is_named_with_the_argument(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "", "optimizer.betaz=[0.9,0.95]")
    assert error.where == "optimizer.betaz=[0.9,0.95]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas must be a list of two numbers, not [0.9]"),
        ("optimizer: {betas: 0.5}\n", "optimizer.betas must be a list of two numbers, not 0.5"),
        ("optimizer: {betas: [0.9, a]}\n", "optimizer.betas must be a list of two numbers, not [0.9, 'a']"),
        ("optimizer: {amsgrad: maybe}\n", "optimizer.amsgrad must be true or false, not 'maybe'"),
        ("optimizer: {amsgrad: 1}\n", "optimizer.amsgrad must be true or false, not 1"),
        ("optimizer: {foreach: no}\n", "optimizer.foreach must be true or false or null, not 'no' | write false"),
        ("optimizer: {_target_: torch.optim.SGD, dampening: x}\n", "optimizer.dampening must be a number, not 'x'"),
        ("optimizer: {_target_: torch.optim.SGD, dampening: null}\n", "optimizer.dampening must be a number, not null"),
        ("optimizer: {_target_: torchao.optim.AdamW8bit, betas: [1]}\n", "optimizer.betas must be a list of two"),
        ("optimizer: {_target_: torchao.optim.AdamW8bit, amsgrad: x}\n", "optimizer.amsgrad must be true or false"),
        ("parameter_groups: [{match: '*', betas: [0.9]}]\n", "parameter_groups[0].betas must be a list of two numbers"),
        (
            "schedule: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 30.0}\n",
            "schedule.step_size must be a whole number, not 30.0 | write 30",
        ),
        ("loggers: [{_target_: optune.metrics.WandB, name: 7}]\n", "loggers[0].name must be a text or null, not 7"),
        ("loggers: [{_target_: optune.metrics.WandB, tags: a}]\n", "loggers[0].tags must be a list or null, not 'a'"),
    ],
)
def test_keyword_of_the_wrong_kind_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (error,) = refuse(tmp_path, text)
    assert words in say(error)
    assert str(error.where).endswith("c.yaml:3")


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {_target_: torch.optim.Adafactor, eps: [null, 1e-3], d: 1}\n",
        "optimizer: {fused: null, foreach: true, betas: [0, 0.5], lr: 1, amsgrad: false}\n",
        "optimizer: {_target_: torchao.optim.AdamW8bit, betas: [0.9, 0.99], block_size: 128}\n",
        "schedule: {_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: [1e-4], total_steps: 10}\n",
        "schedule: {_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [3, 5]}\n",
        "loggers: [{_target_: optune.metrics.WandB, tags: [a], name: null}]\n",
    ],
)
def test_keyword_of_the_right_kind_is_taken(tmp_path: Path, text: str) -> None:
    read(tmp_path, text)


@pytest.mark.parametrize(
    "dotted",
    [
        "os.system",
        "subprocess.run",
        "torch.load",
        "torch.hub.load",
        "optune.config.resolve_target",
        "builtins.eval",
        "torch.optimizer.X",
        "torch.optim.adamw.__builtins__.eval",
    ],
)
def test_target_outside_the_allowed_packages_is_refused(tmp_path: Path, dotted: str) -> None:
    for section in ("optimizer", "schedule", "loggers"):
        (error,) = refuse(tmp_path, f"{section}: {{_target_: {dotted}}}\n")
        assert f"{section}" in str(error)
        assert dotted in str(error)


@pytest.mark.parametrize(
    "dotted",
    [
        "torch.optim.optimizer.torch.load",
        "torch.optim.optimizer.functools.partial",
        "torch.optim.optimizer.cast",
        "wandb.util.os.system",
    ],
)
def test_name_that_leaves_an_allowed_package_on_the_way_is_refused(dotted: str) -> None:
    with pytest.raises(ConfigError, match=r"leads out|does not exist"):
        resolve_target(dotted)


def test_disallowed_target_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "open('imported', 'w')\ndef go(): pass\n", "stranger.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (error,) = refuse(tmp_path, "loggers: [{_target_: stranger.go}]\n")
    assert "--allow-target stranger" in say(error)
    assert not (tmp_path / "imported").exists()
    assert "stranger" not in sys.modules


def test_allowed_package_from_the_command_line_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\nclass Mine(torch.optim.SGD):\n    def __init__(self, params, lr=0.1, extra=0): ...\n"
    write(tmp_path, source, "my_optimizers.py")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    text = "optimizer: {_target_: my_optimizers.Mine, extra: 2}\n"
    refuse(tmp_path, text)
    cfg = load(RunConfig, write(tmp_path, BASE + text), [], allow_targets=["my_optimizers"])
    assert cfg.optimizer == {"_target_": "my_optimizers.Mine", "extra": 2, "lr": 0.1}
    assert resolve_target(cfg.optimizer["_target_"]).__name__ == "Mine"
    with pytest.raises(ConfigError, match="outside the allowed packages"):
        resolve_target("my_optimizers.Mine")


@pytest.mark.parametrize("dotted", ["torch.optim.AdamW", "torch.optim.adamw.AdamW", "torchao.optim.AdamW8bit"])
def test_resolved_target_is_the_class(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    expected: Any = getattr(importlib.import_module(module), name)
    assert resolve_target(dotted) is expected


def test_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "optimizer: {_target_: bitsandbytes.optim.Adam8bit}\n")
    assert "no module named 'bitsandbytes'" in str(error)
    assert error.hint == "pip install bitsandbytes"


def test_config_that_is_wrong_otherwise_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "batch_size: x\noptimizer: {_target_: os.system}\n")
    program = (
        "import sys\nfrom optune.config import RunConfig, load\n"
        f"try:\n    load(RunConfig, {str(path)!r}, ['seed=1'])\n"
        "except Exception as error:\n    print(error)\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "batch_size" in done.stdout
