"""Runs one benchmark: `python -m scripts.bench COMMAND …` from the repository's root."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "setup": "makes the peers' environments, the model and the rows",
    "peers": "optune beside torchtune, TRL and LitGPT: tokens/s, memory, time to the first step, installed size",
    "scaling": "optune's step over batch, length and accumulation; the memory of the loss",
    "roofline": "the machine's matmul rate for the model's shapes, and what the step reaches of it",
    "kernels": "a step with the native kernels and without",
    "steppers": "step time and memory of every value of optimizer_step, alternating in one process",
    "save": "how long training stands still at a save",
    "data": "seconds from a file of chats to rows of tokens, beside datasets and transformers",
    "streaming": "how soon a run starts on a file larger than memory, and what it holds",
    "report": "writes tables and plots into docs/ from the results",
}


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] not in COMMANDS:
        lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
        usage = "\n".join(["python -m scripts.bench COMMAND [--help]", *lines])
        if words and words[0] in ("-h", "--help"):
            print(usage)
            return
        raise SystemExit(usage)
    sys.argv = [f"python -m scripts.bench {words[0]}", *words[1:]]
    importlib.import_module(f"scripts.bench.{words[0]}").main()


if __name__ == "__main__":
    main()
