"""Several processes save in the background: what goes wrong in one is known to all, and costs no checkpoint."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optune import checkpoint, files, shards
from optune.errors import OptuneError
from tests.checkpoint import runs
from tests.distributed_ranks import join, run_ranks


class Case:
    """One rank of a run of a small net, its parameters divided by rows."""

    def __init__(self, run_dir: Path, mesh: DeviceMesh, group: Any) -> None:
        self.run_dir, self.group, self.rank = run_dir, group, group.rank()
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        group.barrier().wait()
        self.model = runs.Net()
        for module in list(self.model.modules()):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, leaf, torch.nn.Parameter(part))
        self.optimizer = runs.adamw(self.model)
        self.said: list[str] = []

    def step(self, number: int) -> None:
        for name, parameter in self.model.named_parameters():
            generator = torch.Generator().manual_seed(number)
            gradient = torch.randn(parameter.shape, generator=generator)
            assert isinstance(parameter, DTensor), name
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, [Shard(0)], src_data_rank=None)
        self.optimizer.step()

    def write_model(self, folder: Path, tensors: shards.Tensors) -> None:
        shards.write_file(folder / "model.safetensors", tensors, rank=self.rank)

    def saver(self, **settings: Any) -> checkpoint.Saver:
        return checkpoint.Saver(
            self.run_dir,
            write_model=self.write_model,
            model_tensors=self.model.state_dict(),
            optimizer=self.optimizer,
            named_parameters=self.model.named_parameters(),
            group=self.group,
            say=self.said.append,
            **settings,
        )

    def rehearse(self, run_dir: Path | None = None, saves: int = 3) -> checkpoint.Rehearsal:
        return checkpoint.rehearse(
            run_dir or self.run_dir,
            write_model=lambda folder: self.write_model(folder, self.model.state_dict()),
            optimizer=self.optimizer,
            named_parameters=self.model.named_parameters(),
            saves=saves,
            group=self.group,
        )

    def state(self) -> dict[str, torch.Tensor]:
        tensors = dict(self.model.named_parameters())
        tensors |= {f"{n}/{k}": v for n, p in self.model.named_parameters() for k, v in self.optimizer.state[p].items()}
        return {n: shards.local_values(tensor).clone() for n, tensor in tensors.items()}

    def left(self) -> dict[str, list[str]]:
        return {folder.name: checkpoint.check(folder) for folder in checkpoint.list_checkpoints(self.run_dir)}

    def asides(self) -> list[str]:
        self.group.barrier().wait()  # Rank 0 clears up, the others do not wait for that.
        return [path.name for path in self.run_dir.rglob(f"{files.ASIDE}*")]


def caught(attempt: Callable[[], object]) -> str:
    """The error that all ranks should get, in words."""
    try:
        attempt()
    except OptuneError as error:
        return f"{type(error).__name__}: {error} [{error.hint}]"
    return "no error"


def try_all(folder: str) -> dict[str, Any]:
    """What each rank has seen, for the tests below to judge: they share two processes."""
    join()
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    return {
        each.__name__: each(Case(Path(folder) / each.__name__, mesh, group))
        for each in (in_background, full_disk, not_finite, not_shared, no_memory, low_bit)
    }


def in_background(case: Case) -> dict[str, Any]:
    rehearsal = case.rehearse()
    facts: dict[str, Any] = {"rehearsal": rehearsal.checkpoint_bytes, "after rehearsal": case.asides()}
    case.step(1)
    with case.saver(keep_last=2) as saver:
        saver.reserve()
        for number in (2, 3, 4):
            case.step(number)
            report = saver.save(number, {"note": number})
            before = case.state()
            with torch.no_grad():
                for parameter in case.model.parameters():
                    shards.local_values(parameter).zero_()  # What comes later must not reach the files.
            saver.wait()
            facts["copied"] = report.copied_bytes
            facts["removed"] = [path.name for path in report.removed]
            with torch.no_grad():
                for name, parameter in case.model.named_parameters():
                    shards.local_values(parameter).copy_(before[name])
    facts |= {"left": case.left(), "asides": case.asides(), "found": str(checkpoint.find(case.run_dir))}
    fresh = Case(case.run_dir, next(case.model.parameters()).device_mesh, case.group)  # pyright: ignore
    newest = case.run_dir / "checkpoints" / "step-000004"
    checkpoint.load_optimizer(fresh.optimizer, fresh.model.named_parameters(), newest)
    stored = shards.read_header(newest / "model.safetensors")
    for name, parameter in fresh.model.named_parameters():
        shards.read_part(stored[name], parameter)
    expected, got = case.state(), fresh.state()
    facts["other"] = [name for name in expected if not torch.equal(expected[name], got[name])]
    return facts


@contextmanager
def failing_write(rank: int) -> Iterator[None]:
    """A disk that is full for one rank alone."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch("os.pwrite", refuse if rank == 1 else os.pwrite):
        yield


def full_disk(case: Case) -> dict[str, Any]:
    case.step(1)
    saver = case.saver()
    saver.save(1, {})
    saver.wait()
    case.step(2)
    with failing_write(case.rank):
        saver.save(2, {})
        error = caught(saver.wait)
    facts = {"error": error, "left": case.left(), "asides": case.asides(), "failed": saver.has_failed}
    saver.save(3, {})  # The ranks still understand each other.
    return facts | {"then": str(saver.wait())}


def not_finite(case: Case) -> dict[str, Any]:
    case.step(1)
    saver = case.saver()
    with torch.no_grad():
        if case.rank == 1:
            shards.local_values(case.model.scale)[3] = float("nan")
    return {"error": caught(lambda: saver.save(1, {})), "left": case.left()}


def not_shared(case: Case) -> dict[str, Any]:
    own = case.run_dir / f"of-rank-{case.rank}"
    (own / "checkpoints").mkdir(parents=True)
    with patch("socket.gethostname", lambda: f"host-{case.rank}"), patch("optune.shards.ranks.SHARED_WITHIN_S", 0.2):
        return {"error": caught(lambda: case.rehearse(own)), "asides": case.asides()}


def no_memory(case: Case) -> dict[str, Any]:
    """Each rank's copy fits into what is free, the two together do not."""
    case.step(1)
    saver = case.saver()
    own = sum(tensor.nbytes for tensor in case.state().values())
    with patch.object(psutil, "virtual_memory", lambda: type("Memory", (), {"available": int(own * 1.5)})()):
        rehearsal = case.rehearse()
        saver.save(1, {})
    return {"said": case.said, "copied": saver.reports[-1].copied_bytes, "left": case.left(), "tight": str(rehearsal)}


def low_bit(case: Case) -> dict[str, Any]:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return {}
    weight = case.model.first["proj"].weight
    case.optimizer = AdamW8bit(
        [torch.nn.Parameter(distribute_tensor(torch.zeros(128, 128), weight.device_mesh, [Shard(0)]))]
    )
    return {"before": caught(case.rehearse)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(try_all, 2, str(folder))


Seen = tuple[Path, list[dict[str, Any]]]


@pytest.mark.slow
def test_ranks_save_in_the_background_what_they_held_and_keep_the_newest(seen: Seen) -> None:
    folder, ranks = seen
    for facts in (found["in_background"] for found in ranks):
        assert facts["left"] == {"step-000003": [], "step-000004": []}
        assert facts["asides"] == facts["after rehearsal"] == []
        assert facts["other"] == []
        assert facts["found"] == str(folder / "in_background" / "checkpoints" / "step-000004")
    assert ranks[0]["in_background"]["removed"] == ["step-000002"]
    whole = 64 * 64 + 64 + 64  # values of the net, three times with Adam's state
    assert sum(found["in_background"]["copied"] for found in ranks) == 4 * (3 * whole + 3)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_the_save_of_all_and_costs_no_checkpoint(seen: Seen) -> None:
    folder, ranks = seen
    errors = [found["full_disk"]["error"] for found in ranks]
    assert all("No space left on device" in error and "step-000001" in error for error in errors), errors
    assert errors[0].startswith(f"CheckpointError: rank 1 on {socket.gethostname()}: ")
    for facts in (found["full_disk"] for found in ranks):
        assert facts["left"] == {"step-000001": []}
        assert facts["asides"] == []
        assert facts["then"] == str(folder / "full_disk" / "checkpoints" / "step-000003")


@pytest.mark.slow
def test_one_rank_with_nan_weights_keeps_all_from_saving(seen: Seen) -> None:
    for facts in (found["not_finite"] for found in seen[1]):
        assert "scale (1 values)" in facts["error"], facts
        assert facts["left"] == {}


@pytest.mark.slow
def test_folders_that_are_not_shared_are_refused_with_the_names_of_both_machines(seen: Seen) -> None:
    for facts in (found["not_shared"] for found in seen[1]):
        assert facts["error"].startswith("ConfigError: output_dir: "), facts
        assert "rank 0 on host-0" in facts["error"]
        assert "not seen by rank 1 on host-1" in facts["error"]
        assert facts["asides"] == []


@pytest.mark.slow
def test_copies_of_all_ranks_must_fit_in_memory_together(seen: Seen) -> None:
    for facts in (found["no_memory"] for found in seen[1]):
        assert facts["copied"] == 0
        assert facts["left"] == {"step-000001": []}
        assert "training will wait for saves" in facts["tight"]
    assert ["training waits" in line for line in seen[1][0]["no_memory"]["said"]] == [True]
    assert seen[1][1]["no_memory"]["said"] == []


@pytest.mark.slow
def test_low_bit_state_is_refused_before_the_first_step(seen: Seen) -> None:
    pytest.importorskip("torchao.optim")
    for facts in (found["low_bit"] for found in seen[1]):
        assert facts["before"] == (
            "ConfigError: optimizer: AdamW8bit keeps low-bit state, which is not divided among processes "
            "[use torch.optim.AdamW, or one process]"
        )
