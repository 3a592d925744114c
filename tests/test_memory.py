"""Memory of tensors on a CPU: whole, apart from each other, and without holes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import memory
from tests import fixtures, forked

ROOT = Path(__file__).resolve().parents[1]
LEAST = 2**16
"""The smallest tensor that lies in the range, in bytes."""


@pytest.fixture(autouse=True)
def used() -> None:
    if not memory.use():
        pytest.skip("this machine has no C++ compiler")


def run(program: str, **environment: str) -> str:
    command = [forked.python(), "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * LEAST), st.booleans(), st.integers(0, 40)), max_size=80))
def test_tensors_keep_their_values_whatever_is_made_and_freed_beside_them(
    deeds: list[tuple[int, bool, int]],
) -> None:
    memory.keep_apart([torch.empty(size, dtype=torch.uint8) for size in (LEAST, 2 * LEAST)])
    alive: dict[int, torch.Tensor] = {}
    for number, (size, is_kept_apart, freed) in enumerate(deeds):
        tensor = torch.empty(2 * LEAST if is_kept_apart else size, dtype=torch.uint8)
        alive[number] = tensor.fill_(number % 251)
        assert not len(tensor) or tensor.data_ptr() % 64 == 0
        alive.pop(freed, None)
        for each, kept in alive.items():
            assert bool((kept == each % 251).all())


def test_what_is_freed_is_used_again() -> None:
    def churn() -> None:
        kept = [torch.empty(LEAST * (1 + index % 7) + 24 * index, dtype=torch.uint8) for index in range(60)]
        del kept[::2]
        kept += [torch.empty(LEAST * 3 + index, dtype=torch.uint8) for index in range(60)]

    for _ in range(2):
        churn()
    before = memory.measure()
    for _ in range(20):
        churn()
    assert memory.measure() == before


PLACES = """
import torch
from optune import memory
assert memory.use()
MIB = 2**20
def make(mib): return torch.empty(mib * MIB, dtype=torch.uint8)
memory.keep_apart([make(3)])
room = make(40)
below = room.data_ptr()
del room
low, high, next_low, next_high = make(2), make(3), make(2), make(3)
ends = [(each.data_ptr() - below) // MIB for each in (low, next_low, next_high, high)]
assert ends == [0, 2, 33, 37], ends
del low, next_low, high, next_high
whole = make(40)
assert whole.data_ptr() == below
assert memory.measure()[0] < 41 * MIB
"""


def test_what_lives_long_comes_from_above_and_the_rest_from_below() -> None:
    run(PLACES)


STEPS = """
import torch
from optune import loss, memory, models, optim
from optune.types import Microbatch
assert memory.use()
model = models.load({folder!r}, dtype=torch.bfloat16)
optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.AdamW, settings={{"fused": True}})
tokens_BT = torch.arange(4 * 256).view(4, 256) % 500
microbatch = Microbatch(tokens_BT, tokens_BT, torch.arange(256).repeat(4, 1))
for _ in range(3):
    loss.next_token_loss(model, model.hidden(tokens_BT), microbatch).backward()
    optimizer.step()
    optimizer.zero_grad()
extent, most = memory.measure()
print(extent / most, most)
"""


def test_a_training_step_leaves_hardly_a_hole(tmp_path: Path) -> None:
    folder = fixtures.write_model(
        tmp_path, hidden_size=256, intermediate_size=704, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, tokenizer=False, dtype=torch.bfloat16,
    )  # fmt: skip
    ratio, most = map(float, run(STEPS.format(folder=str(folder))).split())
    assert most > 50e6
    assert ratio < 1.02


FORKS = """
import os, threading, torch
from optune import memory
assert memory.use()
torch.set_num_threads(1)  # of a fork OpenMP knows threads that are not there
kept = torch.full((2**18,), 7.0)
is_over = threading.Event()
def churn():
    while not is_over.is_set():
        torch.empty(2**17), torch.empty(2**16)
threads = [threading.Thread(target=churn) for _ in range(2)]
[thread.start() for thread in threads]
for _ in range(30):
    child = os.fork()
    if child == 0:
        own = torch.full((2**18,), 5.0)
        os._exit(0 if float(kept.sum()) == 7 * 2**18 and float(own.sum()) == 5 * 2**18 else 1)
    assert os.waitpid(child, 0)[1] == 0
is_over.set()
[thread.join() for thread in threads]
assert float(kept.sum()) == 7 * 2**18
"""


def test_threads_and_forks_may_make_tensors_at_any_time() -> None:
    run(FORKS)


def test_more_than_there_is_gives_the_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(2**46, dtype=torch.uint8)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


BEGINNING = """
import torch
from optune import memory
MIB = 2**20
memory.begin()
assert memory.measure() == (0, 0), "nobody wants it"
memory.want()
memory.keep_apart([torch.empty(3 * MIB, dtype=torch.uint8)])
assert memory.measure() == (0, 0)
memory.begin()
low, high = torch.empty(5 * MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
del low
parted = torch.empty(3 * MIB, dtype=torch.uint8)  # from above, as was told before
assert 0 < high.data_ptr() - parted.data_ptr() < 4 * MIB and memory.measure()[0] < 7 * MIB
"""


def test_the_range_is_used_from_where_it_is_wanted_on_and_knows_what_was_told_before() -> None:
    run(BEGINNING)


def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    size = 2**26
    tensor = torch.ones(size, dtype=torch.uint8)
    with_it = resident()
    del tensor
    assert resident() > with_it - size / 2
    memory.give_back()
    assert resident() < with_it - size / 2


TOUCH = """
import os, threading, torch
from pathlib import Path
from optune import memory
assert memory.use()
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
kept = torch.full((2**20,), 7.0)
before = resident()
memory.touch_ahead(2**26)
beside = [torch.full((2**18,), 1.0) for _ in range(20)]  # in what is being touched
[each.join() for each in threading.enumerate() if each.name == "optune-memory"]
assert resident() - before > 0.9 * 2**26
assert float(kept.sum()) == 7 * 2**20 and float(sum(beside).sum()) == 20 * 2**18
before = resident()
whole = torch.full((2**23,), 1.0)
assert resident() - before < 2**25
memory.touch_ahead(2**60)  # no machine has so much, and nothing happens
"""


def test_memory_may_be_touched_ahead_while_it_is_used() -> None:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14):
        pytest.skip("this system cannot")
    run(TOUCH)


@pytest.mark.parametrize("environment", [{"OPTUNE_MEMORY": "0"}, {"CXX": "/nowhere/c++"}])
def test_without_it_torch_does_it_alone(environment: dict[str, str]) -> None:
    program = "import torch; from optune import memory; print(memory.use(), memory.measure(), torch.ones(9**6).sum())"
    assert run(program, **environment) == "False (0, 0) tensor(531441.)\n"


CONFIG = """
model: {path: m0, dtype: fp32}
data: {train: rows.jsonl, max_length: 64}
batch_size: 8
max_steps: 3
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-3}
schedule: {name: constant}
device: cpu
"""


@pytest.mark.slow
def test_no_number_of_a_run_depends_on_it(tmp_path: Path) -> None:
    fixtures.write_model(tmp_path / "m0", hidden_size=128, intermediate_size=256)
    fixtures.write_rows(tmp_path / "rows.jsonl", fixtures.numbered_rows(40))
    (tmp_path / "config.yaml").write_text(CONFIG)
    losses = []
    for switch in ("0", "1"):
        words = ["run", "full_finetune", "--config", "config.yaml", f"output_dir={switch}"]
        program = f"import os; os.chdir({str(tmp_path)!r}); from tune_cli.main import main; assert main({words}) == 0"
        run(program, OPTUNE_MEMORY=switch)
        lines = map(json.loads, (tmp_path / switch / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) == 3
