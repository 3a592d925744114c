"""One process that takes itself for the first of many: what each of them builds can be checked where they are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def pretend(world_size: int) -> Iterator[None]:
    """For as long as the context lasts, `start` finds this process to be rank 0 of `world_size`, one a machine.

    Nothing is sent: torch's fake process group gives back what it gets. So sums over ranks are wrong, and nothing that
    is trained is right; shapes, shards, layouts and refusals are.
    """
    # Registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
