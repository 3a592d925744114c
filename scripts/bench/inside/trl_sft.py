"""What a user of TRL writes: an SFTTrainer over rows of token ids. `trl_sft.py SETTINGS.json`, see `contestants.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

settings = json.loads(Path(sys.argv[1]).read_text())
rows = [json.loads(line)["tokens"] for line in Path(settings["rows"]).read_text().splitlines()]
model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
adapter = None
if settings["lora"] is not None:
    from peft import LoraConfig

    adapter = LoraConfig(task_type="CAUSAL_LM", **settings["lora"])
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(**settings["training"]),
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    peft_config=adapter,
)
trainer.train()
