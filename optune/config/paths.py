"""Whether a text names a place on disk or something on a hub."""

from __future__ import annotations

import os
from pathlib import Path

_DATA = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".gz", ".zst", ".bz2", ".xz", ".zip")
_MODELS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".model", ".jinja", ".yaml", ".yml")


def looks_like_path(text: str, *, hub_ids: bool = True) -> bool:
    """Whether a value is only ever looked up on disk.

    A path starts with `/`, `.` or `~`, has more than one slash, ends like a file, exists, or lies in a folder that
    exists. What is left looks like a hub id (`owner/name` or `name`). With `hub_ids=False`, for values such as data
    files where a slash is already enough, `owner/name` is a path too.
    """
    if text.startswith(("/", ".", "~", "$")) or "\\" in text or text.count("/") > 1 or text.endswith("/"):
        return True
    if Path(text).suffix.lower() in _DATA + _MODELS or ("/" in text and not hub_ids):
        return True
    return bool(text) and (os.path.lexists(text) or ("/" in text and Path(text).parent.is_dir()))
