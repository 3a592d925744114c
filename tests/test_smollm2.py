"""The real small model: SmolLM2-135M-Instruct on 200 chats, and its result in other tools."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
QUESTIONS = ("What is the plural of wolf?", "Which number comes after 41?")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="needs the model that scripts/get_smollm2 fetches"),
]


def optune(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [forked.python(), "-m", "tune_cli.main", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(recipe: str, config: str, model: Path, run: Path, *overrides: str) -> list[float]:
    """The losses of a run on 200 chats."""
    rows = run.parent / "rows.jsonl"
    lines = (ROOT / "assets/tiny/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    rows.write_text("".join(lines[:200]), encoding="utf-8")
    places = [f"model.path={model}", f"data.train={rows}", f"output_dir={run}"]
    optune(run.parent, "run", recipe, "--config", config, *places, *overrides)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def answers_elsewhere(model: Any, folder: Path) -> list[str]:
    """Greedy answers by transformers' own generate."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return answers


def answers_here(folder: Path, model: Path) -> list[str]:
    return [
        optune(folder, "generate", str(model), "--prompt", question, "--max-new-tokens", "24").strip()
        for question in QUESTIONS
    ]


def test_full_finetune_learns_answers_alike_in_transformers_and_is_where_the_next_run_starts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = train("full_finetune", "smollm2/135m_full", MODEL, tmp_path / "first", "max_steps=6", "optimizer.lr=2e-4")
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    result = tmp_path / "first" / "model"
    model = AutoModelForCausalLM.from_pretrained(result, dtype=torch.bfloat16)
    assert answers_here(tmp_path, result) == answers_elsewhere(model, result)
    # Without state and masters, which take longer to save than the step does.
    light = ["model.master_weights=null", "optimizer._target_=torch.optim.SGD", "optimizer.lr=0"]
    (loss,) = train("full_finetune", "smollm2/135m_full", result, tmp_path / "second", "max_steps=1", *light)
    assert loss < 0.7 * losses[0]


# PEFT asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_finetune_learns_and_answers_alike_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    losses = train("lora_finetune", "smollm2/135m_lora", MODEL, tmp_path / "run", "max_steps=10", "optimizer.lr=1e-3")
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    adapter = tmp_path / "run" / "model"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16), adapter)
    assert answers_here(tmp_path, adapter) == answers_elsewhere(model, adapter)
