"""Datasets of the Hugging Face hub: fetched by the datasets library, then read like any Arrow file on this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optune import hub
from optune.errors import DataError

HUB = "hf://"
"""How a text that means the hub begins. Nothing else is ever looked up there."""

_ID = re.compile(r"(?:datasets/)?(?P<id>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_AWAY = "without a network, save it with the datasets library's save_to_disk and give that folder"


def fetch(text: str, split: str, name: str | None) -> list[Path]:
    """The Arrow files of one split in the library's cache, downloaded where they are not there yet.

    `text`: `hf://OWNER/NAME`, with `@REVISION` where one is meant. A hub that cannot be reached is waited for a few
    seconds; then what the library's cache has is taken, and that is said. Raises DataError with one reason for whatever
    goes wrong: no library, no network, no such dataset, name or split.
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
    away = hub.ask(lambda wait_s: _ask(found["id"], found["revision"], wait_s))
    why = "" if away is None else hub.explain(away, "dataset")
    if away is not None and hub.is_refusal(away):
        raise DataError(why, where=text) from away
    try:
        with _quietly(is_offline=away is not None):
            # No code of the dataset's own is run: the library has stopped to do so.
            dataset = datasets.load_dataset(found["id"], name, split=split, revision=found["revision"])
        files = [Path(entry["filename"]) for entry in dataset.cache_files]  # pyright: ignore
    except Exception as error:
        # The library, its readers and its transport raise whatever they like; for the user the cause is one.
        if away is not None and isinstance(error, FileNotFoundError | ConnectionError):
            raise DataError(f"{why}, and it is not in the cache on this machine", where=text, hint=_AWAY) from error
        reason = f"{(str(error).strip().splitlines() or ['no reason given'])[0]} ({type(error).__name__})"
        said = f"{why}, and the copy on this machine" if away is not None else "the dataset"
        raise DataError(f"{said} cannot be had: {reason}", where=text, hint=_AWAY) from error
    if not files:
        raise DataError(f"the split {split!r} is empty", where=text)
    if away is not None:
        _check_cached(text, found["revision"], files, why)
    return files


def _ask(dataset: str, revision: str | None, wait_s: float) -> None:
    from huggingface_hub import HfApi

    HfApi().dataset_info(dataset, revision=revision, timeout=wait_s)


def _check_cached(text: str, revision: str | None, files: list[Path], why: str) -> None:
    """Says that the copy in the cache is taken. Which revision it is, only its commit tells."""
    if revision is not None and not all(revision in file.parts for file in files):
        raise DataError(
            f"{why}, and the copy on this machine does not say that it is {revision}",
            where=text,
            hint=f"give the whole commit behind the @, or leave it out to take the copy; {_AWAY}",
        )
    sys.stderr.write(f"{text}: {why}: taking the copy of an earlier download, {files[0].parent}\n")


@contextmanager
def _quietly(*, is_offline: bool) -> Iterator[None]:
    """The libraries without their warnings, without bars where nobody sees them, and offline where that is known."""
    import datasets
    import huggingface_hub
    from datasets import config as datasets_config
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import logging as hub_logging

    loggers = [(logging, logging.get_verbosity()) for logging in (datasets_logging, hub_logging)]
    switches = [(datasets_config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in switches]
    had_bars = datasets.are_progress_bars_disabled() is False
    try:
        for logging, _ in loggers:
            logging.set_verbosity_error()
        for module, name in switches if is_offline else ():
            setattr(module, name, True)
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        yield
    finally:
        for logging, verbosity in loggers:
            logging.set_verbosity(verbosity)
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)
        if had_bars:
            datasets.enable_progress_bars()
