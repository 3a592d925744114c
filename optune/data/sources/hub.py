"""Datasets of the Hugging Face hub: fetched by the datasets library, then read like any Arrow file on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from optune.errors import DataError

HUB = "hf://"
"""How a text that means the hub begins. Nothing else is ever looked up there."""

_ID = re.compile(r"(?:datasets/)?(?P<id>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


def fetch(text: str, split: str, name: str | None) -> list[Path]:
    """The Arrow files of one split in the library's cache, downloaded where they are not there yet.

    `text`: `hf://OWNER/NAME`, with `@REVISION` where one is meant. Raises DataError with one reason for whatever goes
    wrong: no library, no network, no such dataset, name or split.
    """
    found = _ID.fullmatch(text.removeprefix(HUB))
    if found is None:
        raise DataError("is no dataset of the hub", where=text, hint=f"write {HUB}OWNER/NAME")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "the datasets library is not installed", where=text, hint="pip install 'optune[datasets]'"
        ) from error
    try:
        # No code of the dataset's own is run: the library has stopped to do so.
        dataset = datasets.load_dataset(found["id"], name, split=split, revision=found["revision"])
        files = [Path(entry["filename"]) for entry in dataset.cache_files]  # pyright: ignore
    except Exception as error:
        # The library, its readers and its transport raise whatever they like; for the user the cause is one.
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise DataError(
            f"the dataset cannot be had: {reason} ({type(error).__name__})",
            where=text,
            hint="without a network, save it with the datasets library's save_to_disk and give that folder",
        ) from error
    if not files:
        raise DataError(f"the split {split!r} is empty", where=text)
    return files
