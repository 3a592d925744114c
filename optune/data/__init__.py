"""Data: from files of rows to microbatches. See docs/data.md for what is trained and what is left out.

A row's way: `sources/` (file → JSON rows) → `formats.py` (row → conversation or text) → `template.py` and `spans.py`
(conversation → text with the answers found) → `encoding.py` (text → tokens with targets) → `rows.py` → `batches.py`.
Many rows go that way in worker processes (`workers.py`) and only once (`cache.py`); those that are streamed go it a few
at a time (`streams/`).

A name is read from its file when it is first used: the worker processes must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optune.data.batches import Batches
    from optune.data.batching import ValidationBatches, build_batches, build_validation_batches
    from optune.data.loading import load_pairs, load_rows
    from optune.data.rows import Report, Row, Rows, Tally
    from optune.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batches",
    "Report",
    "Row",
    "Rows",
    "Tally",
    "Tokenizer",
    "ValidationBatches",
    "build_batches",
    "build_validation_batches",
    "load_pairs",
    "load_rows",
    "load_tokenizer",
]

_FILES = {
    "Batches": "batches",
    "ValidationBatches": "batching",
    "build_batches": "batching",
    "build_validation_batches": "batching",
    "load_pairs": "loading",
    "load_rows": "loading",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'optune.data' has no attribute {name!r}")
    module = importlib.import_module(f"optune.data.{_FILES.get(name, 'rows')}")
    value = globals()[name] = getattr(module, name)
    return value
