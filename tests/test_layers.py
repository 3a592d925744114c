"""The architecture's rules, read from the source: who may import whom, what recipes may not say, how long files get."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "optune").rglob("*.py"))
COMMANDS = sorted((ROOT / "tune_cli").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

BASE = {"errors", "types", "files", "garbage", "hub", "idle_modules", "kernels", "memory", "products", "shards"}
"""What every part of the library may import besides itself."""

ALLOWED = {
    "errors": set[str](),
    "types": set[str](),
    "files": set[str](),
    "garbage": set[str](),
    "hub": set[str](),
    "kernels": {"native"},
    "products": {"kernels", "native"},
    "memory": {"native", "shards"},
    "native": {"files"},
    "idle_modules": set[str](),
    "shards": {"errors", "files"},
    "config": {"errors"},
    "loss": BASE | {"cross_entropy"},
    "passes": BASE | {"loss", "optim"},
    "export": BASE | {"models", "lora"},
    "plan": BASE | {"cross_entropy", "distributed", "lora", "loss", "models", "optim", "train"},
    "run_folder": BASE | {"folder_lock"},
    "resuming": BASE | {"checkpoint", "optim"},
    "session": BASE
    | {
        "checkpoint",
        "distributed",
        "metrics",
        "optim",
        "resuming",
        "run_folder",
        "signals",
        "start_summary",
        "time_limit",
        "train",
    },
    "start_summary": BASE | {"metrics", "optim"},
    "train": BASE | {"loss", "optim", "passes"},
}
"""Parts whose rule is not the peers' own: `train`, `session`, `plan` and `export` stand above them (data, lora …)."""

_LIGHT = {"__init__", "config", "errors"}
LIGHT = [
    *COMMANDS,
    *(path for path in LIBRARY if path.relative_to(ROOT / "optune").parts[0].removesuffix(".py") in _LIGHT),
]
"""Read before the command line answers, so they must not wait for torch."""

HEAVY = {"torch", "transformers", "datasets", "pyarrow", "matplotlib", "tokenizers", "numpy"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path, *, module_level: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module or name) of a file's imports; with `module_level`, of those that run when it is read."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = list(package[: len(package) - child.level + 1]) if child.level else []
                base += child.module.split(".") if child.module else []
                yield from ((child.lineno, ".".join([*base, alias.name])) for alias in child.names)
            is_lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if not (module_level and is_lazy):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")))


def part(dotted: str) -> str | None:
    """`optune.models.decoder` → `models`; None for what is not ours."""
    pieces = dotted.split(".")
    return pieces[1] if pieces[0] == "optune" and len(pieces) > 1 and not pieces[1].startswith("__") else None


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "optune").with_suffix("").parts[0]


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_parts_of_the_library_import_downwards_only(path: Path) -> None:
    own = part_of(path)
    allowed = ALLOWED.get(own, BASE) | {own}
    wrong = [f"{name(path)}:{line}: {what}" for line, what in imports(path) if part(what) and part(what) not in allowed]
    assert not wrong, f"optune.{own} may import {sorted(allowed)} of optune"
    above = [
        f"{name(path)}:{line}: {what}" for line, what in imports(path) if what.split(".")[0] in {"tune_cli", "recipes"}
    ]
    assert not above


@pytest.mark.parametrize("path", COMMANDS, ids=name)
def test_commands_import_only_config_and_errors_when_they_are_read(path: Path) -> None:
    found = [
        (line, what) for line, what in imports(path, module_level=True) if part(what) not in {None, "config", "errors"}
    ]
    assert not found, f"{name(path)}: import the rest inside the function that needs it"


@pytest.mark.parametrize("path", LIGHT, ids=name)
def test_what_the_command_line_reads_first_imports_nothing_heavy(path: Path) -> None:
    heavy = [(line, what) for line, what in imports(path, module_level=True) if what.split(".")[0] in HEAVY]
    assert not heavy, name(path)


def test_reading_the_command_line_and_the_config_schema_imports_no_torch() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in LIGHT]
    program = "import sys\n" + "".join(f"import {module}\n" for module in modules)
    program += f"heavy = {HEAVY!r} & set(sys.modules)\nassert not heavy, heavy\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes_use_public_names_of_optune_alone(path: Path) -> None:
    for line, what in imports(path):
        pieces = what.split(".")
        assert pieces[0] in {"optune", "torch"} | set(sys.stdlib_module_names), f"{name(path)}:{line}: {what}"
        assert not any(piece.startswith("_") and piece != "__future__" for piece in pieces), (
            f"{name(path)}:{line}: {what}"
        )


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes_leave_the_training_step_to_the_library(path: Path) -> None:
    """A recipe that calls these itself is one that can drift in how it scales, clips or steps."""
    text = path.read_text(encoding="utf-8")
    for word in ("backward(", "clip_grad", ".step("):
        assert word not in text, f"{name(path)} says {word}"


def test_lora_recipe_differs_from_the_full_recipe_by_the_adapter_lines_only() -> None:
    full, lora = (
        [line for line in _code(ROOT / "recipes" / f"{recipe}.py") if line.strip()]
        for recipe in ("full_finetune", "lora_finetune")
    )
    changed = [
        line for line in difflib.unified_diff(full, lora, n=0) if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert len(changed) <= 30, "\n".join(changed)


def _code(path: Path) -> list[str]:
    """The lines of a file without the module's docstring, which tells each recipe's own story."""
    text = path.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    assert isinstance(first, ast.Expr), f"{name(path)} has no docstring"
    assert first.end_lineno is not None
    return text.splitlines()[first.end_lineno :]


@pytest.mark.parametrize("path", [*LIBRARY, *COMMANDS, *RECIPES], ids=name)
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, name(path)


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_configs_are_short_and_stand_alone(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60, name(path)
    assert not [line for line in lines if line.startswith("defaults:")], f"{name(path)} leans on other files"


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_shipped_config_loads_against_the_schema_of_the_recipe_that_its_first_line_names(path: Path) -> None:
    from optune import config

    shipped_name = path.relative_to(ROOT / "configs").with_suffix("")
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(rf"# optune run (\w+) --config {shipped_name}", first_line)
    assert match, f"{name(path)}: the first line must be the command that runs it"
    loaded = config.load(_load_recipe(match[1]).Config, path, [])
    assert loaded.output_dir


def _load_recipe(recipe: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"shipped_{recipe}", ROOT / "recipes" / f"{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_there_is_something_to_read() -> None:
    assert LIBRARY
    assert COMMANDS
    assert len(RECIPES) >= 2
    assert len(CONFIGS) >= 8
