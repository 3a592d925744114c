"""Tiny runs against a loop written here with transformers, PEFT and plain torch: the first 20 losses and the weights.

The loop is the textbook one: rows rendered by transformers, masks by hand, mean loss over the step's targets, clip,
AdamW, cosine with warm-up. Nothing of optune is imported here but what runs the command line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests import fixtures
from tests.recipes.running import read_tensors, run, write_inputs

# PEFT calls what transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

STEPS, BATCH, ACCUMULATION, LR, WARMUP = 20, 2, 2, 1e-2, 3


def masked_rows(folder: Path, path: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids of each chat and its labels: the answer and its end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for line in path.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        end = whole.index(tokenizer.eos_token_id, len(prompt)) + 1
        rows.append((whole, [-100] * len(prompt) + whole[len(prompt) : end] + [-100] * (len(whole) - end)))
    return rows


def cosine(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train_reference(model: torch.nn.Module, rows, learning_rates) -> list[float]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.1)
    losses, per_step = [], BATCH * ACCUMULATION
    for step in range(STEPS):
        start = step * per_step % len(rows)
        batch = rows[start : start + per_step]
        targets = sum(label != -100 for _, labels in batch for label in labels)
        total = 0.0
        for ids, labels in batch:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rates[step]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_inputs(tmp_path, rows=16)


OVERRIDES = [
    f"batch_size={BATCH}",
    f"gradient_accumulation_steps={ACCUMULATION}",
    "epochs=5",
    f"optimizer.lr={LR}",
    f"schedule.warmup_steps={WARMUP}",
    "data.shuffle=false",
]


def compare(losses, weights, expected_losses, expected_weights) -> None:
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_full_finetune_equals_a_plain_loop_over_transformers(config: Path, tmp_path: Path):
    ours = run("full_finetune", config, tmp_path / "run", *OVERRIDES)
    rates = [line["lr"] for line in ours.metrics]
    assert rates == pytest.approx([cosine(step) for step in range(STEPS)], rel=1e-6, abs=1e-12)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m0", dtype=torch.float32)
    losses = train_reference(model, masked_rows(tmp_path / "m0", tmp_path / "train.jsonl"), rates)
    expected = dict(model.state_dict())
    compare(ours.losses, ours.weights, losses, expected)
    assert losses[-1] < 0.6 * losses[0]


def test_lora_finetune_equals_a_plain_loop_over_peft(config: Path, tmp_path: Path):
    targets = "lora.targets=[q_proj,v_proj,down_proj]"
    untrained = ["optimizer.lr=0", "max_steps=1", "schedule.warmup_steps=0"]
    start = run("lora_finetune", config, tmp_path / "start", *OVERRIDES, targets, *untrained)
    ours = run("lora_finetune", config, tmp_path / "run", *OVERRIDES, targets)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m0", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start" / "model", is_trainable=True)
    initial = peft.get_peft_model_state_dict(model)
    assert all(torch.equal(start.weights[name], tensor) for name, tensor in initial.items())
    rates = [line["lr"] for line in ours.metrics]
    losses = train_reference(model, masked_rows(tmp_path / "m0", tmp_path / "train.jsonl"), rates)
    compare(ours.losses, ours.weights, losses, peft.get_peft_model_state_dict(model))
    assert losses[-1] < losses[0]


def test_the_trained_adapter_is_what_peft_reads(config: Path, tmp_path: Path):
    ours = run("lora_finetune", config, tmp_path / "run", *OVERRIDES)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m0", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, ours.folder / "model")
    read = peft.get_peft_model_state_dict(model)
    assert read.keys() == read_tensors(ours.folder / "model").keys()
    assert all(tensor.abs().sum() > 0 for tensor in read.values())
    assert len(fixtures.VOCABULARY) == base.config.vocab_size
