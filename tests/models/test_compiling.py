"""The first compilation on a CPU makes its loops and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optune import kernels, models
from optune.models import compiling
from optune.optim.kinds import is_compiled
from tests import fixtures

PROGRAM = """
import threading, torch
from optune import kernels, models
from optune.models import compiling
from tests import fixtures
compiling.get_ready(torch.ones(1, dtype=torch.float16))
x = torch.randn(64, 64)
torch.testing.assert_close(torch.compile(lambda x: (x * 2).sin() + 1)(x), (x * 2).sin() + 1)
[each.join() for each in threading.enumerate() if each.name == "optune-compiling"]
"""


@pytest.mark.slow
def test_no_trial_of_vectors_and_no_precompiled_header(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [path.read_text() for path in tmp_path.rglob("*.cpp")]
    assert any(" kernel(" in text for text in programs), "the loop itself was not made"
    assert not (tmp_path / "precompiled_headers").exists()
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert not any("__avx_chk_kernel" in text for text in programs)
        assert any("Vectorized<float>" in text for text in programs if " kernel(" in text), "and is not vectorized"


@pytest.mark.parametrize(("compiler", "answer"), [("true", True), ("false", False), ("/nowhere/c++", False)])
def test_a_compiler_that_does_not_know_the_instructions_is_tried_by_torch(
    compiler: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder, cpu_vec_isa

    wanted = "AVX512" if "avx512" in cpu_vec_isa.x86_isa_checker() else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: wanted)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: compiler)
    assert compiling._knows_vectors() is answer
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert compiling._knows_vectors() is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_native_kernels_blocks_stay_as_they_are_and_the_run_says_so(tmp_path: Path, dtype: torch.dtype) -> None:
    if not kernels.is_ready():
        pytest.skip(kernels.describe() or "")
    model = models.load(fixtures.write_model(tmp_path), dtype=dtype)
    model.compile_blocks()
    assert not any(map(is_compiled, model.modules()))
    assert model.compilation == kernels.NOTHING_TO_COMPILE
    model.compile_blocks(backend="eager")  # asked for by name
    assert all(map(is_compiled, model.blocks))


def test_without_them_blocks_are_compiled(tmp_path: Path) -> None:
    with kernels.turned_off():
        model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
        model.compile_blocks()
    assert all(map(is_compiled, model.blocks)) and model.compilation is None


def test_a_backend_of_its_own_sees_the_blocks(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    seen = []
    model.compile_blocks(backend=lambda graph, inputs: seen.append(graph) or graph)
    model(torch.arange(4)[None])
    assert seen
