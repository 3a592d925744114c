"""The key of prepared rows: a hash over all that decides what they are.

Nothing here needs care when code changes: the code that makes rows, and the versions of the libraries it calls, are
part of the key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from optune import files
from optune.data.encoder import RowEncoder
from optune.data.formats import Format
from optune.data.sources import Source

SMALLEST = 1 << 20
"""Bytes of data files from which rows are kept: fewer are prepared as fast as they are found."""
LARGE = 64 << 20
"""Bytes of a data file from which its sum is remembered."""
_QUIET_S = 60
_LIBRARIES = ("tokenizers", "jinja2", "numpy")


def find_key(encoder: RowEncoder, sources: Sequence[Source], format: Format, folder: Path) -> str | None:
    """The key under which rows are kept in `folder`, None where they cannot or need not be: few rows, a file that
    cannot be read, or a format that is a function, whose result may depend on anything."""
    if callable(format) or any(callable(source.format) for source in sources):
        return None
    paths = {source.path for source in sources}
    try:
        if sum(path.stat().st_size for path in paths) < SMALLEST:
            return None
        sums = {path: sum_file(path, folder) for path in paths}
    except OSError:  # Reading it says so in its own words.
        return None
    options = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    parts = {
        "code": _sum_code(),
        "tokenizer": options.pop("tokenizer").fingerprint(),
        "options": options,
        "format": format,
        # The weight of a source says how often its rows come, and changes none.
        "sources": [
            [str(source.path), sums[source.path], dataclasses.asdict(dataclasses.replace(source, weight=1.0))]
            for source in sources
        ],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _sum_code() -> str:
    digest = hashlib.sha256(platform.python_version().encode())
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    folder = Path(__file__).parent
    for path in files.walk(folder):
        if path.suffix == ".py":
            digest.update(f"{path.relative_to(folder)} {files.hash_file(path)}".encode())
    return digest.hexdigest()


def sum_file(path: Path, folder: Path) -> str:
    """sha256 of a file's content. That of a large one is remembered in `folder` as long as the file is not touched.

    Not touched: size, inode, and the times of its last change of content and of state are the same. The time of state
    (ctime) moves with every write and cannot be set back by a program. It cannot tell two writes of one tick apart, nor
    one into a mapped page that waits to be written, so a sum is only remembered of a file that has been left alone for
    a minute when it is read.
    """
    before = path.stat()
    if before.st_size < LARGE:
        return files.hash_file(path)
    memory = folder / "sums" / hashlib.sha256(str(path).encode()).hexdigest()
    state = [before.st_size, before.st_dev, before.st_ino, before.st_mtime_ns, before.st_ctime_ns]
    if (known := _recall(memory, state)) is not None:
        return known
    found = files.hash_file(path)
    after = path.stat()
    is_quiet = time.time() - max(after.st_mtime, after.st_ctime) > _QUIET_S
    if is_quiet and state == [after.st_size, after.st_dev, after.st_ino, after.st_mtime_ns, after.st_ctime_ns]:
        with suppress(OSError):  # The cache says so itself when it keeps rows.
            memory.parent.mkdir(parents=True, exist_ok=True)
            known = {"state": state, "sum": found, "check": _check(state, found)}
            files.write_whole(memory, json.dumps(known).encode())
    return found


def _recall(memory: Path, state: list[int]) -> str | None:
    try:
        known: dict[str, Any] = json.loads(memory.read_bytes())
        is_right = known["state"] == state and known["check"] == _check(state, known["sum"])
        return known["sum"] if is_right else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check(state: list[int], found: str) -> str:
    return hashlib.sha256(f"{state} {found}".encode()).hexdigest()
