"""How the processes of a run share its work: replicas, shards of a replica, and parts of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optune.errors import ConfigError

WHERE = "parallel"


@dataclass(frozen=True)
class Layout:
    """`replicate` copies of the model, each divided among `shard` x `tensor` processes.

    Process `(r x shard + s) x tensor + t` is replica r, shard s, part t. The `tensor` processes of a group see the same
    rows; all others see rows of their own. `keep_whole`: why each process holds undivided parameters, if it does.
    `offload`: parameters, gradients and optimizer state stay in host memory.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    keep_whole: str | None = None
    offload: bool = False

    @property
    def data_size(self) -> int:
        """The number of processes, or tensor groups, that see different rows."""
        return self.replicate * self.shard

    def describe(self) -> str:
        """Such as `4: 2 replicas x 2 shards`."""
        parts = [
            f"{number} {word}"
            for number, word in (
                (self.replicate, "replicas"),
                (self.shard, "shards"),
                (self.tensor, "tensor parts"),
            )
            if number > 1
        ]
        reason = f", because {self.keep_whole}" if self.keep_whole else ""
        return f"{self.data_size * self.tensor}: {' x '.join(parts)}{reason}"


def divide(
    world_size: int,
    *,
    shard: int | Literal["auto"] = "auto",
    replicate: int = 1,
    tensor: int = 1,
    offload: bool = False,
    keep_whole: str | None = None,
) -> Layout:
    """The layout of `world_size` processes; `shard="auto"` is what the others leave.

    `keep_whole`: the reason why parameters cannot be divided, where there is one; all processes are replicas then, and
    nothing can be offloaded.
    Raises `ConfigError` where the numbers do not divide, or where a division is asked for that cannot be.
    """
    if keep_whole is not None:
        _refuse_division(shard, tensor, offload, keep_whole)
        if replicate in (1, world_size):
            return Layout(replicate=world_size, keep_whole=keep_whole)
        shard = 1
    wanted = f"replicate={replicate}, shard={shard}, tensor={tensor}"
    known = replicate * tensor * (1 if shard == "auto" else shard)
    if world_size % known if shard == "auto" else world_size != known:
        relation = "does not divide" if shard == "auto" else "is not"
        raise ConfigError(
            f"{wanted} makes {known}, which {relation} the number of processes, {world_size}",
            where=WHERE,
            hint="start replicate x shard x tensor processes (--nproc-per-node), or leave shard on auto",
        )
    return Layout(replicate, world_size // known if shard == "auto" else shard, tensor, keep_whole, offload)


def _refuse_division(shard: int | Literal["auto"], tensor: int, offload: bool, reason: str) -> None:
    for name, number in (("shard", shard), ("tensor", tensor)):
        if number not in (1, "auto"):
            raise ConfigError(
                f"is {number}, but {reason}",
                where=f"{WHERE}.{name}",
                hint="leave parallel.shard on auto and parallel.tensor on 1 (every process is then a replica), or use "
                "optimizer_step=in_backward",
            )
    if offload:
        raise ConfigError(
            f"is true, but {reason}; offloaded weights come to the device for a block's forward and backward alone",
            where=f"{WHERE}.offload",
            hint="use optimizer_step=in_backward, which steps block by block too",
        )
