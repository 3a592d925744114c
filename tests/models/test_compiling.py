"""The first compilation on a CPU makes its loops and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from optune import kernels, models
from optune.models import compiling
from tests import fixtures

PROGRAM = """
import threading, torch
from optune import kernels, models
from optune.models import compiling
from tests import fixtures
assert compiling.get_ready(torch.ones(1, dtype=torch.float16)) == {}
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


def count(kept: dict[int, int], tensor: torch.Tensor) -> torch.Tensor:
    kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor


@pytest.mark.slow
def test_with_kernels_compiled_blocks_give_the_bits_of_eager_ones_and_no_loop_is_made(tmp_path: Path) -> None:
    if not kernels.is_ready():
        pytest.skip(kernels.describe() or "")
    from torch._inductor import metrics

    folder = fixtures.write_model(tmp_path, head_dim=16)
    tokens_BT = torch.arange(140).view(2, 70) % 75
    made: list[list[torch.Tensor]] = []
    metrics.reset()
    for compiles in (False, True):
        model = models.load(folder, dtype=torch.bfloat16)
        if compiles:
            model.compile_blocks()
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(count, kept), lambda tensor: tensor):
            hidden_BTD = model.hidden(tokens_BT)
        hidden_BTD.float().square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        made.append([hidden_BTD.detach(), *gradients])
    assert metrics.generated_kernel_count == 0 and metrics.ir_nodes_pre_fusion > 0
    for eager, compiled in zip(*made, strict=True):
        assert torch.equal(eager, compiled)
    # What a block keeps: its input and the sum in the middle, q, k, v and attention's output, gate and up.
    config = model.config
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    width = 2 * config.hidden_size + heads * config.head_dim + 2 * config.intermediate_size
    weights = sum(parameter.nbytes for parameter in [*model.blocks.parameters(), model.model.norm.weight])
    outside = tokens_BT.numel() * (8 + 2 * config.hidden_size) + 2 * tokens_BT.shape[1] * 2 * config.head_dim
    assert sum(kept.values()) == weights + outside + tokens_BT.numel() * 2 * config.num_hidden_layers * width


def test_the_code_generator_gets_no_settings_beside_a_backend_of_its_own(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    seen = []
    model.compile_blocks(backend=lambda graph, inputs: seen.append(graph) or graph)
    model(torch.arange(4)[None])
    assert seen
