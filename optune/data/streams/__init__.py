"""Rows that are read while training goes on, for files that are larger than memory.

The way of a row: `windows.py` (so many rows of the files) → `blocks.py` (some of them, encoded) → `batches.py` (steps).
`position.py` says where a step begins, which is what a checkpoint keeps; `preview.py` looks at the first window.
"""
