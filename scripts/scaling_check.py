"""Runs a step of one rank among up to thousands that are not there, and counts what it holds and what it sends.

torch's fake process group answers every collective at once with nothing, and fake tensors have shapes and no values. So
what is counted is what torch really does for this rank: its shards, its gathers, scatters and sums, and what autograd
keeps, for any number of processes on one machine without memory for the model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from optune import cross_entropy, distributed
from optune.distributed.processes import make_mesh
from optune.loss import linear_cross_entropy_sum
from optune.models.decoder import Decoder, _WithoutInit, outline
from optune.plan import Work

COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}
"""Operators by name: the kind, and which argument is the whole tensor (None: the result)."""


@dataclass
class Counted:
    """Bytes of one rank in one step, and seconds of one core. `sent`: of whole tensors, by (kind, mesh dimension)."""

    weights: int
    gradients: int
    optimizer: int
    kept: int
    sent: dict[tuple[str, str], int]
    build_s: float
    step_s: float


class _Count(TorchDispatchMode):
    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__()
        self.groups = groups
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes here by itself
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            kind, place = COLLECTIVES[name]
            tensor = result if place is None else args[place]
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            self.sent[kind, self.groups[_group_name(args)]] += tensor.numel() * tensor.element_size()
        return result


def _group_name(args: Any) -> str:
    named = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    if named is not None:
        return named
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return torch.distributed.ProcessGroup.unbox(boxed).group_name


class _Kept:
    """Bytes that autograd keeps, each storage once, parameters left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.known = {_storage(parameter) for parameter in model.parameters()}
        self.found: dict[int, tuple[int, Tensor]] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if _storage(local) not in self.known:
            self.found[_storage(local)] = (local.untyped_storage().nbytes(), local)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.found.values())


def _storage(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def count(cases: Sequence[tuple[Any, Work]], layout: distributed.Layout) -> list[Counted]:
    """One step of rank 0 of `layout`, for each (config, work). Once in a process: torch keeps groups by their names."""
    world_size = layout.data_size * layout.tensor
    # On a CPU the loss works in parts that fit into a cache: the same sums, and thousands of calls on fake tensors.
    cross_entropy.PART_ON_CPU = 2**62
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    device = torch.device("cpu")
    processes = distributed.Processes(device, 0, world_size, layout, make_mesh(device, layout))
    return [_count(config, work, processes) for config, work in cases]


def _count(config: Any, work: Work, processes: distributed.Processes) -> Counted:
    dtype, mesh = {2: torch.bfloat16, 4: torch.float32}[work.weight_bytes], processes.mesh
    assert mesh is not None
    groups = {str(mesh[name].get_group().group_name): name for name in ("replicate", "shard", "tensor")}
    started = time.process_time()
    distributed.spread(outline(config).to(dtype), processes)  # as a run builds it
    built = time.process_time()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _WithoutInit(), _default_dtype(dtype):
        model = Decoder(config)
    model.activation_checkpointing = "block" if work.checkpointing else "none"
    # Outside of the mode: a mesh looks up this rank among its real numbers.
    distributed.spread(model, processes)
    stepping = time.process_time()
    with fake:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens_BT = torch.zeros(work.rows, work.length, dtype=torch.long)
        positions_BT = torch.arange(work.length).repeat(work.rows, 1)
        kept, counter = _Kept(model), _Count(groups)
        with counter:
            for _ in range(work.microbatches):
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                    hidden_BTD = model.hidden(tokens_BT, positions_BT)
                hidden_ND = hidden_BTD.flatten(0, 1)  # every token is a target: a mask of them needs values
                linear_cross_entropy_sum(hidden_ND, model.lm_head, tokens_BT.flatten(), None).backward()
        gradients = sum(_local_bytes(parameter.grad) for parameter in model.parameters())
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return Counted(
        weights=sum(map(_local_bytes, model.parameters())),
        gradients=gradients,
        optimizer=sum(map(_local_bytes, states)),
        kept=kept.bytes,
        sent=dict(counter.sent),
        build_s=built - started,
        step_s=time.process_time() - stepping,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Fake parameters cannot be cast in place."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
