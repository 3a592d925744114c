"""Splits: `train`, `train[:90%]`, `[1000:]`. Which files of a folder belong to a split, and which rows of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optune.errors import DataError

_SPLIT = re.compile(r"(?P<name>[\w.-]+)?(?:\[(?P<first>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_NAMED = {word: split for split, words in _WORDS.items() for word in words}
_LISTED = 3
_FIRST_WORD = re.compile(r"[a-z]+(?![a-z])")


@dataclass(frozen=True)
class Split:
    """`name` None: not given. `first` and `stop` as written: `10`, `-10`, `90%` or None."""

    name: str | None = None
    first: str | None = None
    stop: str | None = None

    @property
    def is_sliced(self) -> bool:
        return self.first is not None or self.stop is not None

    @property
    def needs_count(self) -> bool:
        """Whether the rows have to be counted before it is known which are meant."""
        return any("-" in bound or "%" in bound for bound in self.bounds if bound is not None)

    @property
    def bounds(self) -> tuple[str | None, str | None]:
        return self.first, self.stop

    def resolve(self, count: int | None) -> tuple[int, int | None]:
        """The first row and the one behind the last of `count` rows; `count` None (unknown) where it is not needed.

        A share is rounded to the nearest row, as the datasets library does with its default.
        """
        return self._bound(self.first, count, 0) or 0, self._bound(self.stop, count, count)

    @staticmethod
    def _bound(text: str | None, count: int | None, default: int | None) -> int | None:
        if text is None:
            return default
        number = round(int(text[:-1]) * (count or 0) / 100) if text.endswith("%") else int(text)
        if number < 0:
            number += count or 0
        return max(0, number) if count is None else min(max(0, number), count)


def parse_split(text: str | None, where: str) -> Split:
    """Raises DataError for a text that names no split."""
    found = _SPLIT.fullmatch(text or "")
    if found is None or text == "":
        raise DataError(
            f"split {text!r} cannot be read",
            where=where,
            hint="a split is a name, a part, or both: train, [:90%], train[100:200], validation[-50:]",
        )
    split = Split(found["name"], found["first"], found["stop"])
    for bound in split.bounds:
        if bound is not None and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise DataError(f"split {text!r}: {bound} is more than all rows", where=where)
    return split


def tell_split(path: Path) -> str | None:
    """The split that a file's path inside a folder names: a folder called so, or the first word of the file's name."""
    for part in path.parts[:-1]:
        if part.lower() in _NAMED:
            return _NAMED[part.lower()]
    word = _FIRST_WORD.match(path.name.lower())
    return _NAMED.get(word[0]) if word else None


def choose_files(folder: Path, files: Sequence[Path], name: str | None) -> list[Path]:
    """Those of `files`, found in `folder`, that belong to the split `name`.

    Without a name all of them, as long as none says that it is for testing or validation: that must not be trained by
    oversight. Raises DataError then, and for a split that the folder does not have.
    """
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        by_split.setdefault(tell_split(path.relative_to(folder)), []).append(path)
    known = [split for split in _WORDS if split in by_split]
    if name is None:
        others = [split for split in known if split != "train"]
        if not others:
            return list(files)
        shown = by_split[others[0]][0].relative_to(folder)
        meant = by_split.get("train") or by_split.get(None) or by_split[others[0]]
        listed = ", ".join(map(str, meant)) if len(meant) <= _LISTED else f"{meant[0]}, …"
        raise DataError(
            f"the folder has files for {' and '.join(others)} ({shown}), and the source does not say which are meant",
            where=str(folder),
            hint=f"write {{path: {folder}, split: {known[0]}}}, or list the files that are meant: [{listed}]",
        )
    wanted = _NAMED.get(name, name)
    if wanted in by_split:
        return by_split[wanted]
    if wanted == "train" and not known:
        return list(files)
    raise DataError(
        f"the folder has no split {name!r}",
        where=str(folder),
        hint=f"it has {', '.join(known)}" if known else "its file names name no split: it is all train",
    )
