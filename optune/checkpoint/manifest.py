"""The manifest of a checkpoint: size and sha256 of every file, written last, itself under a sum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from optune import files
from optune.errors import CheckpointError

MANIFEST = Path("optune") / "manifest.json"
PROGRESS = Path("optune") / "progress.json"
_FORMAT = 1


Entries = dict[str, dict[str, Any]]
"""`size` and `sha256` of each file, by its name in the folder."""


def sum_up(folder: Path) -> Entries:
    """Reads every file in `folder`, but for the manifest."""
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": files.hash_file(path)}
        for path in files.walk(folder)
        if path != folder / MANIFEST
    }


def write_manifest(folder: Path, entries: Entries | None = None) -> int:
    """Write the manifest of every file in `folder`, or of what `sum_up` said of them. Returns the size of all files in
    bytes."""
    entries = sum_up(folder) if entries is None else entries
    files.write_whole(folder / MANIFEST, _to_bytes(entries))
    return sum(entry["size"] for entry in entries.values())


def _to_bytes(entries: Entries) -> bytes:
    body = json.dumps(entries, sort_keys=True)
    manifest = {"format": _FORMAT, "sum": hashlib.sha256(body.encode()).hexdigest(), "files": entries}
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Entries | str:
    """The entry of every file, or what is wrong with the manifest."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return f"{MANIFEST} is missing: the save was never finished"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    try:
        manifest = json.loads(content)
        version, entries = manifest["format"], manifest["files"]
        # Byte for byte: a flipped bit must not hide where JSON does not look.
        is_sound = version != _FORMAT or content == _to_bytes(entries)
    except (ValueError, TypeError, KeyError):
        is_sound, version, entries = False, _FORMAT, {}
    if not is_sound:
        return f"{MANIFEST} is damaged"
    if version != _FORMAT:
        return f"{MANIFEST} has format {version}; this optune reads format {_FORMAT}"
    return entries


def check(folder: Path, *, sums: bool = True) -> list[str]:
    """Everything that is wrong with the checkpoint in `folder`, each by the file's name; empty when it is whole.

    `sums=False` looks at names and sizes alone, which reads no weights. Files that the manifest does not name are not
    looked at.
    """
    if not folder.is_dir():
        return ["the folder is missing"]
    entries = read_manifest(folder)
    if isinstance(entries, str):
        return [entries]
    faults = [fault for name, entry in entries.items() if (fault := _check_file(folder / name, name, entry, sums))]
    return faults or _check_step(folder)


def _check_file(path: Path, name: str, entry: dict[str, Any], sums: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        if sums and files.hash_file(path) != entry["sha256"]:
            return f"{name} is damaged: its sha256 is not the one in {MANIFEST}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def _check_step(folder: Path) -> list[str]:
    """A copy under another step's name is not that step."""
    step = step_of(folder)
    try:
        saved = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["step"]
    except FileNotFoundError:
        return [f"{PROGRESS} is missing"]
    except (OSError, ValueError, TypeError, KeyError):
        return [f"{PROGRESS} is damaged"]
    return [f"{PROGRESS} is of step {saved}"] if step is not None and saved != step else []


def count_bytes(folder: Path) -> int:
    """The size of all files that the manifest of a whole checkpoint names."""
    entries = read_manifest(folder)
    return 0 if isinstance(entries, str) else sum(entry["size"] for entry in entries.values())


def verify(folder: Path) -> None:
    """Raise `CheckpointError` naming every missing, cut or damaged file of the checkpoint in `folder`."""
    faults = check(folder)
    if faults:
        raise CheckpointError(
            "; ".join(faults),
            where=str(folder),
            hint="`resume: auto` goes on from the newest checkpoint that is whole",
        )


def folder_name(step: int) -> str:
    """`step-000120`."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder is named after; None for any other name."""
    digits = folder.name.removeprefix("step-")
    if not (digits.isascii() and digits.isdigit()) or folder.name != folder_name(int(digits)):
        return None
    return int(digits)
