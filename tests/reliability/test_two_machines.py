"""Two machines that are network namespaces find each other, end when the line is cut, and go on when it is mended."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests import forked
from tests.recipes.running import ROOT
from tests.test_scripts import load_script

BOUND_S = 60


@pytest.mark.slow
def test_a_cut_line_ends_both_sides_and_the_run_goes_on_as_if_nothing_had_been() -> None:
    if why := load_script("two_machines").are_allowed():
        pytest.skip(f"network namespaces are not allowed here: {why}")
    script = str(ROOT / "scripts/two_machines.py")
    command = [forked.python(), script, "--quick", "--forked", "--steps", "40", "--bound", str(BOUND_S)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    cut = json.loads(done.stdout.splitlines()[-1])["cut"]
    assert cut["codes"] == [1, 1]
    assert cut["said"][0][-2] == "error: machine 1 of 2 has not answered for 20 s"
    assert cut["said"][1][-2] == "error: the machine that holds the rendezvous has not answered for 20 s"
    assert cut["seconds"] < BOUND_S
