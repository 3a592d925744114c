"""Work without Python's search for cycles."""

from __future__ import annotations

import gc
import weakref

from optune.garbage import uncollected


class Node:
    """One that is part of a cycle."""

    def __init__(self) -> None:
        self.own = self


def test_nobody_looks_for_cycles_meanwhile_and_as_ever_afterwards() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        lost = weakref.ref(Node())
    assert gc.isenabled()
    gc.collect()
    assert lost() is None


def test_what_stays_is_not_looked_through_later() -> None:
    before = gc.get_freeze_count()
    try:
        with uncollected(stays=True):
            kept = [[index] for index in range(1000)]
        assert gc.get_freeze_count() >= before + len(kept) and gc.isenabled()
        assert not {id(each) for each in gc.get_objects()} & {id(each) for each in kept}
    finally:
        gc.unfreeze()
