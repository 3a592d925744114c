"""Rows of token ids for torchtune, which has no reader for them; its config names these classes by `_component_`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset


class Rows(Dataset):
    """`path` holds `{"tokens": […]}` lines; every token is trained."""

    def __init__(self, tokenizer: Any, path: str, packed: bool = False) -> None:
        self.rows = [json.loads(line)["tokens"] for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[index], "labels": self.rows[index]}


class NoTokenizer:
    """The rows are ids already; the recipe asks for these two numbers alone."""

    def __init__(self, path: str | None = None, pad_id: int = 2, max_seq_len: int | None = None) -> None:
        self.pad_id, self.max_seq_len = pad_id, max_seq_len
