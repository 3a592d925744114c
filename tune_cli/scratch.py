"""The launcher's folder in the system's place for temporary files, which stays in no way of ending."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PREFIX = "optune-launch-"
_LOCK = ".lock"


@contextlib.contextmanager
def make_folder() -> Iterator[Path]:
    """A fresh folder, removed at the end; so are those of launchers that were killed and could not."""
    import tempfile

    remove_forsaken(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_forsaken(place: Path) -> None:
    """Removes our folders in `place` whose launcher no longer runs: its lock has ended with it."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def remove_if_forsaken(folder: Path, launcher: int) -> None:
    """For a worker that ends: removes `folder`, of one attempt, and the one around it, where its parent was killed."""
    if folder.parent.name.startswith(PREFIX) and _has_died(launcher):
        shutil.rmtree(folder.parent, ignore_errors=True)


def _has_died(parent: int) -> bool:
    """Whether this process's parent has; Linux tells its children so before the last of its threads is gone."""
    if os.getppid() != parent:
        return True
    try:
        state = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("Z", "X")
