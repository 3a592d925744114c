"""Work that makes many objects and hardly a cycle, without Python's search for cycles. Imports nothing of ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, stays: bool = False) -> Iterator[None]:
    """Nobody looks for cycles while the context lasts, unless somebody asks for it. `stays`: what is there at its end
    stays for as long as the process, as modules do, and is not looked through later either."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was_enabled:
            gc.enable()
