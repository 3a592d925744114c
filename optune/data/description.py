"""What `optune data --json` prints: the batches of a run and some rows, as plain values (keys: docs/data.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optune.data.batches import Batches
from optune.data.preview import Unit
from optune.data.rows import Tally
from optune.data.summary import count_lengths, padding_share
from optune.data.tokenizer import Tokenizer

VERSION = 1
"""Grows when a key changes its meaning or goes; new keys leave it as it is."""


def describe(batches: Batches, tokenizer: Tokenizer, split: str, units: Sequence[Unit]) -> dict[str, Any]:
    """The document, ready for `json.dumps`. `split`: train or validation; `units`: the rows or packs to show."""
    rows = batches.rows
    report, weights = rows.report, rows.weights
    return {
        "version": VERSION,
        "split": split,
        "tokenizer": {
            "folder": str(tokenizer.folder),
            "template": tokenizer.template_name,
            "answer_ends": [_name(tokenizer, token) for token in sorted(tokenizer.end_ids())],
            "bos": _name(tokenizer, tokenizer.bos_id),
            "eos": _name(tokenizer, tokenizer.eos_id),
            "pad": _name(tokenizer, batches.pad_id),
        },
        "rows": {
            "read": report.rows,
            "kept": report.kept,
            "tokens": report.tokens,
            "targets": report.targets,
            "target_weight": float(report.targets if weights is None else weights[rows.trained].sum(dtype=float)),
        },
        "files": [
            {"path": path, "format": report.formats.get(path)} | asdict(file) for path, file in report.files.items()
        ],
        "skipped": _tallies("reason", report.skipped),
        "notes": _tallies("what", report.notes),
        "too_long": {"max_length": batches.max_length} | asdict(report.too_long),
        "lengths": asdict(count_lengths(rows.lengths)),
        "batches": {
            "unit": "row" if batches.packs is None else "pack",
            "units": batches.units,
            "pack_length": None if batches.packs is None else batches.max_length,
            "units_per_step": batches.units_per_step,
            "steps_per_epoch": batches.steps_per_epoch,
            "processes": batches.world_size,
            "fill": batches.fill,
            "padding": padding_share(batches),
        },
        "units": [asdict(unit) for unit in units],
    }


def _name(tokenizer: Tokenizer, token: int | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": tokenizer.decode([token])}


def _tallies(key: str, tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    return [{key: what, "count": tally.count, "where": tally.where} for what, tally in tallies.items()]
