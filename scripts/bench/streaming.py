"""How soon a run starts on a JSONL file that is larger than memory, and how much memory it needs.

    python -m scripts.bench streaming --gib 5

Writes a file of chats, drops it from the page cache, and starts `optune run full_finetune` with data.streaming on the
tiny model: seconds from process start to the first logged step, and of the processor's time in them, the largest
resident set of the process, seconds a step. The same with packing, and, to compare, with the file's first 100 rows in
memory. Then the place of a checkpoint deep in the file is sought: seconds to the first rows behind it. The file is
deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets/tiny/model"
CONFIG = """\
model: {{path: {model}, dtype: fp32}}
data: {{train: {path}, format: messages, max_length: 512, streaming: true}}
batch_size: 8
max_steps: {steps}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
device: cpu
"""


def write_file(path: Path, gib: float) -> int:
    """Chats of 30 to 300 words, written over and over in blocks of 5,000; the number of rows."""
    draw = random.Random(0)
    words = [json.loads(line)["messages"][1]["content"].split() for line in (ROOT / "assets/tiny/train.jsonl").open()]
    pool = [word for row in words for word in row]

    def row() -> str:
        question, answer = draw.choices(pool, k=draw.randint(10, 100)), draw.choices(pool, k=draw.randint(20, 200))
        turns = [{"role": "user", "content": " ".join(question)}, {"role": "assistant", "content": " ".join(answer)}]
        return json.dumps({"messages": turns}) + "\n"

    block = "".join(row() for _ in range(5000)).encode()
    count = max(1, int(gib * 2**30 / len(block)))
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return 5000 * count


def measure(config: Path, output: Path, *overrides: str) -> dict[str, float]:
    """One run; `start_s` until its first step is logged, `cpu_s` the processor's time until then."""
    command = [sys.executable, "-m", "tune_cli.main", "run", "full_finetune", "--config", str(config)]
    command += [f"output_dir={output}", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    log = (config.parent / "stderr.txt").open("w")
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    watched, peak, first, cpu = psutil.Process(process.pid), 0, 0.0, 0.0
    metrics = output / "metrics.jsonl"
    while process.poll() is None:
        try:
            family = [watched, *watched.children(recursive=True)]
            peak = max(peak, sum(each.memory_info().rss for each in family))
            if not first:
                cpu = sum(sum(each.cpu_times()[:2]) for each in family)
        except psutil.NoSuchProcess:
            pass
        if not first and metrics.exists() and b"\n" in metrics.read_bytes():
            first = time.monotonic() - started
        time.sleep(0.02)
    log.close()
    if process.returncode:
        raise SystemExit((config.parent / "stderr.txt").read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steady = sum(line["step_s"] for line in lines[1:]) / (len(lines) - 1)
    return {"start_s": first, "cpu_s": cpu, "peak_mib": peak / 2**20, "step_s": steady, "tokens": lines[-1]["tokens"]}


def seek_deep(path: Path, share: float) -> float:
    """Seconds until the rows of the first step behind a place at `share` of the file are there."""
    from optune import data

    offset = int(path.stat().st_size * share)
    with path.open("rb") as file:
        file.seek(offset)
        offset += len(file.readline())
    rows: Any = data.load_rows(str(path), data.load_tokenizer(MODEL), format="messages", max_length=512, streaming=True)
    batches: Any = data.build_batches(rows, batch_size=8)
    cursor = batches.cursor(0) | {"places": [[0, [offset, 1_000_000, 1_000_000]]], "window": 100}
    started = time.monotonic()
    batches.seek(125_000, json.loads(json.dumps(cursor)))
    batches.microbatches(125_000)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary folder")
    parser.add_argument("--file", type=Path, help="a JSONL file of chats to read instead of writing one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, config = options.file or Path(folder) / "rows.jsonl", Path(folder) / "config.yaml"
        if options.file is None:
            print(f"{write_file(path, options.gib):,} rows")
        print(
            f"{path.stat().st_size / 2**30:.2f} GiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True
        )
        config.write_text(CONFIG.format(model=MODEL, path=path, steps=options.steps))
        first = f"data.train={{path: {path}, max_rows: 100}}"
        for name, overrides in (
            ("in memory", (first, "data.streaming=false", "data.cache=null", "epochs=9")),
            ("rows", ()),
            ("packs", ("data.packing=true", "batch_size=2")),
        ):
            found = measure(config, Path(folder) / name, *overrides)
            print(name, ", ".join(f"{key} {value:,.2f}" for key, value in found.items()), flush=True)
        print(f"first rows behind a place at 80 % of the file: {seek_deep(path, 0.8):.2f} s")


if __name__ == "__main__":
    main()
