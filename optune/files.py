"""Files and folders that are whole or absent: the few system calls that run folders, checkpoints and metrics stand on.

This module imports nothing of ours, so every other module may use it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ASIDE = ".tmp-"
"""The prefix of everything that is not whole yet, or not wanted any more. Such names are never read, only cleared."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def cache_folder() -> Path:
    """`$OPTUNE_CACHE`, or this user's place for caches."""
    if own := os.environ.get("OPTUNE_CACHE"):
        return Path(own).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "optune"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "optune"


def sync_file(path: Path) -> None:
    """Wait until the content of `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in `path` are on the disk: a rename alone may be lost with the power."""
    sync_file(path)


def sync_tree(folder: Path) -> None:
    """Wait until every file and every name below `folder` is on the disk."""
    for path in walk(folder):
        sync_file(path)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_folder(path)


def _sync(descriptor: int) -> None:
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # macOS: fsync only reaches the drive's own cache.
        fcntl.fcntl(descriptor, full_sync)


def walk(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, in an order that does not depend on the file system."""
    return iter(sorted(path for path in folder.rglob("*") if path.is_file()))


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader finds the old content or the new, after any crash."""
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            _sync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_folder(new: Path, target: Path) -> None:
    """Rename the folder `new` to `target`; a folder that stood there is exchanged in one go, then removed.

    Where the system cannot exchange two folders, the old one is moved aside first: a crash between the two renames
    leaves it under a name that starts with `ASIDE`.
    """
    if target.exists() and not _exchange(new, target):
        old = target.with_name(f"{ASIDE}old-{target.name}")
        remove_tree(old)
        target.rename(old)
        new.rename(target)
        new = old
    elif not target.exists():
        new.rename(target)
    sync_folder(target.parent)
    remove_tree(new)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically with Linux's renameat2; False where that is not to be had."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def remove_tree(folder: Path) -> None:
    """Remove `folder` and all in it; nothing happens when it is not there.

    A folder with a name of its own is renamed first, so that a crash in the middle leaves no half of it in its place.
    """
    if not folder.exists():
        return
    if not folder.name.startswith(ASIDE):
        aside = folder.with_name(f"{ASIDE}removed-{folder.name}")
        remove_tree(aside)
        folder.rename(aside)
        folder = aside
    shutil.rmtree(folder)


def link_or_copy(source: Path, destination: Path) -> None:
    """Give `source` a second name; copy it where the file system refuses hard links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def hash_file(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_bytes(count: float) -> str:
    """`1.54 GiB`, `283 MiB`: a size for people, to three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < (1024 if unit == "B" else 1000) or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{three_digits(count)} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def three_digits(value: float) -> str:
    """`1.54`, `15.4`, `1,540`."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
