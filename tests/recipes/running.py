"""Runs a recipe through the command line and reads back what it wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import fixtures
from tune_cli.main import main

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if not path.stem.startswith("_"))
"""Every recipe is picked up here without being listed."""


@dataclass(frozen=True)
class Finished:
    """A run folder, read."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [line for line in self._lines() if "loss" in line]

    @property
    def validation_losses(self) -> list[float]:
        return [line["validation_loss"] for line in self._lines() if "validation_loss" in line]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").iterdir())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The trained tensors of the result, adapters or whole model."""
        return read_tensors(self.folder / "model")

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoints[-1] / "optune" / "optimizer.safetensors")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_inputs(folder: Path, rows: int = 12, **model: Any) -> Path:
    """M0, `rows` chats and a config; the path of the config."""
    fixtures.write_model(folder / "m0", **model)
    fixtures.write_rows(folder / "train.jsonl", fixtures.numbered_rows(rows))
    config = folder / "config.yaml"
    config.write_text(
        f"""
model: {{path: {folder / "m0"}, dtype: fp32}}
data: {{train: {folder / "train.jsonl"}, max_length: 64}}
batch_size: 2
epochs: 2
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1}}
schedule: {{name: cosine, warmup_steps: 2}}
seed: 3
device: cpu
"""
    )
    return config


def run(recipe: str, config: Path, output: Path, *overrides: str) -> Finished:
    """Runs `recipe` in this process; fails when it does not end with exit code 0."""
    code = main(["run", recipe, "--config", str(config), f"output_dir={output}", *overrides])
    assert code == 0, f"exit code {code}"
    return Finished(output)


def assert_equal_runs(first: Finished, second: Finished, relative: float = 0.0) -> None:
    """Weights, optimizer state and losses are equal: bitwise, or to `relative` of each tensor's largest element."""
    for kind in ("weights", "optimizer_state"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            if relative == 0.0:
                assert torch.equal(tensor, theirs[name]), f"{kind}: {name} differs"
            else:
                scale = theirs[name].double().abs().max().item() or 1.0
                difference = (tensor.double() - theirs[name].double()).abs().max().item()
                assert difference <= relative * scale, f"{kind}: {name} differs by {difference / scale:.1e}"
    assert len(first.losses) == len(second.losses)
    for step, (ours, theirs) in enumerate(zip(first.losses, second.losses, strict=True), 1):
        assert abs(ours - theirs) <= relative * abs(theirs), f"loss of step {step}: {ours} and {theirs}"
