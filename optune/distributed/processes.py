"""The processes of a run, and what they say to each other. Only here is read what a launcher puts into the environment.

Nothing here runs where there is one process: no group, no import of `torch.distributed`'s parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from optune import errors, memory, products
from optune.distributed.devices import find_device
from optune.distributed.layout import Layout, divide
from optune.errors import ConfigError, OptuneError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

FILE_TIMEOUT_S = 3600
"""How long one process waits for another that writes or hashes files: a checkpoint may lie on a slow disk."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Processes:
    """This process's place in the run, and its line to the others. Made by `start`.

    Every method is called by all processes, in the same order. `mesh` has the dimensions `replicate`, `shard` and
    `tensor`; it is None for one process.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None
    local_rank: int = 0
    local_size: int = 1
    """How many processes this machine has."""
    file_group: ProcessGroup | None = None
    """A gloo group of all processes for what writes files beside the training; None for one process."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which rows this process sees: one number a tensor group."""
        return self.rank // self.layout.tensor

    @property
    def data_size(self) -> int:
        """How many processes, or tensor groups, see different rows."""
        return self.layout.data_size

    def describe(self) -> str | None:
        """How several processes share the run, such as `4: 2 replicas x 2 shards`; None for one that shares nothing."""
        text = self.layout.describe() if self.world_size > 1 else "1"
        if self.layout.offload:
            where = "host memory" if self.device.type != "cpu" else "host memory, where a CPU has them anyway"
            return f"{text}; weights, gradients and optimizer state in {where}"
        return text if self.world_size > 1 else None

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters, gradients and optimizer state lie: with offload not where they are computed with."""
        return torch.device("cpu") if self.layout.offload else self.device

    @property
    def parameter_mesh(self) -> DeviceMesh | None:
        """What parameters are spread over; None where each process holds them whole."""
        return None if self.layout.keep_whole else self.mesh

    @property
    def launch_options(self) -> str:
        """What `optune run` and `resume` take to start as many processes, with a space behind; empty for one."""
        if self.world_size == 1:
            return ""
        machines = self.world_size // self.local_size
        return (f"--nnodes {machines} " if machines > 1 else "") + f"--nproc-per-node {self.local_size} "

    @property
    def reduce(self) -> Callable[[Tensor], Tensor] | None:
        """Sums a gradient over all replicas, in place, where parameters are kept whole; else None: sharding does it."""
        return _sum_in_place if self.world_size > 1 and self.layout.keep_whole else None

    def sum(self, numbers: Sequence[float], *, everywhere: int = 0) -> list[float]:
        """The sums over the data ranks, in float64; each tensor group counts once, but for the last `everywhere`
        numbers, which are summed over all processes."""
        if self.world_size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self.rank % self.layout.tensor:
            tensor[: len(numbers) - everywhere] = 0
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, flags: Sequence[int]) -> list[int]:
        """The largest of each flag over all processes."""
        if self.world_size == 1:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.tolist()

    def broadcast(self, value: T) -> T:
        """What rank 0 gave as `value`."""
        if self.world_size == 1:
            return value
        box = [value if self.is_main else None]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]  # pyright: ignore[reportReturnType]

    def barrier(self) -> None:
        """Returns when all processes have come here."""
        self.agree([0])

    def on_main(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `make` returns on rank 0, on all. An `OptuneError` there is raised on all; anything else ends rank 0."""
        if self.world_size == 1:
            return make(*args, **kwargs)
        value: Any = None
        error: OptuneError | None = None
        if self.is_main:
            try:
                value = make(*args, **kwargs)
            except OptuneError as raised:
                error = raised
        sent, value = self.broadcast((None if error is None else _pack(error), value))
        if error is not None:
            raise error
        if sent is not None:
            raise _unpack(sent)
        return value

    def in_turn(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`make` on every process, first on one of each machine: what that one fetches, the others find."""
        if self.world_size == 1:
            return make(*args, **kwargs)
        if self.local_rank:
            self.barrier()
            return make(*args, **kwargs)
        try:
            return make(*args, **kwargs)
        finally:
            self.barrier()


def _computing(device: torch.device, computes: bool) -> AbstractContextManager[None]:
    """Beside a GPU, host memory is what drivers pin and copy from: torch's own."""
    if not computes or device.type != "cpu":
        return nullcontext()
    memory.want()
    return products.native()


@contextmanager
def start(
    device: str = "auto",
    *,
    shard: int | Literal["auto"] = "auto",
    replicate: int = 1,
    tensor: int = 1,
    offload: bool = False,
    timeout_s: int = 600,
    keep_whole: str | None = None,
    computes: bool = True,
) -> Iterator[Processes]:
    """Joins the processes that a launcher started, for as long as the context lasts.

    - `shard`, `replicate`, `tensor`, `offload`: how the model is divided and where it lies, see `Layout`; `keep_whole`:
      why it cannot be divided. Offload is FSDP2's: one process then makes a group of its own.
    - `timeout_s`: how long a process waits for one that does not answer before it ends with an error.
    - `computes`: whether more is done than planning. Large tensors on a CPU will lie in the range of `optune.memory`,
      and their products are made by `optune.products` in the context.

    Raises ConfigError where the device is not there, or where the layout does not fit the number of processes.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = divide(world_size, shard=shard, replicate=replicate, tensor=tensor, offload=offload, keep_whole=keep_whole)
    if world_size == 1 and not offload:
        found = find_device(device)
        with _computing(found, computes):
            yield Processes(found, layout=layout)
        return
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = find_device(device, local_rank, local_size)
    if offload and found.type not in ("cuda", "cpu"):
        raise ConfigError(
            f"is true, and torch's FSDP2, which does it, knows no {found.type}", where="parallel.offload",
            hint="use parallel.offload=false",
        )  # fmt: skip
    with _computing(found, computes):
        if found.type == "cuda":
            torch.cuda.set_device(found)
        # Counts and flags go over gloo also beside GPUs: they must not wait for what is queued there.
        backend = "gloo" if found.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        is_ours = not torch.distributed.is_initialized()  # a program that joined by itself keeps its group
        if is_ours:
            store = _find_store(rank, world_size, timeout)
            torch.distributed.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        try:
            file_timeout = max(timeout, timedelta(seconds=FILE_TIMEOUT_S))
            file_group = None
            if world_size > 1:
                file_group = torch.distributed.new_group(backend="gloo" if is_ours else None, timeout=file_timeout)
            mesh = make_mesh(found, layout, timeout)
            yield Processes(found, rank, world_size, layout, mesh, local_rank, local_size, cast(Any, file_group))
        finally:
            if is_ours:
                torch.distributed.destroy_process_group()


def _find_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Where the processes of this attempt find each other.

    torch's launcher keeps one store for all attempts: after a restart a process that is quick would read there under
    which address another one was reached before it died, and wait for it until `timeout`.
    """
    from torch.distributed import HashStore, PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    if world_size == 1:
        return HashStore()
    attempt = os.environ.get("OPTUNE_LAUNCH_RESTART") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    return PrefixStore(f"optune/attempt-{attempt}", store)


def make_mesh(device: torch.device, layout: Layout, timeout: timedelta | None = None) -> DeviceMesh:
    """The mesh of `layout`, with the dimensions `replicate`, `shard` and `tensor`.

    Each process makes the groups that it is in, and no others: so it takes as long with a thousand as with two.
    """
    from torch.distributed.device_mesh import DeviceMesh

    everybody: Any = torch.distributed.group.WORLD
    ranks = torch.arange(everybody.size()).view(layout.replicate, layout.shard, layout.tensor)
    own = (ranks == torch.distributed.get_rank()).nonzero()[0].tolist()
    groups: list[Any] = []
    for axis in range(ranks.ndim):
        place = tuple(slice(None) if other == axis else index for other, index in enumerate(own))
        members = ranks[place].tolist()
        new = partial(torch.distributed.new_group, members, timeout, use_local_synchronization=True)
        groups.append(everybody if len(members) == everybody.size() else new())
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard", "tensor"))


def _sum_in_place(gradient: Tensor) -> Tensor:
    torch.distributed.all_reduce(gradient)
    return gradient


def _pack(error: OptuneError) -> tuple[str, str, str | None, str | None]:
    return type(error).__name__, str(error), error.where, error.hint


def _unpack(sent: tuple[str, str, str | None, str | None]) -> OptuneError:
    name, text, where, hint = sent
    message = text.removeprefix(f"{where}: ") if where else text
    return getattr(errors, name, OptuneError)(message, where=where, hint=hint)
