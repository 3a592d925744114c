"""metrics.jsonl: one JSON object a line, whole lines only, no step twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optune import files
from optune.errors import OptuneError


class MetricsFile:
    """The open `metrics.jsonl` of a run that has come to `last_step`.

    Lines of later steps, which a run that goes on from a checkpoint takes again, are dropped at once, and with
    `owes_validation` the validation of `last_step`; so is a line that a crash has torn. `dropped` says how many.
    """

    def __init__(self, path: Path, last_step: int = 0, *, owes_validation: bool = False) -> None:
        self._path = path
        try:
            self.dropped = _drop_after(path, last_step, owes_validation)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add one line, by a single write. JSON has no NaN: such a value is null, and `non_finite` names its key."""
        line = {key: _json_ready(value) for key, value in metrics.items()}
        odd = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
        if odd:
            line["non_finite"] = odd
        data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                # The disk took a part: take it back, so that every line in the file is whole.
                os.ftruncate(self._descriptor, size)
                os.write(self._descriptor, data)
                if os.fstat(self._descriptor).st_size != size + len(data):
                    os.ftruncate(self._descriptor, size)
                    raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _failure(self, error: OSError) -> OptuneError:
        return OptuneError(f"it cannot be written: {error.strerror or error}", where=str(self._path))


def _json_ready(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, last_step: int, owes_validation: bool) -> int:
    """Rewrite the file without torn lines and lines of what comes after the checkpoint; how many went."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    limit = (last_step, not owes_validation)
    kept = [
        line
        for line in lines
        if (metrics := _parse(line)) is not None and (metrics["step"], "validation_loss" in metrics) <= limit
    ]
    if len(kept) < len(lines):
        files.write_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's content, or None when it is not a whole line with a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        metrics = json.loads(line)
    except ValueError:
        return None
    return metrics if isinstance(metrics, dict) and isinstance(metrics.get("step"), int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a `metrics.jsonl`, also of a run that is writing it now; empty when there is none."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [metrics for line in lines if (metrics := _parse(line)) is not None]
