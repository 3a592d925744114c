"""Sharded by FSDP2 over two processes, in_backward ends bitwise where after_backward ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from optune import optim
from tests.optim.small import SmallModel, make_rows, run

MODES: dict[str, dict[str, Any]] = {
    "standard": {"when": "after_backward"},
    "in_backward": {"when": "in_backward"},
    "standard, clipped": {"when": "after_backward", "max_grad_norm": 0.01},
    "hold": {"when": "in_backward", "max_grad_norm": 0.01, "stash": "hold"},
    "cpu": {"when": "in_backward", "max_grad_norm": 0.01, "stash": "cpu"},
    "two_pass": {"when": "in_backward", "max_grad_norm": 0.01, "stash": "two_pass"},
}


def train_sharded(mode: dict[str, Any], rank: int, tied: bool, checkpointing: str) -> tuple[list[torch.Tensor], Any]:
    model = SmallModel(blocks=2, tied=tied, dropout=0.1)
    model.activation_checkpointing = checkpointing
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-2, "weight_decay": 0.1}
    )
    stepper = optim.build_stepper(model, optimizer, **mode)
    schedule = optim.build_schedule(name="cosine", total_steps=3, warmup_steps=1)
    rows = [[tokens.roll(rank, 1) for tokens in step] for step in make_rows(3, [2], length=8)]
    _, stats = run(model, stepper, rows, before_step=lambda step: optim.set_learning_rate(optimizer, schedule, step))
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    sharded: list[Any] = [*model.parameters(), *(value for state in states for value in state.values())]
    return [getattr(tensor, "full_tensor", lambda t=tensor: t)().detach().clone() for tensor in sharded], stats


def work(rank: int, store: str, tied: bool, checkpointing: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    outcomes = {name: train_sharded(mode, rank, tied, checkpointing) for name, mode in MODES.items()}
    for name, reference in (
        ("in_backward", "standard"),
        ("hold", "standard, clipped"),
        ("cpu", "standard, clipped"),
        ("two_pass", "standard, clipped"),
    ):
        (got, got_stats), (expected, stats) = outcomes[name], outcomes[reference]
        assert got_stats == stats, name
        assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True)), name
    norms = torch.tensor([entry.grad_norm for entry in outcomes["hold"][1]])
    everywhere = [torch.empty_like(norms) for _ in range(2)]
    torch.distributed.all_gather(everywhere, norms)
    assert torch.equal(*everywhere)
    torch.distributed.destroy_process_group()
    os._exit(0)  # torch's threads may abort a process that ends in the usual way


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "checkpointing"), [(False, "none"), (True, "block")])
def test_sharded_in_backward_is_bitwise_the_sharded_standard_step(
    tied: bool, checkpointing: str, tmp_path: Path
) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path / "store"), tied, checkpointing), nprocs=2)
