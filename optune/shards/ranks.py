"""How the ranks that save together speak to each other, also from a thread: over a group that nothing else uses."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from optune import files
from optune.errors import CheckpointError, ConfigError, OptuneError, list_few

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

SHARED_WITHIN_S = 10.0
"""How long a network file system may take to show one machine what another has written."""


class Ranks:
    """The ranks of `group`, a gloo group over all processes; without a group this process alone.

    All ranks call the same methods in the same order, from one thread at a time. Where a rank is gone, or does not
    answer within the group's timeout, the others get `CheckpointError`.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank has given, by rank. `value` is plain data, as JSON knows it."""
        if self._group is None or self.is_alone:
            return [value]
        data = json.dumps(value).encode()
        try:
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            torch.distributed.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
            longest = max(int(length) for length in lengths)
            own = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            torch.distributed.all_gather(texts, own, group=self._group)
        except RuntimeError as error:
            # Gloo puts its place in its source before the cause, and advice behind it.
            cause = str(error).splitlines()[0].rpartition(".cc:")[2].partition("] ")[2] or str(error)
            raise CheckpointError(
                f"rank {self.rank} waited for the other processes in vain: {cause.partition('. ')[0]}",
                hint="look for the first error of the other processes; the run goes on from its last whole checkpoint",
            ) from error
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def together(self, attempt: Callable[[], T]) -> list[T]:
        """What `attempt` returns on each rank, by rank; it is plain data. Where one fails, all raise.

        The rank that fails raises its own error, the others `CheckpointError` with the same words.
        """
        if self.is_alone:
            return [attempt()]
        value: Any = None
        own: Exception | None = None
        try:
            value = attempt()
        except Exception as error:
            own = error
        answers = self.gather([value, None if own is None else _describe(own)])
        if own is not None:
            raise own
        for rank, (_, fault) in enumerate(answers):
            if fault is not None:
                raise CheckpointError(f"rank {rank} on {fault['host']}: {fault['text']}", hint=fault["hint"])
        return [value for value, _ in answers]

    def lead(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns on rank 0, which alone runs it; it is plain data. Where it fails, all raise."""
        if self.is_alone:
            return attempt()
        return self.together(lambda: attempt() if self.is_main else None)[0]  # pyright: ignore[reportReturnType]


def _describe(error: Exception) -> dict[str, str | None]:
    is_ours = isinstance(error, OptuneError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"host": socket.gethostname(), "text": text, "hint": error.hint if is_ours else None}


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise `ConfigError` where `folder` is not the same folder for all ranks, with the names of their machines."""
    if ranks.is_alone:
        return
    token = ranks.lead(lambda: _put_token(folder))
    path = folder / f"{files.ASIDE}shared-{token}"
    answers = ranks.gather([socket.gethostname(), _sees(path, token)])
    ranks.lead(lambda: path.unlink(missing_ok=True))
    blind = [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(answers) if not sees]
    if blind:
        raise ConfigError(
            f"{folder.absolute()} is not one folder for all processes: what rank 0 on {answers[0][0]} writes there is "
            f"not seen by {list_few(blind, 4)}",
            where="output_dir",
            hint="all processes write one checkpoint: choose a folder on a file system that all machines share",
        )


def _put_token(folder: Path) -> str:
    for path in folder.glob(f"{files.ASIDE}*shared-*"):  # of a run that was killed at this point
        path.unlink(missing_ok=True)
    token = secrets.token_hex(8)
    files.write_whole(folder / f"{files.ASIDE}shared-{token}", token.encode())
    return token


def _sees(path: Path, token: str) -> bool:
    deadline = time.monotonic() + SHARED_WITHIN_S
    while True:
        try:
            if path.read_bytes() == token.encode():
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
