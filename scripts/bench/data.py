"""Seconds from a file of chats to rows of tokens: optune, and `datasets` with transformers, in turn.

    python -m scripts.bench data models/SmolLM2-135M-Instruct --rows 100000

The chats are made by a seeded generator: one to three questions and answers each, words drawn by a law of Zipf from the
tokenizer's own words and from compounds of two of them. Each contestant runs in a process of its own, from the start of
Python to the last row, with an empty cache; every one gets a turn before anyone gets a second one. optune marks the
targets too; `reference` does so with --mask, which is what TRL's `assistant_only_loss` asks transformers for.

Wall time depends on what else the machine does, so the CPU time of all processes stands beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAGGED = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"


def write_chats(path: Path, count: int, model: Path, seed: int = 0) -> None:
    """`count` rows in OpenAI's form; the same for the same arguments."""
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = [token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].isascii() and token[1:].islower()]
    words = sorted(word for word in words if word.isalpha())
    chance = random.Random(seed)
    chance.shuffle(words)
    known = len(words)
    words += [words[chance.randrange(known)] + words[chance.randrange(known)] for _ in range(4 * known)]
    # With this exponent a million words hold 38,000 different ones, as in Reuters' news (Manning, Raghavan and Schütze,
    # "Introduction to Information Retrieval", 5.1.1).
    share = list(itertools.accumulate((rank + 2.7) ** -1.3 for rank in range(len(words))))

    def text(length: int) -> str:
        said = chance.choices(words, cum_weights=share, k=length)
        for place in range(0, length, 12):
            said[place] = said[place].capitalize()
            said[place - 1] += "."
        return " ".join(said)

    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            messages = [{"role": "system", "content": text(chance.randint(8, 25))}] if row % 3 == 0 else []
            for _ in range(chance.randint(1, 3)):
                messages.append({"role": "user", "content": text(chance.randint(8, 60))})
                messages.append({"role": "assistant", "content": text(chance.randint(20, 140))})
            file.write(json.dumps({"messages": messages}) + "\n")


def run_optune(rows: Path, model: Path, work: Path, mask: bool) -> dict[str, float]:
    from optune import data

    tokenizer = data.load_tokenizer(model)
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    load_rows = data.load_rows  # read before the clock starts
    started = time.perf_counter()
    loaded = load_rows(rows, tokenizer, embedding_rows=vocabulary, cache=work / "optune")
    return {"load_rows_s": time.perf_counter() - started, "tokens": len(loaded.tokens)}


def run_reference(rows: Path, model: Path, work: Path, mask: bool) -> dict[str, float]:
    import datasets
    from pyarrow import compute
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if mask:
        template = tokenizer.chat_template
        written = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        if written not in template:
            raise SystemExit("--mask knows where to put the generation tags in SmolLM2's template only")
        spoken = written.replace(" + message['content'] + '<|im_end|>' + '\n'", "")
        answer = f"{{% if message['role'] == 'assistant' %}}{spoken}{_TAGGED}{{% else %}}{written}{{% endif %}}"
        tokenizer.chat_template = template.replace(written, answer)

    def encode(batch: dict[str, Any]) -> Any:
        return tokenizer.apply_chat_template(
            batch["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=mask
        )

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(work / "datasets"))
    done = loaded.map(encode, batched=True, num_proc=2, remove_columns=loaded.column_names)
    return {"tokens": compute.sum(compute.list_value_length(done.data.column("input_ids"))).as_py()}


def run_validate(rows: Path, model: Path, work: Path, mask: bool) -> dict[str, float]:
    """The whole command, from nothing to its exit, with the rows that `optune` has kept."""
    words = [
        "-m", "tune_cli.main", "validate", "full_finetune", "--config", "smollm2/135m_full", f"model.path={model}",
        f"data.train={rows}", f"data.cache={work / 'optune'}", "data.max_length=null", f"output_dir={work / 'run'}",
    ]  # fmt: skip
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {}


CONTESTANTS = {"optune": run_optune, "reference": run_reference, "warm": run_optune, "validate": run_validate}
"""In the order of their turns: `warm` and `validate` find the rows that `optune` has kept."""


def measure(name: str, rows: Path, model: Path, work: Path, mask: bool) -> dict[str, float]:
    """Wall and CPU seconds of a process of its own, and what it says of itself."""
    command = [
        sys.executable,
        "-m",
        "scripts.bench.data",
        str(model),
        "--be",
        name,
        "--data",
        str(rows),
        "--work",
        str(work),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [*command, *(["--mask"] if mask else [])], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s} | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder with tokenizer and chat template")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--mask", action="store_true", help="the reference marks the answers too")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--be", choices=sorted(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        said = CONTESTANTS[arguments.be](arguments.data, arguments.model, arguments.work, arguments.mask)
        print(json.dumps(said))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(
            arguments.model.resolve(), Path(folder), arguments.only, arguments.rows, arguments.repeat, arguments.mask
        )


def compare(model: Path, folder: Path, names: list[str], count: int, repeat: int, mask: bool) -> None:
    rows = folder / "chats.jsonl"
    write_chats(rows, count, model)
    print(f"{count:,} chats, {rows.stat().st_size / 2**20:.0f} MiB, load {os.getloadavg()[0]:.1f}", flush=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(repeat):
        work = folder / str(turn)
        work.mkdir()
        for name in names:
            found[name].append(measure(name, rows, model, work, mask))
            print(name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    middle = {
        name: {key: statistics.median(one[key] for one in turns) for key in turns[0]} for name, turns in found.items()
    }
    if not {"optune", "reference"} <= middle.keys():
        return
    if middle["optune"]["tokens"] != middle["reference"]["tokens"]:
        raise SystemExit("the contestants made different tokens")
    for key in ("wall_s", "cpu_s"):
        print(
            f"tokens per second, optune to reference, by {key}: {middle['reference'][key] / middle['optune'][key]:.2f}"
        )


if __name__ == "__main__":
    main()
