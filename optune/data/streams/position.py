"""Where a stream stands, as a checkpoint keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optune.data.rows import Report, Tally
from optune.data.sources import Mark
from optune.data.streams.windows import Place

_SAMPLES, _SAMPLE_BYTES = 64, 64 * 1024


@dataclass(frozen=True)
class Position:
    """Where a step begins: `unit` of `block` of the window number `window` of an epoch, which begins at `places`.

    `done`: epochs finished. `report`: what became of the rows in the blocks before this one.
    """

    places: tuple[Place, ...]
    epoch: int = 0
    window: int = 0
    block: int = 0
    unit: int = 0
    done: float = 0.0
    report: Report = field(default_factory=Report, compare=False)

    def to_values(self) -> dict[str, Any]:
        """As plain values; see `read_position`."""
        return asdict(self)


def read_position(values: Mapping[str, Any]) -> Position:
    """The position that `Position.to_values` put into plain values."""
    places = tuple(Place(file, Mark(*mark)) for file, mark in values["places"])
    numbers = {key: values[key] for key in ("epoch", "window", "block", "unit", "done")}
    return Position(places, **numbers, report=_read_report(values["report"]))


def sample_file(path: Path) -> str:
    """sha256 over the size of a file and 64 pieces of 64 KiB at equal distances, the first and the last among them:
    what can be told of 5 GB at once. A change between the pieces that leaves the size as it is is not seen."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
            if size <= _SAMPLE_BYTES:
                break
    return digest.hexdigest()


def add_block(report: Report, block: Report) -> None:
    """The report of a block behind those before it."""
    report.merge(block)
    report.kept += block.kept
    report.tokens += block.tokens
    report.targets += block.targets
    report.longest = max(report.longest, block.longest)


def _read_report(values: Mapping[str, Any]) -> Report:
    report = Report(**{key: values[key] for key in ("rows", "kept", "targets", "tokens", "longest", "formats")})
    for name in ("skipped", "notes"):
        getattr(report, name).update({what: Tally(**tally) for what, tally in values[name].items()})
    for key, value in values["too_long"].items():
        setattr(report.too_long, key, value)
    return report
