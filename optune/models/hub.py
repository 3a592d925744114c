"""Where a model is: a folder on disk, or a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from pathlib import Path

from optune.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything of a model but pickled weights and copies in other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "README.md"]
_UNWANTED = ["*/*", "consolidated*"]
_PATIENCE_S = 8.0
"""How long the hub may take for its first answer."""


def is_hub_id(path: str) -> bool:
    """Whether `path` may be looked up on the hub: `owner/name`, and nothing on disk says that a path is meant."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path.split("/")[0]).exists() and not Path(path).exists()


def resolve(path: str | Path) -> Path:
    """The folder of a model. A hub id is taken from the local cache, without a network, or else downloaded.

    Anything that looks like a path, or is given as a `Path`, is only looked up on disk. Raises `ModelError` with the
    absolute path that was tried, or with what the hub said.
    """
    if isinstance(path, str) and is_hub_id(path):
        return _cached(path) or download(path)
    folder = Path(os.path.expandvars(path)).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError("a model is a folder with config.json; this is a file", where=str(folder))
    raise ModelError("there is no such folder", where=str(folder))


def download(repo_id: str, destination: Path | None = None, *, revision: str | None = None) -> Path:
    """Fetches a model into `destination`, or into the hub's cache. Raises `ModelError` after at most about 10 s where
    the hub does not answer; the transfer itself may take as long as it needs."""
    from huggingface_hub import HfApi, snapshot_download

    pool = ThreadPoolExecutor(1)
    try:
        # Asked in a thread: a name server that swallows questions would hold us for longer than any timeout says.
        pool.submit(HfApi().model_info, repo_id, revision=revision, timeout=_PATIENCE_S).result(_PATIENCE_S + 1)
        folder = snapshot_download(
            repo_id, revision=revision, local_dir=destination, allow_patterns=_WANTED, ignore_patterns=_UNWANTED,
            etag_timeout=_PATIENCE_S,
        )  # fmt: skip
    except StillWaiting:
        raise _explain(repo_id, f"the hub did not answer within {_PATIENCE_S:.0f} s") from None
    except Exception as error:
        # Whatever the client or its transport raises, the cause is one: this model could not be had.
        raise _explain(repo_id, _first_line(error)) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Path(folder)


def _explain(repo_id: str, cause: str) -> ModelError:
    return ModelError(
        f"{cause}. There is no folder {Path(repo_id).absolute()} either",
        where=repo_id,
        hint="without a network, give the path of a folder on this machine",
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    name = type(error).__name__
    reasons = {
        "RepositoryNotFoundError": "the hub has no such model, or it is private and HF_TOKEN is not set",
        "GatedRepoError": "the model is gated: accept its terms on its page, and set HF_TOKEN",
        "RevisionNotFoundError": "the hub has the model but not that revision",
        "OfflineModeIsEnabled": "the hub is not asked, because HF_HUB_OFFLINE is set",
    }
    return (
        reasons.get(name) or f"the model could not be fetched from the hub ({name}: {text[0] if text else 'no reason'})"
    )


def _cached(repo_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=_WANTED))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return folder if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None
