"""ls, cat and cp: what comes with optune, unchanged, and never over a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import shipped
from optune.config.shipped import list_configs, list_recipes
from tests.tune_cli.conftest import Optune

ROOT = Path(__file__).resolve().parents[2]


def test_ls_names_every_recipe_and_config_in_the_checkout(optune: Optune) -> None:
    out = optune("ls").out
    names = [path.stem for path in (ROOT / "recipes").glob("*.py")]
    names += [str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.yaml")]
    assert len(names) > 5
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(names)


def test_cat_prints_the_file_as_it_is(optune: Optune) -> None:
    assert optune("cat", "full_finetune").out == (ROOT / "recipes/full_finetune.py").read_text(encoding="utf-8")
    assert optune("cat", "tiny/full.yaml").out == (ROOT / "configs/tiny/full.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "destination", "written"),
    [
        ("full_finetune", ".", "full_finetune.py"),
        ("full_finetune", "mine.py", "mine.py"),
        ("full_finetune", "mine", "mine.py"),
        ("tiny/full", "new/folder/", "new/folder/full.yaml"),
        ("tiny/full", "new/mine.yaml", "new/mine.yaml"),
        ("smollm2/135m_full", ".", "135m_full.yaml"),
    ],
)
def test_cp_copies_to_a_folder_or_a_name(
    optune: Optune, folder: Path, name: str, destination: str, written: str
) -> None:
    result = optune("cp", name, destination)
    assert result.out == f"{folder / written}\n"
    source = next(item for item in [*list_recipes(), *list_configs()] if item.name == name)
    assert (folder / written).read_bytes() == source.path.read_bytes()


def test_cp_leaves_a_file_that_is_there_unless_forced(optune: Optune, folder: Path) -> None:
    (folder / "mine.py").write_text("precious", encoding="utf-8")
    result = optune("cp", "full_finetune", "mine.py")
    assert result.code == 2
    assert str(folder / "mine.py") in result.err
    assert "--force" in result.err
    assert (folder / "mine.py").read_text(encoding="utf-8") == "precious"
    assert optune("cp", "full_finetune", "mine.py", "--force").code == 0
    assert (folder / "mine.py").read_text(encoding="utf-8") != "precious"


def test_copied_recipe_can_be_loaded_and_names_itself(optune: Optune, folder: Path) -> None:
    from tune_cli.recipes import load_recipe

    optune("cp", "full_finetune", "mine.py")
    recipe = load_recipe("./mine.py")
    assert recipe.schema.__module__ == "optune_recipe_mine"


@pytest.mark.parametrize("command", [("cat",), ("cp",)])
def test_unknown_name_gets_the_nearest_one(optune: Optune, command: tuple[str, ...]) -> None:
    words = ["tiny/ful", *(["."] if command == ("cp",) else [])]
    result = optune(*command, *words)
    assert result.code == 2
    assert "did you mean 'tiny/full'?" in result.err


def test_name_of_a_recipe_and_a_config_asks_for_the_suffix(
    optune: Optune, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, text in (("recipes/both.py", '"""A recipe."""\n'), ("configs/both.yaml", "# a config\n")):
        (folder / place).parent.mkdir()
        (folder / place).write_text(text, encoding="utf-8")
    monkeypatch.setattr(shipped, "shipped_root", lambda: folder)
    result = optune("cat", "both")
    assert result.code == 2
    assert "both.py" in result.err
    assert "both.yaml" in result.err
    assert optune("cat", "both.yaml").out == "# a config\n"


def test_installed_package_reads_what_lies_inside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "optune/_shipped").mkdir(parents=True)
    monkeypatch.setattr(shipped, "PACKAGE", folder / "optune")
    shipped.shipped_root.cache_clear()
    try:
        assert shipped.shipped_root() == folder / "optune/_shipped"
    finally:
        shipped.shipped_root.cache_clear()
