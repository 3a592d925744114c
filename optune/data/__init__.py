"""Data: from files of rows to microbatches. See docs/data.md for what is trained and what is left out.

A row's way: `sources.py` (file → JSON rows) → `formats.py` (row → conversation or text) → `template.py` and `spans.py`
(conversation → text with the answers found) → `encoding.py` (text → tokens with targets) → `rows.py` → `batching.py`.
"""

from optune.data.batching import Batches, ValidationBatches, build_batches, build_validation_batches
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
