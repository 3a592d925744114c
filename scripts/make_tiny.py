"""Makes the tiny model and its finetuning rows: `assets/tiny/`. A few minutes on two cores.

The model is a Llama of 4 blocks and width 128, about a million parameters, that has read generated plain text
(`tiny_text.py`) and nothing else: a base model that knows some facts and can go on with a text, but has never seen a
question. With the same seed and thread count the same files come out; between kinds of processor the weights may differ
in the last bits.

    python scripts/make_tiny.py                # everything
    python scripts/make_tiny.py --rows-only    # train.jsonl and validation.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tiny_text import plain_text, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DESTINATION = Path(__file__).resolve().parent.parent / "assets" / "tiny"
END_OF_TEXT, TURN, END_OF_TURN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
VOCABULARY_SIZE = 1024
BLOCK_LENGTH = 128
BATCH_SIZE = 16


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of `VOCABULARY_SIZE` tokens, digits one by one, learnt from plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(plain_text(seed=1), 20_000), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Blocks of plain text, each paragraph closed by the end-of-text token."""
    paragraphs = plain_text(seed)
    waiting: list[int] = []
    size = BATCH_SIZE * BLOCK_LENGTH
    while True:
        while len(waiting) < size:
            text = [paragraph + END_OF_TEXT for paragraph in islice(paragraphs, 200)]
            waiting += [token for encoding in tokenizer.encode_batch(text) for token in encoding.ids]
        yield torch.tensor(waiting[:size]).view(BATCH_SIZE, BLOCK_LENGTH)
        waiting = waiting[size:]


def train(tokenizer: Tokenizer, steps: int, peak_lr: float = 3e-3, warmup_steps: int = 100) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=ids[END_OF_TURN],
        pad_token_id=ids[END_OF_TEXT],
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [ids[END_OF_TURN], ids[END_OF_TEXT]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.05, betas=(0.9, 0.95), fused=True)
    started = time.monotonic()
    for step, tokens_BT in enumerate(islice(batches(tokenizer, seed=2), steps)):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak_lr * min((step + 1) / warmup_steps, decay)
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--destination", type=Path, default=DESTINATION)
    parser.add_argument("--rows-only", action="store_true")
    parser.add_argument("--steps", type=int, default=2500)
    arguments = parser.parse_args()
    write_rows(arguments.destination)
    if arguments.rows_only:
        return
    tokenizer = make_tokenizer()
    model = train(tokenizer, arguments.steps)
    folder = arguments.destination / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(tokenizer, folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
