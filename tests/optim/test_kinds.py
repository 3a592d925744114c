"""Telling a sharded tensor and a compiled module without importing their classes."""

import subprocess
import sys

import torch
from torch import nn

from optune.optim.kinds import is_compiled


def test_making_steppers_does_not_import_what_only_sharded_runs_need():
    code = "import sys, optune.optim.build; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_module_compiled_in_place_or_wrapped_is_told_from_a_plain_one():
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert not is_compiled(plain)
    assert is_compiled(in_place)
    assert is_compiled(torch.compile(plain, backend="eager"))
    assert not is_compiled(nn.Sequential(in_place)), "only the module itself counts, not its parts"
