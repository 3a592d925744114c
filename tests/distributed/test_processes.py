"""What processes say to each other, in two and four processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optune import distributed
from optune.errors import ConfigError
from tests.distributed_ranks import run_ranks


def refuse(number: int) -> None:
    raise ConfigError(f"{number} is wrong", where="key", hint="another")


def talk() -> dict[str, object]:
    """Everything that a process hears from the others; four processes, two tensor groups."""
    with pytest.raises(ConfigError, match="processes, 4"), distributed.start("cpu", shard=3):
        pass
    assert not torch.distributed.is_initialized()
    with distributed.start("cpu", tensor=2) as processes:
        assert processes.mesh is not None
        heard: dict[str, object] = {
            "place": (processes.rank, processes.data_rank, processes.data_size, processes.is_main),
            "mesh": {name: processes.mesh[name].get_local_rank() for name in ("replicate", "shard", "tensor")},
            "sum": processes.sum([1.0, 10.0**processes.rank, 2.0**53]),
            "agree": processes.agree([processes.rank == 2, 0, processes.rank]),
            "broadcast": processes.broadcast({"from": processes.rank}),
            "on_main": processes.on_main(lambda: processes.rank),
            "in_turn": processes.in_turn(lambda: processes.rank),
        }
        with pytest.raises(ConfigError) as raised:
            processes.on_main(refuse, processes.rank)
        heard["raised"] = (str(raised.value), raised.value.where, raised.value.hint)
    assert not torch.distributed.is_initialized()
    return heard


@pytest.mark.slow
def test_processes_know_their_place_and_hear_the_same() -> None:
    ranks = run_ranks(talk, 4)
    assert [heard["place"] for heard in ranks] == [
        (0, 0, 2, True), (1, 0, 2, False), (2, 1, 2, False), (3, 1, 2, False),
    ]  # fmt: skip
    assert [heard["mesh"] for heard in ranks] == [
        {"replicate": 0, "shard": shard, "tensor": tensor} for shard in range(2) for tensor in range(2)
    ]
    for rank, heard in enumerate(ranks):
        assert heard["sum"] == [2.0, 101.0, 2.0**54]  # ranks 0 and 2: one of each tensor group
        assert heard["agree"] == [1, 0, 3]
        assert heard["broadcast"] == {"from": 0}
        assert heard["on_main"] == 0
        assert heard["in_turn"] == rank
        assert heard["raised"] == ("key: 0 is wrong", "key", "another")


def fail_alone() -> None:
    with distributed.start("cpu") as processes:
        if processes.rank == 1:
            raise ValueError("only here")
        processes.barrier()


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_others_and_is_named() -> None:
    with pytest.raises(AssertionError, match=r"failure-1:[\s\S]*ValueError: only here"):
        run_ranks(fail_alone, 2, timeout_s=60)


def test_one_process_joins_nothing_and_reads_no_part_of_torch_for_it(tmp_path: Path) -> None:
    code = """
import sys
from optune import distributed
with distributed.start("cpu") as processes:
    assert processes.sum([1.5]) == [1.5] and processes.agree([3]) == [3] and processes.broadcast("x") == "x"
    assert processes.on_main(len, "four") == 4 and processes.in_turn(len, "four") == 4
    processes.barrier()
    assert processes.mesh is None and processes.reduce is None and processes.data_size == 1
    parts = [name for name in sys.modules if name.startswith(("torch.distributed.fsdp", "torch.distributed.tensor."))]
    assert not parts, parts
    import torch
    assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_layouts_of_one_process_are_refused_like_any_other() -> None:
    with pytest.raises(ConfigError, match="number of processes, 1"), distributed.start("cpu", replicate=2):
        pass
