"""The GPU check says clearly that there is no GPU, and its checks that need none hold on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.late_copies import LateCopies

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_cuda_it_says_so_and_returns_2(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main() == 2
    assert "no CUDA device here, nothing was checked" in capsys.readouterr().err


def test_its_checks_of_logic_hold_on_the_cpu(script: ModuleType) -> None:
    cpu = torch.device("cpu")
    script.check_policies_are_bitwise(cpu, scale=32)
    script.check_rounding(cpu)
    script.check_gram_norms(cpu)
    script.check_state_is_placed(cpu)
    script.check_offload(cpu, scale=16)
    script.check_packs(cpu)
    script.check_offloaded_activations(cpu, scale=16, copies=LateCopies())
    script.check_quantized_base(cpu)
