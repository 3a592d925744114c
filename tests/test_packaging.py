"""The wheel: what it carries, and that its command line works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content where `pip install` would lay it."""
    site = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def optune(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of the wheel, run in `folder`; the path puts it before the checkout."""
    program = (
        "import sys, tune_cli.main as command_line\n"
        f"assert command_line.__file__.startswith({str(installed)!r}), command_line.__file__\n"
        "sys.exit(command_line.main())"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_wheel_ships_every_recipe_and_config_unchanged(wheel: Path) -> None:
    sources = [*(ROOT / "recipes").glob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    assert sources
    with zipfile.ZipFile(wheel) as archive:
        for source in sources:
            assert archive.read(f"optune/_shipped/{source.relative_to(ROOT)}") == source.read_bytes()


def test_wheel_lays_nothing_but_optune_and_its_commands_into_an_environment(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert "Apache License" in archive.read(licences[0]).decode()
    assert {name for name in top if not name.endswith(".dist-info")} == {"optune", "tune_cli"}
    assert "License-Expression: Apache-2.0" in text


def test_wheel_carries_every_module_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = [path for package in ("optune", "tune_cli") for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in modules} <= names


def test_ls_and_cp_work_from_the_wheel_as_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    listed = optune(installed, tmp_path, "ls")
    assert listed.returncode == 0, listed.stderr
    assert "lora_finetune" in listed.stdout
    assert "tiny/full" in listed.stdout
    for name, source in (("full_finetune", "recipes/full_finetune.py"), ("tiny/full", "configs/tiny/full.yaml")):
        destination = tmp_path / Path(source).name
        copied = optune(installed, tmp_path, "cp", name, str(destination))
        assert copied.returncode == 0, copied.stderr
        assert destination.read_bytes() == (ROOT / source).read_bytes()
