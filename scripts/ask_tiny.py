"""Asks models the held-out questions of `assets/tiny/validation.jsonl` and counts the right answers.

    python scripts/ask_tiny.py assets/tiny/model runs/demo/model     # before and after

One question of each kind is printed with its answers.
An answer is right when it is the expected one, letter by letter. Decoding is greedy.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import torch

from optune import data, generation, models

ROWS = Path(__file__).resolve().parent.parent / "assets" / "tiny" / "validation.jsonl"
MAX_NEW_TOKENS = 40
BATCH_SIZE = 48


def answer(folder: Path, questions: list[str]) -> list[str]:
    """What the model in `folder` says to each question through its chat template."""
    model = models.load(folder, dtype=torch.float32)
    tokenizer = data.load_tokenizer(folder)
    prompts = [
        tokenizer.encode(
            tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True), special=True
        )
        for question in questions
    ]
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = generation.generate(
            model,
            prompts[start : start + BATCH_SIZE],
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=generation.read_stop_ids(folder, tokenizer),
            temperature=0.0,
        )
        answers += [tokenizer.decode(ids).strip() for ids in batch]
    return answers


def one_line(text: str, width: int) -> str:
    return textwrap.shorten(text.replace("\n", " / "), width, placeholder=" …") or "(nothing)"


def kind(expected: str) -> str:
    """What sort of question it is, told by the beginning of the answer."""
    first, second, *_ = expected.split()
    return second if first == "The" or first.isdigit() else first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--show", type=int, default=10, help="how many questions to print with their answers")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail unless the last model gets this share right")
    arguments = parser.parse_args()
    rows = [json.loads(line)["messages"] for line in ROWS.read_text(encoding="utf-8").splitlines()]
    questions, expected = [row[0]["content"] for row in rows], [row[1]["content"] for row in rows]
    given = {str(folder): answer(folder, questions) for folder in arguments.models}
    width = max(map(len, given))
    kinds = {kind(answer): index for index, answer in reversed(list(enumerate(expected)))}
    for index in sorted(kinds.values())[: arguments.show]:
        print(one_line(questions[index], 78))
        for folder, answers in given.items():
            mark = "✓" if answers[index] == expected[index] else "✗"
            print(f"  {mark} {folder:<{width}}  {one_line(answers[index], 74 - width)}")
    right = {
        folder: sum(one == other for one, other in zip(answers, expected, strict=True))
        for folder, answers in given.items()
    }
    for folder, count in right.items():
        print(f"{folder}: {count} of {len(rows)} held-out questions answered right")
    if (share := list(right.values())[-1] / len(rows)) < arguments.at_least:
        raise SystemExit(f"error: {share:.0%} right answers are fewer than {arguments.at_least:.0%}")


if __name__ == "__main__":
    main()
