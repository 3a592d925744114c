"""A run that compiles nothing never imports torch's compiler, and whoever needs it later gets the real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from optune import kernels

ROOT = Path(__file__).resolve().parent.parent
LOADED = "torch._dynamo.convert_frame"

PROGRAM = f"""
import sys, warnings
from pathlib import Path
from tune_cli.main import main

words = ["run", "full_finetune", "--config", "tiny/full", "max_steps=2", "schedule.warmup_steps=0"]
words += ["device=cpu", "data.validation=null"]
assert main([*words, "activation_checkpointing=block", f"output_dir={{sys.argv[1]}}/without"]) == 0
assert {LOADED!r} not in sys.modules and "sympy" not in sys.modules

import inspect, torch
from optune import kernels
if kernels.is_ready():
    assert main([*words, "compile=true", f"output_dir={{sys.argv[1]}}/asked"]) == 0
    assert {LOADED!r} not in sys.modules and "sympy" not in sys.modules
from optune import idle_compiler
assert idle_compiler.is_left_out()
inspect.getmodule(torch)
with warnings.catch_warnings(record=True):
    pass
assert idle_compiler.is_left_out(), "a look at all modules is no need"

import torch._dynamo.convert_frame, torch._dynamo.config as settings
assert not idle_compiler.is_left_out()
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.config is settings
assert torch._dynamo.convert_frame is sys.modules[{LOADED!r}]
assert torch._dynamo.convert_frame.__spec__.origin.endswith("convert_frame.py")
settings.error_on_recompile = True
seen = []
double = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: seen.append(graph) or graph)
assert double(torch.ones(2)).tolist() == [2, 2] and len(seen) == 1

idle_compiler.leave_out()
assert not idle_compiler.is_left_out()
assert main([*words, "activation_checkpointing=block", f"output_dir={{sys.argv[1]}}/with"]) == 0
one, other = (Path(sys.argv[1], name, "model/model.safetensors").read_bytes() for name in ("without", "with"))
assert one == other
assert len(seen) == 1
"""


@pytest.mark.slow
def test_training_imports_no_compiler_and_has_the_same_weights_as_with_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.sub(r"\s+", " ", done.stderr)
    assert said.count(f"compile {kernels.NOTHING_TO_COMPILE}") == int(kernels.is_ready())


def test_a_function_that_was_left_alone_before_is_left_alone_by_the_real_compiler() -> None:
    program = """
import torch
from optune import idle_compiler
idle_compiler.leave_out()

@torch._disable_dynamo
def inner(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1

calls = []
inner(torch.ones(2))
assert idle_compiler.is_left_out()
graphs = []
outer = torch.compile(lambda x: inner(x * 2) * 3, backend=lambda graph, inputs: graphs.append(graph) or graph)
assert outer(torch.ones(2)).tolist() == [9, 9]
assert calls == [False, False] and len(graphs) == 2, (calls, len(graphs))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
