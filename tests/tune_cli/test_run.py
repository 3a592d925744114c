"""run and validate: what they load, what they refuse before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tune_cli.conftest import CONFIG, Optune
from tune_cli.run import start_making_kernels

RUN = ("run", "fake.py", "--config", "c.yaml")
VALIDATE = ("validate", "fake.py", "--config", "c.yaml")


def ran(folder: Path, name: str = "runs/x") -> bool:
    return (folder / name / "ran-0").is_file()


def test_run_trains_with_the_config_and_its_overrides(optune: Optune, folder: Path) -> None:
    assert optune("run", "device=cpu", *RUN[1:], "seed=1").code == 2  # RECIPE comes first among the words
    result = optune(*RUN, "device=cpu", "output_dir=runs/y")
    assert (result.code, result.out) == (0, "")
    assert (folder / "runs/y/ran-0").read_text(encoding="utf-8") == "cpu"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "./fake.py", "device=d", "--config", "c.yaml"),
        ("run", "--config", "c.yaml", "fake.py", "device=d"),
        ("run", "--config=c.yaml", "fake.py", "device=d"),
    ],
)
def test_options_and_overrides_may_be_mixed(optune: Optune, folder: Path, words: tuple[str, ...]) -> None:
    assert optune(*words).code == 0
    assert (folder / "runs/x/ran-0").read_text(encoding="utf-8") == "d"


def test_wrong_config_is_refused_with_everything_and_nothing_is_written(optune: Optune, folder: Path) -> None:
    (folder / "c.yaml").write_text(CONFIG + "gradient_acumulation_steps: 8\nbatch_size: four\n", encoding="utf-8")
    for command in (RUN, VALIDATE):
        result = optune(*command, "optimzer.lr=1e-3")
        assert result.code == 2
        assert "error: c.yaml:4: unknown key 'gradient_acumulation_steps'\n" in result.err
        assert "hint: did you mean 'gradient_accumulation_steps'?\n" in result.err
        assert "error: c.yaml:5: batch_size must be a whole number of at least 1, not 'four'\n" in result.err
        assert "error: optimzer.lr=1e-3: unknown key 'optimzer'\n" in result.err
        assert result.err.count("error: ") == 3
    assert not (folder / "runs").exists()


def test_validate_prints_the_resolved_config_and_writes_nothing(optune: Optune, folder: Path) -> None:
    result = optune(*VALIDATE, "device=007", "api_token=hunter2", "max_grad_norm=null")
    assert result.code == 0
    assert result.out.startswith(f"# recipe: {folder / 'fake.py'}\nmodel:\n  path: m0\n")
    assert 'device: "007"\n' in result.out
    assert "max_grad_norm: null\n" in result.out
    assert "hunter2" not in result.out + result.err
    assert not (folder / "runs").exists()


def test_what_validate_prints_is_a_config_that_says_the_same(optune: Optune, folder: Path) -> None:
    first = optune(*VALIDATE, "optimizer.betas=[0.8,0.9]", "seed=3").out
    (folder / "again.yaml").write_text(first, encoding="utf-8")
    assert optune("validate", "fake.py", "--config", "again.yaml").out == first


def test_validate_reports_what_the_recipe_finds(optune: Optune) -> None:
    result = optune(*VALIDATE, "behaviour=model")
    assert (result.code, result.out, result.err) == (2, "", "error: /m0: no weights\n")


@pytest.mark.parametrize("value", ["x y", "007", "144e16"])
def test_validate_and_run_agree_on_variables(
    optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    (folder / "c.yaml").write_text(CONFIG.replace("runs/x", "${oc.env:RUN_ROOT}/a"), encoding="utf-8")
    monkeypatch.delenv("RUN_ROOT", raising=False)
    for command in (RUN, VALIDATE):
        result = optune(*command)
        assert result.code == 2
        assert "output_dir needs the environment variable RUN_ROOT, which is not set" in result.err
    monkeypatch.setenv("RUN_ROOT", value)
    assert f"{value}/a" in optune(*VALIDATE).out
    assert optune(*RUN).code == 0
    assert ran(folder, f"{value}/a")


def test_home_expands_and_no_folder_is_called_tilde(
    optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "home").mkdir()
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert optune(*RUN, "output_dir=~/o1").code == 0
    assert ran(folder, "home/o1")
    assert optune(*RUN, "output_dir=$HOME/o2").code == 0
    assert ran(folder, "home/o2")
    assert not (folder / "~").exists()


def test_relative_paths_stand_relative_to_the_current_directory(
    optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert optune("run", "../fake.py", "--config", "../c.yaml").code == 0
    assert ran(folder, "below/runs/x")


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("full_finetun", "--config", "c.yaml"), "unknown recipe 'full_finetun'", "did you mean 'full_finetune'?"),
        (("fake", "--config", "c.yaml"), "unknown recipe 'fake'", "for the file write fake.py"),
        (("c.yaml", "--config", "c.yaml"), "unknown recipe 'c.yaml'", "'c.yaml' is a config"),
        (("fake.py", "--config", "tiny/ful"), "unknown config 'tiny/ful'", "did you mean 'tiny/full'?"),
        (("fake.py", "--config", "c"), "unknown config 'c'", "for the file write c.yaml"),
        (("fake.py", "--config", "full_finetune"), "unknown config 'full_finetune'", "'full_finetune' is a recipe"),
        (
            ("faek.py", "--config", "c.yaml"),
            "{folder}/faek.py: there is no such recipe file",
            "did you mean 'fake.py'?",
        ),
        (
            ("fake.py", "--config", "cc.yaml"),
            "{folder}/cc.yaml: there is no such config file",
            "did you mean 'c.yaml'?",
        ),
    ],
)
def test_recipe_or_config_that_is_not_there(
    optune: Optune, folder: Path, words: tuple[str, ...], error: str, hint: str
) -> None:
    result = optune("run", *words)
    assert result.code == 2
    first, second = result.err.splitlines()
    assert first.startswith("error: " + error.format(folder=folder))
    assert second.startswith("hint: " + hint)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = 1\ndef f(:\n", "{path}:2: cannot be read: invalid syntax: 'def f(:'"),
        ("x = 1\nimport no_such_thing\n", "{path}:2: the recipe cannot be imported: ModuleNotFoundError"),
        ("x = 1\n\nraise ValueError('odd')\n", "{path}:3: the recipe cannot be imported: ValueError: odd"),
        ("def main(cfg): ...\n", "{path}: is not a recipe: it has not a dataclass `Config`"),
        ("class Config: ...\n", "{path}: is not a recipe: it has not a dataclass `Config` and not a function"),
    ],
)
def test_broken_recipe_is_one_cause_with_its_line(optune: Optune, folder: Path, source: str, error: str) -> None:
    (folder / "mine.py").write_text(source, encoding="utf-8")
    result = optune("run", "mine.py", "--config", "c.yaml")
    assert result.code == 2
    assert result.err.splitlines()[0].startswith("error: " + error.format(path=folder / "mine.py"))
    assert "Traceback" not in result.err


def test_recipe_may_import_its_neighbours_but_they_hide_no_package(optune: Optune, folder: Path) -> None:
    (folder / "neighbour.py").write_text("VALUE = 5\n", encoding="utf-8")
    (folder / "json.py").write_text("raise RuntimeError('hides the real one')\n", encoding="utf-8")
    source = (folder / "fake.py").read_text(encoding="utf-8")
    (folder / "mine.py").write_text(f"import json\nfrom neighbour import VALUE\n{source}", encoding="utf-8")
    assert optune("run", "mine.py", "--config", "c.yaml").code == 0


def test_recipe_that_declares_what_a_config_cannot_hold_says_so(optune: Optune, folder: Path) -> None:
    source = (
        (folder / "fake.py")
        .read_text(encoding="utf-8")
        .replace("behaviour: str", "odd: set[int] = None\n    behaviour: str")
    )
    (folder / "mine.py").write_text(source, encoding="utf-8")
    result = optune("run", "mine.py", "--config", "c.yaml", "odd=1")
    assert result.code == 2
    assert "odd is declared as set[int]" in result.err


def test_target_needs_the_flag_on_the_command_line(optune: Optune, folder: Path) -> None:
    (folder / "my_opt.py").write_text("import torch\nclass Mine(torch.optim.SGD): ...\n", encoding="utf-8")
    sys.path.append(str(folder))
    refused = optune(*RUN, "optimizer._target_=my_opt.Mine")
    assert refused.code == 2
    assert "--allow-target my_opt" in refused.err
    assert optune(*RUN, "optimizer._target_=my_opt.Mine", "--allow-target", "my_opt").code == 0


def test_allow_target_is_no_key_of_a_config(optune: Optune, folder: Path) -> None:
    (folder / "c.yaml").write_text(CONFIG + "allow_targets: [os]\n", encoding="utf-8")
    assert "unknown key 'allow_targets'" in optune(*RUN).err


@pytest.mark.parametrize("spelling", ["1e-5", "1E-5", ".00001"])
def test_rate_is_the_same_number_in_every_spelling(optune: Optune, spelling: str) -> None:
    assert "lr: 1e-05\n" in optune(*VALIDATE, f"optimizer.lr={spelling}").out


@pytest.mark.parametrize(
    ("text", "words", "is_useful"),
    [
        ("device: cuda:1  # the second\n", [], False),
        ("device: cuda\n", ["+device='cpu'"], True),
        ("seed: 1\n", ["seed=2", "device=cuda"], False),
        ("seed: 1\n", ["model.device=cuda"], True),
        ("defaults: [base]\ndevice: cuda\n", [], True),
        ("device: ${oc.env:DEVICE}\n", [], True),
        ("device: auto\n", [], True),
        ("seed: 1\n", ["device=cuda:0,cpu"], True),
    ],
)
def test_native_libraries_are_not_made_where_no_cpu_is_trained_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], is_useful: bool
) -> None:
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started: list[bool] = []
    monkeypatch.setattr("optune.native.start_making", lambda: started.append(True))
    start_making_kernels(str(folder / "c.yaml"), words)
    assert started == [True] * is_useful
