"""`to_yaml` gives a file that loads to the same config; what is printed hides secrets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune.config import DataSource, LoraSection, RunConfig, load, option, to_dict, to_yaml
from tests.config.helpers import read, write

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Config(RunConfig):
    text: str = ""
    maybe: str | None = None
    place: str = option("x", is_path=True)
    names: list[str] = option([])
    free: dict[str, Any] = option({})
    lora: LoraSection = option(LoraSection)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.sampled_from(
    ["null", "None", "~", "true", "1e5", "007", "[a, b]", "${x}", "\\${x}", "a\\\\${b}", "$HOME", "$$", "- a", "a: b",
     "# c", "'", '"', "\\", " a ", "\n", "\t", "\ufeff", "\x85", "{a: 1}", "*x", "&x", "!x", "%x", "@x", "`", "no",
     "none"]
)  # fmt: skip
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), children, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    maybe=TEXTS | st.none(),
    place=TEXTS.filter(lambda text: not text.startswith("~")),
    names=st.lists(TEXTS, max_size=3),
    value=VALUES,
)
def test_what_is_written_loads_to_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, text: str, maybe: str | None, place: str, names: list[str], value: Any
) -> None:
    folder = tmp_path_factory.mktemp("emit")
    cfg = read(folder, schema=Config)
    cfg.text, cfg.maybe, cfg.place, cfg.names, cfg.free = text, maybe, place, names, {"value": value}
    again = load(Config, write(folder, to_yaml(cfg), "again.yaml"), [])
    assert again == cfg


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_written_and_loaded_is_the_same(path: Path, tmp_path: Path) -> None:
    cfg = load(Config, path, [])
    once = to_yaml(cfg)
    again = load(Config, write(tmp_path, once), [])
    assert again == cfg
    assert to_yaml(again) == once


def test_sources_and_groups_are_written_as_mappings(tmp_path: Path) -> None:
    text = "parameter_groups: [{match: norm, lr: 0}, {match: bias, weight_decay: 0.0}]\nloggers: []\n"
    cfg = read(tmp_path, text, "data.train=[a.jsonl,{path: b.jsonl, format: text}]")
    again = load(RunConfig, write(tmp_path, to_yaml(cfg), "again.yaml"), [])
    assert again == cfg
    assert again.data.train == ["a.jsonl", DataSource("b.jsonl", "text")]


def test_secrets_are_hidden_where_asked_at_every_depth(tmp_path: Path) -> None:
    cfg = read(tmp_path, schema=Config)
    cfg.free = {
        "api_key": "hunter2",
        "nested": [{"wandbToken": "hunter2", "max_tokens": 5}],
        "password": {"inner": "hunter2"},
        "token": None,
    }
    shown = to_yaml(cfg, hide_secrets=True)
    assert "hunter2" not in shown
    assert "max_tokens: 5" in shown
    assert "token: null" in shown
    assert "hunter2" not in str(to_dict(cfg))
    assert to_dict(cfg)["free"]["nested"][0]["max_tokens"] == 5
    assert to_yaml(cfg).count("hunter2") == 3


def test_numbers_and_truth_values_that_the_schema_declares_are_no_secrets(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Keyed(RunConfig):
        my_key: int = 12345
        use_token: bool = True
        api_key: str = ""

    cfg = read(tmp_path, "api_key: hunter2\n", schema=Keyed)
    cfg.loggers = [{"use_token": False, "password": 12345678}]
    shown = to_yaml(cfg, hide_secrets=True)
    assert "my_key: 12345\nuse_token: true\napi_key: " in shown
    assert "use_token: false" in shown
    assert "hunter2" not in shown
    assert "12345678" not in shown
    assert to_dict(cfg)["my_key"] == 12345
    assert "12345678" not in str(to_dict(cfg))


def test_config_of_a_recipe_names_it_in_the_first_line(tmp_path: Path) -> None:
    from tune_cli.recipes import load_recipe

    recipe = write(tmp_path, "from optune.config import RunConfig as Config\ndef main(cfg): ...\n", "mine.py")
    source = "from dataclasses import dataclass\nfrom optune.config import RunConfig\n"
    recipe.write_text(f"{source}@dataclass\nclass Config(RunConfig): ...\ndef main(cfg): ...\n", encoding="utf-8")
    cfg = read(tmp_path, schema=load_recipe(str(recipe)).schema)
    assert to_yaml(cfg).splitlines()[0] == f"# recipe: {recipe}"
    assert not to_yaml(read(tmp_path)).startswith("#")
