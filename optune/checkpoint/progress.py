"""How far a run had come, and whether the run that goes on is the same one."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optune import __version__, kernels
from optune.checkpoint.manifest import PROGRESS
from optune.errors import CheckpointError, ConfigError

_ABSENT = "(not set)"


def progress_bytes(step: int, progress: Mapping[str, Any]) -> bytes:
    """`progress.json`: what the recipe hands in, with the step, the versions and the time."""
    versions = _versions() | {"python": platform.python_version()}
    saved_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    content = {**_json_ready(progress), "step": step, "versions": versions, "saved_at": saved_at}
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read_progress(folder: Path) -> dict[str, Any]:
    """The content of `optune/progress.json` of a checkpoint folder."""
    try:
        return json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{PROGRESS} cannot be read: {error}", where=str(folder)) from error


def make_fingerprint(config: Mapping[str, Any], *, data: str, model: str) -> dict[str, Any]:
    """What must stay the same for a run to go on: the keys that alter training, by their dotted names, and sums of the
    data and of the base model. Hand it to `save` as `progress["fingerprint"]`.
    """
    return {"config": _json_ready(_flatten(config)), "data": data, "model": model}


@dataclass(frozen=True)
class Difference:
    """One key whose value is not what the checkpoint was made with."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.key in ("data", "model"):
            return f"{self.key}: its content has changed ({str(self.old)[:12]} → {str(self.new)[:12]})"
        return f"{self.key}: {_show(self.old)} → {_show(self.new)}"


def compare_fingerprints(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """What differs between the fingerprint in a checkpoint and that of the run that would go on; empty when nothing.

    Values compare as JSON knows them: a tuple is a list, 1 is 1.0.
    """
    old, new = _json_ready(old), _json_ready(new)
    old_config, new_config = old.get("config", {}), new.get("config", {})
    keys = [*new_config, *(key for key in old_config if key not in new_config)]
    pairs = [(key, old_config.get(key, _ABSENT), new_config.get(key, _ABSENT)) for key in keys]
    pairs += [(key, old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in ("data", "model")]
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def refuse_changes(differences: Collection[Difference], allowed: Collection[str] = ()) -> list[Difference]:
    """Raise `ConfigError` for the differences that `allowed` does not name; returns those that it does.

    A name in `allowed` stands for the key and all keys below it: `optimizer` for `optimizer.lr`.
    """

    def is_allowed(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in allowed)

    refused = [difference for difference in differences if not is_allowed(difference.key)]
    if refused:
        flags = " ".join(f"--allow-change {difference.key}" for difference in refused)
        raise ConfigError(
            "this is not the run that the checkpoint was made by:\n  " + "\n  ".join(map(str, refused)),
            where="resume",
            hint=f"to go on all the same: {flags}",
        )
    return [difference for difference in differences if is_allowed(difference.key)]


def compare_versions(progress: Mapping[str, Any]) -> list[Difference]:
    """What computes otherwise than when the checkpoint was made, so that results may differ in the last bit: other
    libraries, other kernels, another number of threads (sums are split among them)."""
    old = progress.get("versions", {})
    if "kernels" in old:
        kernels.is_ready()  # This early nothing has asked for them yet.
    now = _versions()
    return [Difference(name, old.get(name), version) for name, version in now.items() if old.get(name) != version]


def _versions() -> dict[str, Any]:
    versions = {"optune": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    used = kernels.describe()
    return versions if used is None else versions | {"kernels": used}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def _json_ready(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def _show(value: Any) -> str:
    return value if value == _ABSENT else json.dumps(value, ensure_ascii=False)
