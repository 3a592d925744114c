"""Rows that were prepared once, kept as files that are mapped into memory.

An entry is found by a key: a hash over the content of the data files, the tokenizer, the templates, every option, and
the code that makes rows. So whatever changes the rows changes the key, and an old entry is never found by mistake.
An entry appears under its name only when whole, and is checked against its sum whenever it is opened.

    <folder>/rows/<key>/     tokens, trained, weights, starts, places, and entry.json
    <folder>/sums/           sums of large data files, see `cache_key.py`
    <folder>/locks/          who prepares rows holds a lock, so that the processes of a run do not all prepare the same
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import typing
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from optune import files
from optune.data.rows import Places, Report, Rows

LIMIT = 20 << 30
"""Bytes of all entries; beyond it those that were not used for the longest time go."""
WAIT_S = 1800.0
"""How long one waits for another process that prepares the same rows, before doing it too."""
_ABANDONED_S = 86400
_ENTRY = "entry.json"
_DTYPES = {"starts": "<i8", "tokens": "<i4", "trained": "|b1", "weights": "<f4", "places": "|u1", "place_ends": "<i8"}

Prepared = tuple[Rows, list[int]]
"""Rows, and how many of them each entry of `data.train` gave."""


def find_folder(place: str | Path | None) -> Path | None:
    """The folder that `place` means: None for none, `auto` for `files.cache_folder()`."""
    if place is None:
        return None
    if str(place) != "auto":
        return Path(place).expanduser().absolute()
    return files.cache_folder()


class RowCache:
    """The entries in `folder`. Whatever goes wrong with the disk is said once, and the rows are prepared without it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_usable = True

    def fetch(self, find_key: Callable[[], str | None], make: Callable[[], Prepared]) -> Prepared:
        """The entry's rows, else what `make` gives, which is kept unless the key has changed meanwhile: a file that is
        written while it is read. `find_key` gives None for what must not be kept."""
        key = find_key()
        if key is None:
            return make()
        if (found := self._open(key)) is not None:
            return found
        with self._lock(key):
            # Another process may have made it meanwhile.
            if (found := self._open(key)) is not None:
                return found
            prepared = make()
            if self._is_usable and find_key() == key:
                return self._store(key, *prepared) or prepared
            return prepared

    def _open(self, key: str) -> Prepared | None:
        folder = self._folder / "rows" / key
        if not folder.is_dir():
            return None
        try:
            entry = _read_entry(folder)
            arrays = {name: _map(folder, name, size) for name, size in entry["sizes"].items()}
            places = Places(arrays.pop("places"), arrays.pop("place_ends"))
            weights = arrays.pop("weights", None)
            report = _rebuild(Report, entry["report"])
            rows = Rows.of(weights=weights, places=places, report=report, fingerprint=entry["fingerprint"], **arrays)
            if _sum_of(rows) != entry["fingerprint"] or _sum_places(places) != entry["places"]:
                raise ValueError("its content has changed")
            with _forgiving():
                os.utime(folder / _ENTRY)  # What was used last stays longest.
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._discard(folder, str(error))
            return None
        return rows, entry["counts"]

    def _discard(self, folder: Path, why: str) -> None:
        say_once(f"warning: the prepared rows in {folder} are damaged ({why}): preparing them again")
        with _forgiving():
            files.remove_tree(folder)

    def _store(self, key: str, rows: Rows, counts: list[int]) -> Prepared | None:
        """The rows as they are opened from the disk; None where they could not be kept."""
        aside = self._folder / "rows" / f"{files.ASIDE}{uuid.uuid4().hex}"
        try:
            aside.mkdir(parents=True)
            _write_entry(aside, rows, counts)
            try:
                aside.rename(self._folder / "rows" / key)
            except OSError:
                if not (self._folder / "rows" / key).is_dir():  # else another process was faster
                    raise
            self._prune(key)
        except OSError as error:
            self._give_up(error)
            return None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return self._open(key)

    def _prune(self, newest: str) -> None:
        with _forgiving():
            entries = [path for path in (self._folder / "rows").iterdir() if path.name != newest]
            for path in [path for path in entries if path.name.startswith(files.ASIDE)]:
                entries.remove(path)
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
            sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in entries}
            total = sum(sizes.values()) + sum(
                file.stat().st_size for file in (self._folder / "rows" / newest).iterdir()
            )
            for path in sorted(entries, key=lambda path: (path / _ENTRY).stat().st_mtime):
                if total <= LIMIT:
                    break
                # Who has it open keeps what is mapped: the file lives on without its name.
                files.remove_tree(path)
                total -= sizes[path]

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Holds the lock of `key`, where there are locks and for `WAIT_S` at most nobody else does. It ends with its
        process, so nobody waits for a dead one."""
        path = self._folder / "locks" / key[:2]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            self._give_up(error)
            yield
            return
        with file:
            started = time.monotonic()
            while time.monotonic() - started < WAIT_S:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    say_once("waiting for another process that prepares rows")
                    time.sleep(0.1)
                except OSError:  # A file system without locks: at worst the rows are prepared twice.
                    break
            yield

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        say_once(
            f"warning: prepared rows cannot be kept in {self._folder} ({error.strerror or error}): going on without "
            "(data.cache names another folder, null turns this off)"
        )


def _write_entry(folder: Path, rows: Rows, counts: list[int]) -> None:
    places = Places.of(rows.places)
    arrays = {
        "starts": rows.starts,
        "tokens": rows.tokens,
        "trained": rows.trained,
        "weights": rows.weights,
        "places": places.text,
        "place_ends": places.ends,
    }
    sizes = {}
    for name, array in arrays.items():
        if array is not None:
            # Little-endian everywhere. Not synced: an entry that a power cut damages is found by its sum.
            array.astype(_DTYPES[name], copy=False).tofile(folder / name)
            sizes[name] = len(array)
    entry = {
        "sizes": sizes,
        "counts": counts,
        "fingerprint": _sum_of(rows),
        "places": _sum_places(places),
        "report": dataclasses.asdict(rows.report),
    }
    text = json.dumps(entry)
    (folder / _ENTRY).write_text(json.dumps({"entry": entry, "sum": hashlib.sha256(text.encode()).hexdigest()}))


def _read_entry(folder: Path) -> dict[str, Any]:
    whole = json.loads((folder / _ENTRY).read_text())
    if hashlib.sha256(json.dumps(whole["entry"]).encode()).hexdigest() != whole["sum"]:
        raise ValueError(f"{_ENTRY} has changed")
    return whole["entry"]


def _map(folder: Path, name: str, size: int) -> np.ndarray:
    path, dtype = folder / name, np.dtype(_DTYPES[name])
    if path.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{name} has {path.stat().st_size} bytes, wanted {size * dtype.itemsize}")
    # A plain view: slices of a memmap are memmaps, which are slow to make.
    return np.asarray(np.memmap(path, dtype, "r", shape=(size,)))


def _sum_of(rows: Rows) -> str:
    return Rows.of(rows.starts, rows.tokens, rows.trained, rows.weights, (), Report()).fingerprint()


def _sum_places(places: Places) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(places.text).data)
    digest.update(np.ascontiguousarray(places.ends.astype("<i8", copy=False)).data)
    return digest.hexdigest()


def _rebuild(kind: Any, value: Any) -> Any:
    """The dataclass that `dataclasses.asdict` made `value` of, and those inside it."""
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: _rebuild(kinds[name], part) for name, part in value.items()})  # pyright: ignore[reportCallIssue]
    if typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        return {name: _rebuild(inner, part) for name, part in value.items()}
    return value


@contextmanager
def _forgiving() -> Iterator[None]:
    """For tidying: what cannot be done now is done another time, or by the process that was faster."""
    with suppress(OSError):
        yield


@cache
def say_once(text: str) -> None:
    """A line on stderr; the same one once a process."""
    sys.stderr.write(f"{text}\n")
