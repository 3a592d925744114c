"""`optune export CHECKPOINT DEST [--merge] [--dtype bf16|fp32]`: a folder that other tools load."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from optune.errors import ConfigError, OptuneError
from tune_cli import folders
from tune_cli.arguments import Parser

PROBE_TOKENS = 64
LIMITS = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""How far the logits of the merged model may lie from those of base and adapter, relative to the logits' size: what
rounding the weights once explains, with room."""


def run(words: list[str]) -> int:
    """Writes the folder aside, proves a merge by its logits, and only then gives it its name."""
    parser = Parser(
        "export",
        "CHECKPOINT DEST [--merge] [--dtype bf16|fp32]",
        "Writes a folder in Hugging Face layout that other tools load. CHECKPOINT is a checkpoint, a model, an\n"
        "adapter (also one that PEFT wrote) or a run folder. Weights keep their dtype unless --dtype says otherwise.",
    )
    parser.add_argument("--merge", action="store_true", help="fold the adapter into its base and compare the logits")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="what the weights are written as")
    options, others = parser.split(words)
    checkpoint, name = parser.take(others, "CHECKPOINT", "DEST")
    destination = Path(name).expanduser().absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError("is there already, and not empty", where=str(destination), hint="choose another DEST")
    folder = folders.find(checkpoint)
    if options.merge and folder.adapter is None:
        raise ConfigError("--merge folds an adapter into its base, and there is no adapter", where=str(folder.base))
    if folder.adapter and options.dtype and not options.merge:
        raise ConfigError("--dtype needs --merge: an adapter keeps the dtype that it was trained in")

    from optune import files

    aside = destination.with_name(f"{files.ASIDE}{destination.name}")
    files.remove_tree(aside)
    aside.mkdir(parents=True)
    try:
        _write(folder, aside, options.merge, options.dtype)
        files.sync_tree(aside)
        files.replace_folder(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(destination)
    return 0


def _write(folder: folders.ModelFolder, target: Path, merge: bool, dtype: str | None) -> None:
    from optune import lora, models

    if folder.adapter and not merge:
        for file in (lora.CONFIG_FILE, lora.WEIGHTS_FILE):
            shutil.copyfile(folder.adapter / file, target / file)
        models.copy_companions(folder.adapter, target)
        return
    models.check(folder.base)
    stored = folders.read_dtype(folder.base)
    dtype = dtype or stored
    _say(f"weights are written as {dtype}" + ("" if dtype == stored else f" (the base holds {stored})"))
    # Rounded once: a wider dtype than the base's is taken before the merge, a narrower one when it is written.
    wide = "fp32" if "fp32" in (dtype, stored) else stored
    model: Any = models.load(folder.base, dtype=folders.to_torch(wide)).eval()
    before = after = None
    if folder.adapter:
        plain = _probe(model)
        lora.load(model, folder.adapter)
        before = _probe(model.eval())
        lora.merge(model)
        _say(f"the adapter moves the logits by {_distance(plain, before):.1e} of their size")
    models.save(model, target, source=folder.base, dtype=folders.to_torch(dtype))
    models.copy_companions(folder.own, target)
    del model
    if before is not None:
        after = _probe(models.load(target, dtype=folders.to_torch(dtype)).eval())
        _judge(before, after, dtype, target)


def _judge(before: Any, after: Any, dtype: str, target: Path) -> None:
    """Refuses a merge whose logits are not those of base and adapter."""
    distance = _distance(before, after)
    agree = int((before.argmax(-1) == after.argmax(-1)).sum())
    _say(f"the merged weights, read back, give logits within {distance:.1e} of base and adapter; "
         f"the likeliest token is the same at {agree} of {before.shape[-2]} positions")  # fmt: skip
    if not distance <= LIMITS[dtype]:
        raise OptuneError(
            f"the merged model is not the same model: its logits differ by {distance:.1e} of their size, and "
            f"{dtype} explains {LIMITS[dtype]:.0e}; nothing was written",
            hint="--dtype fp32 keeps more of the adapter" if dtype != "fp32" else None,
        )


def _probe(model: Any) -> Any:
    """Logits in fp32 for a fixed row of tokens spread over the vocabulary."""
    import torch

    vocabulary = model.config.vocab_size
    tokens_BT = (torch.arange(PROBE_TOKENS) * 7919 % vocabulary)[None]
    with torch.no_grad():
        return model(tokens_BT).float()


def _distance(first: Any, second: Any) -> float:
    """The root mean square of the difference, as a share of the first one's."""
    return float((first - second).square().mean().sqrt() / first.square().mean().sqrt())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
