"""What README and docs say is true: their commands run, their links lead somewhere, their tables are complete."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [ROOT / "README.md", ROOT / "docs" / "getting_started.md"]
"""Pages whose bash and python blocks are run from first to last; other blocks (text, yaml) are only shown."""


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a clone with its environment active; the fetched model is the tiny one."""
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    for folder in ("bin", "scripts"):
        (tmp_path / folder).mkdir()
    optune = tmp_path / "bin" / "optune"
    optune.write_text(f'#!/bin/sh\nexec "{forked.python()}" -m tune_cli.main "$@"\n')
    fetch = tmp_path / "scripts" / "get_smollm2"
    fetch.write_text("#!/bin/sh\nmkdir -p models && cp -r assets/tiny/model models/SmolLM2-135M-Instruct\n")
    for script in (optune, fetch):
        script.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_commands_of_the_page_run_from_first_to_last(page: Path, clone: Path) -> None:
    commands = blocks(page, "bash")
    assert commands
    done = run(["bash", "-euxo", "pipefail", "-c", "\n".join(commands)], clone)
    assert done.returncode == 0, done.stdout + done.stderr
    for program in blocks(page, "python"):
        done = run([sys.executable, "-c", program], clone)
        assert done.returncode == 0, program + done.stderr
        assert "newly initialized" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_scripts_and_shipped_names_that_pages_speak_of_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = set(re.findall(r"(?<![\w/])scripts/[a-z_0-9]+(?:\.py)?", text))
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    configs = set(re.findall(r"--config ([a-z0-9_]+/[a-z0-9_]+)\b(?!\.)", text))
    assert [config for config in configs if not (ROOT / "configs" / f"{config}.yaml").exists()] == []
    recipes = set(re.findall(r"optune (?:run|validate) ([a-z_]+) ", text))
    assert [recipe for recipe in recipes if not (ROOT / "recipes" / f"{recipe}.py").exists()] == []


def test_command_table_of_the_readme_is_the_command_line() -> None:
    table = re.findall(r"^\| (`optune .*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    documented = {command for row in table for command in re.findall(r"`optune ([\w-]+)", row)}
    modules = {path.stem.replace("_", "-") for path in (ROOT / "tune_cli").glob("*.py")}
    assert documented <= modules, "the table names a command that is not there"
    shown = subprocess.run(
        [sys.executable, "-m", "tune_cli.main", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = set(re.findall(r"^  ([\w-]+)\s", shown, flags=re.M)) & modules
    assert documented == listed


def test_config_keys_are_documented_all_and_only() -> None:
    from optune.config import RunConfig
    from optune.config.sections import (
        CheckpointSection,
        DataSection,
        LoraSection,
        ModelSection,
        ParallelSection,
        ScheduleSection,
    )

    sections = {
        "model": ModelSection,
        "data": DataSection,
        "schedule": ScheduleSection,
        "checkpoint": CheckpointSection,
        "parallel": ParallelSection,
        "lora": LoraSection,
    }
    wanted = {field.name for field in dataclasses.fields(RunConfig)} - sections.keys()
    for section, schema in sections.items():
        wanted |= {f"{section}.{field.name}" for field in dataclasses.fields(schema)}
    text = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z_.]+)`", text, flags=re.M))
    assert documented == wanted
