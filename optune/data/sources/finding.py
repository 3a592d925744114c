"""Where rows are: a path, a folder, a pattern, an archive, a saved dataset or the hub, each as a list of files."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import zipfile
from pathlib import Path
from typing import Any

from optune.data.sources.hub import HUB, fetch
from optune.data.sources.source import KINDS, PACKINGS, Source, check_readable, tell_kind
from optune.data.sources.splits import Split, choose_files
from optune.errors import DataError

SAVED, SAVED_SPLITS, SAVED_STATE = "dataset_info.json", "dataset_dict.json", "state.json"
_NOT_ROWS = (SAVED, SAVED_SPLITS, SAVED_STATE, "dataset_infos.json")
_READABLE = ", ".join([*KINDS, *PACKINGS, ".zip"])


def find_files(text: str, split: Split, name: str | None = None) -> list[Source]:
    """The files that `text` means, in order: those of a folder or pattern sorted by path. Only a text that begins with
    `hf://` is looked up elsewhere than on this machine.

    Raises DataError, naming the absolute path, where nothing is found, or what is found is not read.
    """
    if text.startswith(HUB):
        return [Source(path, kind="arrow") for path in fetch(text, split.name or "train", name)]
    if name is not None:
        raise DataError(
            f"name: {name!r} picks a part of a dataset of the hub, and this is a path",
            where=text,
            hint=f"a dataset of the hub is written {HUB}OWNER/NAME",
        )
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        return _find_in_folder(path, split)
    if not path.exists() and glob.has_magic(text):
        paths = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 (** and a pattern in the root)
        found = [inner for each in paths if each.is_file() for inner in _read_file(each)]
        if not found:
            raise DataError("no file fits this pattern", where=str(path))
    elif path.is_file():
        found = _read_file(path)
    else:
        raise _refusal(path, text)
    if split.name not in (None, "train"):
        raise DataError(
            f"split: {split.name!r} cannot be chosen, a file is all train",
            where=str(path),
            hint="a part of a file is written [:90%] or train[:90%]",
        )
    return found


def _refusal(path: Path, text: str) -> DataError:
    if path.exists():
        return DataError(
            "is not a regular file",
            where=str(path),
            hint="a device or pipe cannot be read twice: write the rows to a .jsonl file",
        )
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    if near:
        hint = f"did you mean {path.parent / near[0]}?"
    elif text.count("/") == 1 and not Path(text).suffix and not text.startswith((".", "/", "~")):
        hint = f"data files are only looked up on this machine; a dataset of the hub is written {HUB}{text}"
    else:
        hint = "data files are only looked up on this machine"
    return DataError("no such data file", where=str(path), hint=hint)


def _read_file(path: Path) -> list[Source]:
    check_readable(path)
    if path.suffix.lower() == ".zip":
        return _find_in_archive(path)
    kind, packing = tell_kind(path.name)
    if packing and kind in ("parquet", "arrow"):
        raise DataError(
            f"a {kind} file inside {packing} cannot be read", where=str(path), hint="unpack it: it is compressed inside"
        )
    return [Source(path, kind=kind or "jsonl", packing=packing)]


def _find_in_archive(path: Path) -> list[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"not a whole zip archive: {error}", where=str(path)) from error
    found = []
    for name in names:
        kind, packing = tell_kind(name)
        is_hidden = any(part.startswith((".", "__")) for part in Path(name).parts)
        if kind is not None and packing is None and kind not in ("parquet", "arrow") and not is_hidden:
            found.append(Source(path, kind=kind, member=name))
    if not found:
        raise DataError("the archive holds no file of rows", where=str(path), hint="it may hold .jsonl, .json, .csv, …")
    return found


def _find_in_folder(folder: Path, split: Split) -> list[Source]:
    if (folder / SAVED_SPLITS).is_file() or (folder / SAVED_STATE).is_file():
        return _find_saved(folder, split)
    paths = []
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        is_hidden = any(part.startswith((".", "_")) for part in inner.parts)
        is_known = path.suffix.lower() == ".zip" or tell_kind(path.name)[0] is not None
        if path.is_file() and is_known and not is_hidden and path.name not in _NOT_ROWS:
            paths.append(path)
    if not paths:
        raise DataError("the folder holds no file of rows", where=str(folder), hint=f"read are {_READABLE}")
    return [source for path in choose_files(folder, paths, split.name) for source in _read_file(path)]


def _find_saved(folder: Path, split: Split) -> list[Source]:
    """The Arrow files of a folder that `save_to_disk` of the datasets library wrote."""
    if (folder / SAVED_SPLITS).is_file():
        names = _read_json(folder / SAVED_SPLITS).get("splits", [])
        if split.name is None and len(names) > 1:
            raise DataError(
                f"the dataset has the splits {', '.join(names)}, and the source does not say which is meant",
                where=str(folder),
                hint=f"add split: {names[0]}",
            )
        name = split.name or (names or ["train"])[0]
        if name not in names:
            raise DataError(f"the dataset has no split {name!r}", where=str(folder), hint=f"it has {', '.join(names)}")
        return _find_saved(folder / name, dataclasses.replace(split, name=None))
    state = _read_json(folder / SAVED_STATE)
    if split.name is not None and split.name != (state.get("_split") or "train"):
        raise DataError(f"the dataset has no split {split.name!r}", where=str(folder))
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "the dataset was saved with a list of indices by an old version of the datasets library",
            where=str(folder),
            hint="load it and save it again with a newer version",
        )
    try:
        paths = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("does not name the files of the dataset", where=str(folder / SAVED_STATE)) from error
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise DataError("a file of the dataset is missing", where=str((missing or [folder])[0]))
    return [Source(path, kind="arrow") for path in paths]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise DataError("found no object", where=str(path))
    return content
