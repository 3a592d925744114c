"""Immediate with the mean over two processes equals one process with the joined rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from optune.errors import ConfigError
from optune.optim.immediate import ImmediateStepper
from tests.optim.immediate_nets import Chain, build


def mean_over_ranks(grad: Tensor) -> Tensor:
    dist.all_reduce(grad)
    return grad.div_(dist.get_world_size())


def train(model: nn.Module, variant: Any, rows: Tensor, labels: Tensor, reduce: Any = None) -> list[float | None]:
    """Three steps of AdamW; the logged norms."""
    stepper = ImmediateStepper(model, build(model, torch.optim.AdamW, lr=0.01), variant=variant, reduce=reduce)
    norms = []
    for step in range(3):
        with stepper.microbatch(True):
            F.cross_entropy(model(rows[step]), labels[step]).backward()
        norms.append(stepper.finish().grad_norm)
    return norms


def train_rank(rank: int, folder: Path, rows: Tensor, labels: Tensor) -> None:
    """One of two processes, with its half of the rows; writes weights and norms."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    mine = slice(4 * rank, 4 * rank + 4)
    for variant in ("local", "exact"):
        model = Chain()
        norms = train(model, variant, rows[:, mine], labels[:, mine], mean_over_ranks)
        torch.save((model.state_dict(), norms), folder / f"{variant}-{rank}.pt")
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        ImmediateStepper(nn.parallel.DistributedDataParallel(model), build(model, lr=0.1))
    sharded = Chain()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match="sharded"):
        ImmediateStepper(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may abort a process that ends in the usual way


@pytest.mark.slow
def test_two_ranks_equal_one_with_the_joined_rows_and_ddp_and_shards_are_refused(tmp_path: Path) -> None:
    rows, labels = torch.randn(3, 8, 5), torch.randint(0, 5, (3, 8))
    torch.multiprocessing.spawn(train_rank, (tmp_path, rows, labels), nprocs=2)
    for variant in ("local", "exact"):
        model = Chain()
        norms = train(model, variant, rows, labels)
        ranks = [torch.load(tmp_path / f"{variant}-{rank}.pt") for rank in range(2)]
        for name, value in model.state_dict().items():
            assert torch.equal(ranks[0][0][name], ranks[1][0][name]), name
            torch.testing.assert_close(ranks[0][0][name], value, rtol=0, atol=1e-6)
        assert ranks[0][1] == pytest.approx(norms, rel=1e-5)
