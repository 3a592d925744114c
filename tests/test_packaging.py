"""The wheel: what it carries, and that its command line works away from the checkout."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from optune.native import build

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


def has_compiler() -> bool:
    try:
        build._find_compiler()
    except build.NoLibraryError:
        return False
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


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


@pytest.mark.skipif(not has_compiler(), reason="kernels are compiled on x86-64 Linux with a C++ compiler")
def test_wheel_brings_kernels_for_every_level_and_a_machine_without_compiler_uses_its_own(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = {path.name for path in (installed / "optune" / "native" / "built").iterdir()}
    assert names == {*map(build._name_built, build.LEVELS), build.BUILT_BY}
    if build.find_level() not in build.LEVELS:
        return
    program = "from optune import kernels; print(kernels.is_ready(), kernels.describe())"
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": "/nowhere", "OPTUNE_CACHE": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {program}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("True native") and ", by " in done.stdout and not list(tmp_path.iterdir())


class App:
    """Hatchling's, of which a hook needs the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook(app: App) -> Any:
    sys.path.insert(0, str(ROOT))
    try:
        kind = importlib.import_module("hatch_build").KernelsHook
    finally:
        sys.path.remove(str(ROOT))
    return kind(str(ROOT), {}, None, None, "", "wheel", app)


@pytest.mark.skipif(not has_compiler(), reason="kernels are compiled on x86-64 Linux with a C++ compiler")
def test_an_editable_installation_has_the_kernels_of_its_machine_beside_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "old.so").touch()
    data: dict[str, Any] = {"force_include": {}}
    making = hook(App())
    making.initialize("editable", data)
    making.finalize("editable", data, "")
    assert data == {"force_include": {}} and not making.folder.exists()
    names = {path.name for path in (tmp_path / "built").iterdir()}
    assert names == {build._name_built(build.find_level()), build.BUILT_BY}
    assert build.make_kernels()[0].parent == tmp_path / "built"


def test_other_machines_get_a_wheel_without_kernels_and_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    app, data = App(), {"force_include": {}}
    for system, machine in (("darwin", "x86_64"), ("linux", "aarch64")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        making = hook(app)
        making.initialize("standard", data)
        making.finalize("standard", data, "")
    assert data == {"force_include": {}} and not app.warnings


def test_where_nothing_can_be_compiled_the_wheel_goes_without_kernels_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    app, data = App(), {"force_include": {}}
    making = hook(app)
    making.initialize("standard", data)
    making.finalize("standard", data, "")
    assert data == {"force_include": {}} and not making.folder.exists()
    assert len(app.warnings) == 1 and "CXX=/nowhere/c++ not found" in app.warnings[0]
