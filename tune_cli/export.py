"""`optune export CHECKPOINT DEST [--merge]`: a folder that other tools load."""

from __future__ import annotations

import sys

from tune_cli.arguments import Parser


def run(words: list[str]) -> int:
    """Writes the folder, says on stderr what was done and how a merge was proved, and prints the folder."""
    parser = Parser(
        "export",
        "CHECKPOINT DEST [--merge] [--onto stored|trained] [--base MODEL] [--dtype bf16|fp16|fp32]",
        "Writes a folder in Hugging Face layout that other tools load. CHECKPOINT is a checkpoint, a model, an\n"
        "adapter (also one that PEFT wrote) or a run folder. A merge compares logits before it is called done.",
    )
    parser.add_argument("--merge", action="store_true", help="add the adapter to its base: a whole model")
    parser.add_argument("--base", metavar="MODEL", help="where the adapter's base is, if not where the adapter says")
    parser.add_argument(
        "--onto",
        metavar="BASE",
        help="of a base quantized in training: stored, its own weights (usual), or trained, the quantized ones",
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; otherwise the weights keep theirs")
    options, others = parser.split(words)
    checkpoint, destination = parser.take(others, "CHECKPOINT", "DEST")

    from optune.export import export

    report = export(
        checkpoint, destination, merge=options.merge, dtype=options.dtype, base=options.base, onto=options.onto
    )
    for line in report.lines():
        print(line, file=sys.stderr)
    print(report.folder)
    return 0
