"""Sharded steps below the recipe: memory, gradients that are not finite, compiled blocks, stages called one by one."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optune import distributed, models, optim, train
from optune.distributed import Processes
from optune.errors import ConfigError
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch
from tests import fixtures, forked
from tests.distributed_ranks import join, run_ranks

IN_BACKWARD: dict[str, Any] = {"when": "in_backward", "stash": "hold", "max_grad_norm": 0.5}


def make_microbatch(step: int, rank: int, size: int) -> Microbatch:
    """This rank's part of eight rows."""
    tokens = torch.randint(6, 60, (8, 12), generator=torch.Generator().manual_seed(step))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORE
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    positions = torch.arange(12).expand(8, 12)
    return Microbatch(tokens[mine], labels[mine], positions[mine], num_tokens=12 * 8 // size)


def build(folder: Path, processes: Processes, mode: dict[str, Any], **settings: Any) -> tuple[Any, Any, Any]:
    config = models.check(folder)
    model = models.outline(config)
    distributed.spread(model, processes)
    models.fill(model, folder, device="cpu")
    if settings.pop("compiled", False):
        model.compile_blocks(backend="aot_eager")
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.1, "momentum": 0.9}
    )
    return model, optimizer, optim.build_stepper(model, optimizer, **mode)


def step(model: Any, stepper: Any, processes: Processes, number: int, **settings: Any) -> train.StepResult:
    microbatch = make_microbatch(number, processes.data_rank, processes.data_size)
    return train.train_step(
        model, next_token_loss, stepper, [microbatch], seed=0, step=number, rank=processes.data_rank,
        sum_over_ranks=processes.sum, **settings,
    )  # fmt: skip


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}


def measure_held(folder: Path, processes: Processes) -> int:
    """Bytes of parameters, gradients and optimizer state after a step, by the storages that are alive."""
    model, optimizer, stepper = build(folder, processes, {"when": "after_backward"})
    step(model, stepper, processes, 0)
    microbatch = make_microbatch(1, processes.data_rank, processes.data_size)
    hidden = model.hidden(microbatch.tokens_BT, microbatch.positions_BT)
    (next_token_loss(model, hidden, microbatch) / 100).backward()
    del hidden
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in tensors if tensor is not None]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local}.values())


def work(folder: Path, poisoned: Path) -> dict[str, Any]:
    join()
    found: dict[str, Any] = {}
    with distributed.start("cpu") as processes:
        for factory, keys in ((torch.optim.AdamW, {}), (torch.optim.SGD, {})):
            optim.try_optimizer(models.outline(models.check(folder)), factory, keys, mesh=processes.parameter_mesh)
        with pytest.raises(ConfigError, match="SGD fails in a trial step"):
            outline = models.outline(models.check(folder))
            optim.try_optimizer(outline, torch.optim.SGD, {"fused": True}, mesh=processes.parameter_mesh)
        found["held"] = measure_held(folder, processes)
        for name, compiled in (("plain", False), ("compiled", True)):
            model, _, stepper = build(folder, processes, IN_BACKWARD, compiled=compiled)
            results = [step(model, stepper, processes, number) for number in range(2)]
            found[name] = ([result.loss for result in results], whole(model))

        # One row of one rank meets the poisoned word.
        model, _, stepper = build(poisoned, processes, {**IN_BACKWARD, "max_skipped_steps": 2})
        before = whole(model)
        result = step(model, stepper, processes, 0)
        after = whole(model)
        found["skipped"] = (
            result.skipped,
            all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before),
        )
        with pytest.raises(train.TrainingError, match="2 steps in a row"):
            step(model, stepper, processes, 0)

        # Validation between two steps gathers the root and must not leave it stale.
        model, _, stepper = build(folder, processes, IN_BACKWARD)
        step(model, stepper, processes, 0)
        rows = [make_microbatch(9, processes.data_rank, processes.data_size)]
        found["validation"] = [train.evaluate(model, next_token_loss, rows, sum_over_ranks=processes.sum)]
        step(model, stepper, processes, 1)
        found["validation"] += [train.evaluate(model, next_token_loss, rows, sum_over_ranks=processes.sum)]
        found["validated"] = whole(model)
    return found


@pytest.mark.slow
def test_two_shards_hold_half_skip_together_compile_and_validate(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 512}
    folder = fixtures.write_model(tmp_path / "model", **shape)
    poisoned = fixtures.write_model(tmp_path / "poisoned")
    theirs, ours = (set(make_microbatch(0, rank, 2).tokens_BT[:, :-1].flatten().tolist()) for rank in range(2))
    tensors = load_file(poisoned / "model.safetensors")
    tensors["model.embed_tokens.weight"][min(ours - theirs)] = math.nan
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    ranks = run_ranks(work, 2, folder, poisoned)
    with distributed.start("cpu") as alone:
        held = measure_held(folder, alone)
        model, _, stepper = build(folder, alone, IN_BACKWARD)
        results = [step(model, stepper, alone, number) for number in range(2)]
        rows = [make_microbatch(9, 0, 1)]
        expected = train.evaluate(model, next_token_loss, rows)
    for found in ranks:
        assert found["held"] <= 0.55 * held
        assert found["skipped"] == (True, True)
        assert found["plain"][0] == pytest.approx([result.loss for result in results], rel=1e-6)
        assert found["compiled"][0] == pytest.approx(found["plain"][0], rel=1e-5)
        assert found["validation"][1] == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(found["validated"][n], t) for n, t in found["plain"][1].items())


WORLD = """
import cProfile, os, pstats, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.testing._internal.distributed.fake_pg import FakeStore
from optune import distributed
from tests.distributed.test_sharded_steps import IN_BACKWARD, build, make_microbatch, next_token_loss, train
counts = []
for world in (8, 16, 64):  # the first one imports
    os.environ.update(WORLD_SIZE=str(world), RANK="0")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    profile = cProfile.Profile()
    profile.enable()
    with distributed.start("cpu") as processes:
        model, _, stepper = build(Path(sys.argv[1]), processes, {**IN_BACKWARD, "max_skipped_steps": 9})
        for number in range(2):
            train.train_step(
                model, next_token_loss, stepper, [make_microbatch(number, 0, 8)], seed=0, step=number,
                sum_over_ranks=processes.sum,
            )
    profile.disable()
    dist.destroy_process_group()
    counts.append(sum(entry[1] for entry in pstats.Stats(profile).stats.values()))
print(*counts[1:])
"""


@pytest.mark.slow
def test_building_and_stepping_do_not_grow_with_the_number_of_processes(tmp_path: Path) -> None:
    """Counted in Python calls of one rank, with torch's fake process group: 64 processes against 16."""
    folder = fixtures.write_model(tmp_path / "model")
    command = [forked.python(), "-c", WORLD, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    few, many = map(int, done.stdout.split())
    assert many <= 1.1 * few
