"""A user's own defaults list composes other files, by Hydra's rules; places and the target rule hold across them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import ConfigProblemsError, RunConfig, load
from optune.errors import ConfigError
from tests.config.helpers import BASE, write


def make(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        write(path.parent, text, path.name)
    return folder / "mine.yaml"


def test_own_keys_win_over_the_files_named_before_self(tmp_path: Path) -> None:
    mine = make(tmp_path, base=BASE + "seed: 1\nepochs: 3\n", mine="defaults: [base, _self_]\nseed: 2\n")
    cfg = load(RunConfig, mine, ["batch_size=7"])
    assert (cfg.seed, cfg.epochs, cfg.batch_size, cfg.model.path) == (2, 3, 7, "m0")
    mine = make(tmp_path, mine="defaults: [_self_, base]\nseed: 2\n")
    assert load(RunConfig, mine, []).seed == 1


def test_config_groups_can_be_chosen(tmp_path: Path) -> None:
    mine = make(
        tmp_path,
        optimizer__sgd="_target_: torch.optim.SGD\nlr: 0.5\n",
        optimizer__adam="_target_: torch.optim.AdamW\nlr: 1e-5\n",
        mine="defaults: [{optimizer: adam}, _self_]\n" + BASE,
    )
    assert load(RunConfig, mine, []).optimizer["lr"] == 1e-5
    assert load(RunConfig, mine, ["optimizer=sgd"]).optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}
    assert load(RunConfig, mine, ["optimizer=sgd", "optimizer.lr=2"]).optimizer["lr"] == 2
    with pytest.raises(ConfigError, match="sgdd"):
        load(RunConfig, mine, ["optimizer=sgdd"])


def test_new_target_in_the_own_file_drops_the_base_files_keywords(tmp_path: Path) -> None:
    base = BASE + "optimizer: {_target_: torch.optim.AdamW, betas: [0.9, 0.95], lr: 1e-5}\n"
    mine = make(tmp_path, base=base, mine="defaults: [base]\noptimizer: {_target_: torch.optim.SGD, lr: 1}\n")
    assert load(RunConfig, mine, []).optimizer == {"_target_": "torch.optim.SGD", "lr": 1.0}


def test_text_in_a_default_file_keeps_its_characters(tmp_path: Path) -> None:
    mine = make(tmp_path, base=BASE + "device: 144e16\n", mine="defaults: [base]\n")
    assert load(RunConfig, mine, []).device == "144e16"


def test_mistakes_are_placed_in_the_file_that_makes_them(tmp_path: Path) -> None:
    mine = make(tmp_path, base=BASE + "sede: 1\n", mine="defaults: [base]\nepcohs: 2\n")
    with pytest.raises(ConfigProblemsError) as caught:
        load(RunConfig, mine, [])
    assert sorted(str(error).rsplit("/", 1)[1] for error in caught.value.errors) == [
        "base.yaml:3: unknown key 'sede'",
        "mine.yaml:2: unknown key 'epcohs'",
    ]


def test_missing_default_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.yaml: the defaults list cannot be followed: .*nope"):
        load(RunConfig, make(tmp_path, mine="defaults: [nope]\n"), [])


@pytest.mark.parametrize("text", ["a: [1\n", "seed: 1\nseed: 2\n", "\ta: 1\n"])
def test_unreadable_default_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"base.yaml:\d"):
        load(RunConfig, make(tmp_path, base=text, mine="defaults: [base]\n"), [])
