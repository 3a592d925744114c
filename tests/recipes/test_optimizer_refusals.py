"""An optimizer that cannot work is refused by both recipes before a weight is loaded, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import optune.models  # the module itself, not what stands for it until it is read
from tests.recipes.running import write_inputs
from tune_cli.main import main


@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.capturable=true", "error: optimizer: AdamW fails in a trial step"),
        ("optimizer._target_=torch.optim.SparseAdam", "error: optimizer: SparseAdam fails in a trial step"),
        ("optimizer.amsgrad=maybe", "optimizer.amsgrad must be true or false, not 'maybe'"),
        ("parameter_groups=[{match: nothing}]", "error: parameter_groups.0.match: 'nothing' matches no trained"),
    ],
)
def test_it_is_refused_before_weights_load(
    tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch, recipe: str, setting: str, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(optune.models, "load", refuse)
    config = write_inputs(tmp_path)
    output = f"output_dir={tmp_path}/run"
    assert main(["run", recipe, "--config", str(config), "device=cpu", output, setting]) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
