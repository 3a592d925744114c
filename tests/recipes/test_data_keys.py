"""The keys of the data section reach the batches, in every recipe, and a second start finds the rows of the first."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from optune import config, data, models
from optune.data import cache_key, loading
from tests import fixtures

RECIPES = ("full_finetune", "lora_finetune")


def load_recipe(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"data_keys_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = fixtures.write_model(tmp_path / "m0")
    rows = fixtures.write_rows(tmp_path / "rows.jsonl", fixtures.numbered_rows(40))
    (tmp_path / "config.yaml").write_text(f"model: {{path: {source}}}\ndata: {{train: {rows}, validation: {rows}}}\n")

    def make(name: str, *overrides: str) -> tuple[data.Batches, data.ValidationBatches]:
        recipe = load_recipe(name)
        cfg = config.load(recipe.Config, tmp_path / "config.yaml", list(overrides))
        _, batches, validation = recipe.make_batches(cfg, source, models.check(source))
        return batches, validation

    return make


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouping_and_padding_reach_the_batches(make: Any, recipe: str) -> None:
    batches, validation = make(recipe, "data.group_by_length=true", "data.pad_to_multiple=24", "data.cache=null")
    plain, _ = make(recipe, "data.cache=null")
    assert batches.group_by_length
    assert not plain.group_by_length
    assert batches.fingerprint() != plain.fingerprint()
    widths = [microbatch.tokens_BT.shape[1] for microbatch in [*batches.microbatches(0), *validation]]
    assert {width % 24 for width in widths} == {0}
    assert plain.microbatches(0)[0].tokens_BT.shape[1] % 24


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_start_finds_the_rows_of_the_first_and_says_the_same(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr(cache_key, "SMALLEST", 0)
    folder = f"data.cache={tmp_path / 'kept'}"
    cold, _ = make(recipe, folder)
    monkeypatch.setattr(loading, "encode_sources", lambda *_: pytest.fail("the rows were made again"))
    warm, _ = make(recipe, folder)
    assert isinstance(warm.rows.tokens.base, np.memmap)
    assert warm.fingerprint() == cold.fingerprint()
    assert warm.describe() == cold.describe()


def test_how_full_the_packs_are_is_told_at_the_start(make: Any) -> None:
    packed, _ = make(RECIPES[0], "data.packing=true", "data.max_length=64")
    assert 0.8 < packed.fill <= 1
    assert f"{packed.fill:.1%} full" in packed.describe()["packs"]
