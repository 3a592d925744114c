"""Rows of token ids for LitGPT, which has no reader for them: a data module of one's own, `--data litgpt_rows.Rows`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from litgpt.data import DataModule, get_sft_collate_fn
from torch.utils.data import DataLoader


class Rows(DataModule):
    """`path` holds `{"tokens": […]}` lines; every token is trained. Two rows are the validation that LitGPT wants."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.batch_size = 1

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **_: Any) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str = "") -> None:
        self.rows = []
        for line in Path(self.path).read_text().splitlines():
            tokens = torch.tensor(json.loads(line)["tokens"])
            counts = {"raw": len(tokens), "raw_plus_prompt_template": len(tokens)}
            self.rows.append({"input_ids": tokens, "labels": tokens.clone(), "token_counts": counts})

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.batch_size, collate_fn=get_sft_collate_fn())  # pyright: ignore

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows[:2], batch_size=self.batch_size, collate_fn=get_sft_collate_fn())  # pyright: ignore
