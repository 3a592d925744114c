"""A save before the first step, so that a run does not die at its first real one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from optune import files, idle_modules, shards
from optune.checkpoint.copying import find_tight_host
from optune.checkpoint.folders import clear_leftovers, list_checkpoints
from optune.checkpoint.manifest import check, count_bytes
from optune.checkpoint.optimizer_state import Parameters, pack_optimizer
from optune.checkpoint.values import WRAPPER_PACKAGE
from optune.checkpoint.writing import aside_name, write_folder
from optune.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PROBE_SHAPE = (128, 128)
"""The state of much smaller parameters has full precision also where an optimizer's is low-bit."""


@dataclass(frozen=True)
class Rehearsal:
    """What a checkpoint will take: bytes of one, bytes of all that stand side by side, bytes free, seconds to write.

    `tight_host` says, for several processes, which machine lacks the memory for all copies that its ranks would take.
    """

    checkpoint_bytes: int
    peak_bytes: int
    free_bytes: int
    write_s: float
    tight_host: str | None = None

    def __str__(self) -> str:
        one, peak, free = map(files.format_bytes, (self.checkpoint_bytes, self.peak_bytes, self.free_bytes))
        tight = f"; training will wait for saves: {self.tight_host}" if self.tight_host else ""
        return f"{one} each, up to {peak} in all, {free} free{tight}"


def rehearse(
    run_dir: Path,
    *,
    write_model: Callable[[Path], None],
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters,
    keep_last: int | None = 2,
    keep_best: bool = False,
    saves: int = 1,
    resume_from: Path | None = None,
    group: ProcessGroup | None = None,
) -> Rehearsal:
    """Write a checkpoint aside, check it, remove it, and compare what the run will need with what the disk has.

    A run must not die at its first save, hours from here. One that goes on from the checkpoint `resume_from` has saved
    before: nothing is written then, and the new ones will be as large as that.

    State that the optimizer makes at its first step is estimated from a step on a small parameter. `saves` is
    how many checkpoints the run will write; the most that stand side by side are `keep_last`, one more while it is
    written, and the best. The result in `model/` shares the last one's weights.

    `group`: a gloo group over all processes, where several save one run; each calls this. What all of them write is
    compared with the disk once, and the copies that all ranks of a machine will hold with that machine's memory.

    Raises `CheckpointError` when a checkpoint cannot be written or the disk is too small, and `ConfigError` where the
    processes do not see the same `run_dir`.
    """
    ranks = shards.Ranks(group)
    parameters = dict(named_parameters)
    _refuse_divided_low_bit(optimizer)
    shards.check_shared(run_dir, ranks)
    if resume_from is not None:
        size, seconds = ranks.lead(lambda: count_bytes(resume_from)), 0.0
    else:
        size, seconds = _try_save(run_dir, write_model, optimizer, parameters, ranks)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    # The last save copies nothing.
    tight_host = None if ranks.is_alone or saves < 2 else _find_tight_host(optimizer, trained, ranks)
    most, free = ranks.lead(lambda: _check_room(run_dir, size, keep_last, keep_best, saves))
    return Rehearsal(size, most * size, free, seconds, tight_host)


def _try_save(
    run_dir: Path,
    write_model: Callable[[Path], None],
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters,
    ranks: shards.Ranks,
) -> tuple[int, float]:
    """The size that a checkpoint will have, and how long this one took."""
    rest, state = pack_optimizer(optimizer, named_parameters)
    start = time.perf_counter()
    aside = run_dir / "checkpoints" / aside_name("rehearsal", ranks)
    faults: list[str] = []
    try:
        ranks.lead(lambda: clear_leftovers(run_dir))
        size = write_folder(aside, 0, write_model, rest, state, {}, ranks)
        # Every byte has been read back once, to be summed up.
        faults = ranks.lead(lambda: check(aside, sums=False))
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"a checkpoint cannot be written there: {error}",
            where=str(aside.parent),
            hint=f"{files.format_bytes(shutil.disk_usage(run_dir).free)} are free; choose another output_dir",
        ) from error
    finally:
        if ranks.is_main:
            shutil.rmtree(aside, ignore_errors=True)
    if faults:
        raise CheckpointError(f"what was written cannot be read back: {'; '.join(faults)}", where=str(aside.parent))
    seconds = time.perf_counter() - start
    return size + estimate_state_bytes(optimizer), seconds


def _find_tight_host(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], ranks: shards.Ranks
) -> str | None:
    """Where the copies of the ranks will not fit in memory together: of the trained `parameters`, and their state."""
    state = pack_optimizer(optimizer, parameters)[1]
    parts = shards.parts_of({f"model/{name}": tensor for name, tensor in parameters.items()} | state, ranks.rank)
    own = sum(part.nbytes for part in parts.values())
    held = sum(tensor.numel() for tensor in parameters.values()) or 1
    written = sum(parts[f"model/{name}"].nbytes // parameters[name].element_size() for name in parameters)
    return find_tight_host(round(own + estimate_state_bytes(optimizer) * written / held), ranks)


def _check_room(run_dir: Path, size: int, keep_last: int | None, keep_best: bool, saves: int) -> tuple[int, int]:
    """How many checkpoints of `size` bytes will stand side by side, and the bytes free; raises where those are few."""
    most = saves if keep_last is None else min(saves, keep_last + 1 + keep_best)
    present = len(list_checkpoints(run_dir))
    # Where old ones are pruned, those that are there already make room for new ones.
    needed = (saves if keep_last is None else max(min(saves, 1), most - present)) * size
    free = shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"the checkpoints need {files.format_bytes(needed)} more ({files.format_bytes(size)} each), "
            f"{files.format_bytes(free)} are free",
            where=str(run_dir.absolute()),
            hint="make room, lower checkpoint.keep_last, or choose another output_dir",
        )
    return most, free


def estimate_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that `optimizer` will make for parameters that have none yet.

    Measured on a copy of each group with one small parameter. Where an optimizer cannot be copied so, two fp32 values
    for each value are assumed, which is what Adam keeps.
    """
    total = 0
    for group in optimizer.param_groups:
        fresh = [parameter for parameter in group["params"] if not optimizer.state.get(parameter)]
        for dtype in {parameter.dtype for parameter in fresh}:
            values = sum(parameter.numel() for parameter in fresh if parameter.dtype == dtype)
            total += round(values * _bytes_per_value(optimizer, group, dtype))
    return total


def _bytes_per_value(optimizer: torch.optim.Optimizer, group: Mapping[str, object], dtype: torch.dtype) -> float:
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype))
    try:
        _, state = pack_optimizer(_step_copy(optimizer, group, probe), {"probe": probe})
    except Exception:  # Any optimizer may come by `_target_`, and this is only an estimate.
        return 8.0
    return sum(tensor.nbytes for name, tensor in state.items() if name.startswith("state.")) / probe.numel()


def _step_copy(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], probe: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings that holds `probe` alone, after a step."""
    probe.grad = torch.zeros_like(probe)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "fused")}
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}
    copy = cast(Any, type(optimizer))([{**settings, "params": [probe]}])
    # torchao's would be compiled, which takes longer than the rehearsal.
    with torch.random.fork_rng(), idle_modules.tried(copy):
        copy.step()
    return copy


def _refuse_divided_low_bit(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` for low-bit state of divided parameters: its blocks depend on where a parameter is cut, so
    no two layouts have the same state. Found before the first step, where there is none yet."""
    if type(optimizer).__module__.partition(".")[0] != WRAPPER_PACKAGE:
        return
    for group in optimizer.param_groups:
        if any(shards.is_sharded(parameter) for parameter in group["params"]):
            probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE))
            state = _step_copy(optimizer, group, probe).state[probe]
            if any(hasattr(value, "__tensor_flatten__") for value in state.values()):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps low-bit state, which is not divided among processes",
                    where="optimizer",
                    hint="use torch.optim.AdamW, or one process",
                )
