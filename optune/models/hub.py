"""Where a model is: a folder on disk, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from optune import hub
from optune.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything of a model but pickled weights and copies in other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md"]
_UNWANTED = ["*/*.safetensors", "*/*.json", "original/*", "consolidated*"]


def is_hub_id(path: str) -> bool:
    """Whether `path` may be looked up on the hub: `owner/name`, and nothing on disk says that a path is meant."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path.split("/")[0]).exists() and not Path(path).exists()


def resolve(path: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model. A hub id is taken from the local cache, without a network, or else downloaded; without
    `weights` the config and the tokenizer are enough.

    Anything that looks like a path, or is given as a `Path`, is only looked up on disk. Raises `ModelError` with the
    absolute path that was tried, or with what the hub said.
    """
    if isinstance(path, str) and is_hub_id(path):
        return _cached(path, weights) or download(path, weights=weights)
    folder = Path(os.path.expandvars(path)).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError("a model is a folder with config.json; this is a file", where=str(folder))
    raise ModelError(
        "there is no such folder", where=str(folder), hint="`optune download OWNER/NAME FOLDER` fetches a model"
    )


def download(
    repo_id: str, destination: Path | None = None, *, revision: str | None = None, weights: bool = True
) -> Path:
    """Fetches a model into `destination`, or into the hub's cache. Raises `ModelError` after at most about 10 s where
    the hub does not answer; the transfer itself may take as long as it needs."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        if error := hub.ask(lambda wait_s: HfApi().model_info(repo_id, revision=revision, timeout=wait_s)):
            raise error
        folder = snapshot_download(
            repo_id, revision=revision, local_dir=destination, allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED if weights else [*_UNWANTED, "*.safetensors"], etag_timeout=hub.PATIENCE_S,
        )  # fmt: skip
    except Exception as error:
        # Whatever the client or its transport raises, the cause is one: this model could not be had.
        raise ModelError(
            f"{hub.explain(error, 'model')}. There is no folder {Path(repo_id).absolute()} either",
            where=repo_id,
            hint="without a network, give the path of a folder on this machine",
        ) from error
    return Path(folder)


def _cached(repo_id: str, weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=_WANTED))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return folder if (_is_whole(folder) if weights else (folder / "config.json").exists()) else None


def _is_whole(folder: Path) -> bool:
    """Whether an earlier download got everything; one that was cut short is taken up again."""
    index = folder / "model.safetensors.index.json"
    try:
        files = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).exists() for name in {"config.json", *files})
