"""A run that compiles nothing never imports torch's compiler, and whoever needs it later gets the real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optune import kernels

ROOT = Path(__file__).resolve().parent.parent
LOADED = "torch._dynamo.convert_frame"


def run(*words: str) -> str:
    """What a Python of its own says on stderr; it ends well."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stderr


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
from optune import idle_modules
assert idle_modules.is_left_out(idle_modules.COMPILER)
inspect.getmodule(torch)
with warnings.catch_warnings(record=True):
    pass
assert idle_modules.is_left_out(idle_modules.COMPILER), "a look at all modules is no need"

import torch._dynamo.convert_frame, torch._dynamo.config as settings
assert not idle_modules.is_left_out(idle_modules.COMPILER)
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.config is settings
assert torch._dynamo.convert_frame is sys.modules[{LOADED!r}]
assert torch._dynamo.replay is torch._dynamo.convert_frame.replay, "its code ran once"
assert torch._dynamo.convert_frame.__spec__.origin.endswith("convert_frame.py")
settings.error_on_recompile = True
seen = []
double = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: seen.append(graph) or graph)
assert double(torch.ones(2)).tolist() == [2, 2] and len(seen) == 1

idle_modules.leave_out_compiler()
assert not idle_modules.is_left_out(idle_modules.COMPILER)
assert main([*words, "activation_checkpointing=block", f"output_dir={{sys.argv[1]}}/with"]) == 0
one, other = (Path(sys.argv[1], name, "model/model.safetensors").read_bytes() for name in ("without", "with"))
assert one == other
assert len(seen) == 1
"""


@pytest.mark.slow
def test_training_imports_no_compiler_and_has_the_same_weights_as_with_one(tmp_path: Path) -> None:
    said = re.sub(r"\s+", " ", run("-W", "error", "-c", PROGRAM, str(tmp_path)))
    assert said.count(f"compile {kernels.NOTHING_TO_COMPILE}") == int(kernels.is_ready())


def test_a_function_that_was_left_alone_before_is_left_alone_by_the_real_compiler() -> None:
    program = """
import torch
from optune import idle_modules
idle_modules.leave_out_compiler()

@torch._disable_dynamo
def inner(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1

calls = []
inner(torch.ones(2))
assert idle_modules.is_left_out(idle_modules.COMPILER)
graphs = []
outer = torch.compile(lambda x: inner(x * 2) * 3, backend=lambda graph, inputs: graphs.append(graph) or graph)
assert outer(torch.ones(2)).tolist() == [9, 9]
assert calls == [False, False] and len(graphs) == 2, (calls, len(graphs))
"""
    run("-c", program)


RULES_PROGRAM = """
import os, sys, traceback
sys.modules["matplotlib"] = None  # a plot takes longer than the run
from optune import idle_modules
from optune.idle_modules import RULES

idle_modules.leave_out_rules()
import torch

assert idle_modules.is_left_out(RULES)
product = torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")
assert product.shape == (2, 4) and idle_modules.is_left_out(RULES), "what is written in C++ needs no rules"


def ask_for_one():
    torch._meta_registrations.meta_index_Tensor  # as a forecast does

def import_what_stands_on_them():
    from torch._decomp import decomposition_table
    assert torch.ops.aten.silu.default in decomposition_table

def import_below_it():
    import torch._prims.rng_prims as found
    assert found.__spec__.origin.endswith("rng_prims.py")

def begin_a_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        assert torch.linalg.qr(torch.ones(3, 2))[0].shape == (3, 2)
    assert not hasattr(FakeTensorMode.__init__, "__wrapped__")

def compile():
    import warnings
    warnings.simplefilter("ignore")
    assert torch.compile(lambda x: x.cumsum(0), backend="aot_eager")(torch.ones(2)).tolist() == [1, 2]

def train(recipe, config, optimizer_step, *settings):
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from tune_cli.main import main
    seen = []
    register_optimizer_step_post_hook(lambda *_: seen.append(idle_modules.is_left_out(RULES)))
    words = ["run", recipe, "--config", config, "max_steps=2", "schedule.warmup_steps=0", "device=cpu",
             f"optimizer_step={optimizer_step}", *settings]
    out = os.path.join(sys.argv[1], f"{recipe}{len(settings)}")
    assert main([*words, f"output_dir={out}"]) == 0
    assert len(seen) > 2 and all(seen) == (optimizer_step != "immediate"), seen
    torch._meta_registrations.meta_index_Tensor  # as a forecast does

def train_all():
    train("full_finetune", "tiny/full", "after_backward", "activation_checkpointing=block",
          "model.dtype=bf16", "model.update_rounding=stochastic")

def train_masters():
    train("full_finetune", "tiny/full", "immediate", "max_grad_norm=null",
          "data.validation=null", "model.dtype=bf16", "model.master_weights=fp32")

def train_adapters():
    train("lora_finetune", "tiny/lora", "in_backward", "lora.quantize_base=nf4")


for case in (ask_for_one, import_what_stands_on_them, import_below_it, begin_a_mode, compile,
             train_all, train_masters, train_adapters):
    child = os.fork()
    if not child:
        code = 1
        try:
            case()
            assert not idle_modules.is_left_out(RULES)
            assert torch._meta_registrations is sys.modules[RULES] and len(vars(torch._meta_registrations)) > 300
            assert torch.linalg.qr(torch.empty(3, 2, device="meta"))[0].shape == (3, 2)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, case.__name__

before = torch._meta_registrations
idle_modules.leave_out_rules()
assert torch._meta_registrations is before, "torch is there already"
"""


@pytest.mark.slow
def test_the_rules_of_shapes_come_when_somebody_needs_them_and_training_does_not(tmp_path: Path) -> None:
    run("-W", "error", "-c", RULES_PROGRAM, str(tmp_path))


def test_a_torch_that_cannot_be_imported_is_told_as_ever(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: not for this machine')")
    words = ["full_finetune", "--config", "tiny/full"]
    done = subprocess.run(
        [sys.executable, "-m", "tune_cli.main", "run", *words],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr and "ImportError: libtorch.so: not for this machine" in done.stderr
    assert "Traceback" not in done.stderr
