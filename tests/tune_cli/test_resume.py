"""resume: the recipe and config that a run folder holds, on that folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import RunConfig, load
from tests.tune_cli.conftest import Optune

RUN = ("run", "fake.py", "--config", "c.yaml")


@pytest.fixture
def run_folder(optune: Optune, folder: Path) -> Path:
    assert optune(*RUN, "seed=5", "device=a").code == 0
    (folder / "runs/x/ran-0").unlink()
    return folder / "runs/x"


def read_saved(run_folder: Path) -> dict[str, str]:
    lines = (run_folder / "config.yaml").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith(" "))


def test_resume_runs_the_saved_recipe_and_config_in_the_same_folder(optune: Optune, run_folder: Path) -> None:
    assert optune("resume", "runs/x").code == 0
    saved = read_saved(run_folder)
    assert (saved["resume"], saved["seed"], saved["output_dir"]) == ("auto", "5", "runs/x")
    assert (run_folder / "ran-0").is_file()


def test_resume_takes_overrides(optune: Optune, run_folder: Path) -> None:
    assert optune("resume", "runs/x", "device=b", "epochs=3").code == 0
    assert (run_folder / "ran-0").read_text(encoding="utf-8") == "b"


def test_resume_works_from_elsewhere_and_after_the_folder_moved(
    optune: Optune, run_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = folder / "it's $moved"
    run_folder.rename(moved)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert optune("resume", str(moved)).code == 0
    assert (moved / "ran-0").is_file()
    assert not (folder / "below/runs").exists()


def test_resume_with_a_recipe_that_moved_says_so_and_takes_the_new_place(
    optune: Optune, run_folder: Path, folder: Path
) -> None:
    (folder / "fake.py").rename(folder / "moved.py")
    result = optune("resume", "runs/x")
    assert result.code == 2
    assert str(folder / "fake.py") in result.err
    assert optune("resume", "runs/x", "--recipe", "moved.py").code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "there is no such folder"),
        ("empty", "is not a run folder: it holds no config.yaml"),
        ("c.yaml", "is a file, not a run folder"),
    ],
)
def test_resume_of_no_run_names_the_absolute_path(optune: Optune, folder: Path, name: str, words: str) -> None:
    (folder / "empty").mkdir()
    result = optune("resume", name)
    assert result.code == 2
    assert f"error: {folder / name}: {words}" in result.err


def test_config_without_a_recipe_line_asks_for_it(optune: Optune, run_folder: Path) -> None:
    text = (run_folder / "config.yaml").read_text(encoding="utf-8")
    (run_folder / "config.yaml").write_text(text.split("\n", 1)[1], encoding="utf-8")
    result = optune("resume", "runs/x")
    assert result.code == 2
    assert "--recipe" in result.err


def test_saved_config_runs_again_by_itself(optune: Optune, run_folder: Path, folder: Path) -> None:
    assert optune("run", "fake.py", "--config", "runs/x/config.yaml", "output_dir=runs/y").code == 0
    first, second = (folder / "runs" / name / "config.yaml" for name in "xy")
    changed = [
        (a, b) for a, b in zip(first.read_text().splitlines(), second.read_text().splitlines(), strict=True) if a != b
    ]
    assert changed == [("output_dir: runs/x", "output_dir: runs/y")]


def test_saved_secrets_are_whole_because_the_run_needs_them(optune: Optune, folder: Path) -> None:
    from tune_cli.recipes import load_recipe

    assert optune(*RUN, "api_token=hunter2").code == 0
    schema = load_recipe("fake.py").schema
    assert issubclass(schema, RunConfig)
    assert load(schema, folder / "runs/x/config.yaml", []).api_token == "hunter2"  # type: ignore[attr-defined]
