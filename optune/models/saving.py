"""A model as a Hugging Face folder: weights, config, and the files around them that other tools want."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from optune import shards
from optune.errors import ModelError
from optune.models.decoder import Decoder
from optune.models.families import read_config
from optune.models.weights import EMBEDDING, HEAD, INDEX_FILE, SINGLE_FILE, compare_shapes, expected_shapes, read_json

# What stands beside the weights and is copied as it is.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates",
)  # fmt: skip


def save(
    model_or_tensors: Decoder | shards.Tensors,
    folder: Path,
    *,
    source: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    changed: Mapping[str, str | None] | None = None,
    rank: int = 0,
) -> None:
    """Writes a folder that transformers, vLLM and `load` open: weights, `config.json`, tokenizer and template.

    `source` is the folder that the model came from: its config is written again with the new dtype, its tokenizer
    files, template and generation settings are copied, but for those in `changed` (see `copy_companions`). `dtype` None
    keeps the weights as they are. Beyond `max_shard_bytes` the weights are split, with an index. A tied head is written
    once, as the embedding.

    Where tensors are spread over several processes, each calls this with its own `rank` and writes its slices; the
    folder exists then, is the same for all, and is whole when all have returned.

    Raises `ModelError` where tensors and config do not belong together, or where `folder` already holds weights.
    """
    raw = read_json(source / "config.json")
    tensors = _collect(model_or_tensors, raw, source)
    is_spread = shards.is_spread(tensors)
    if rank:
        if is_spread:
            _write_weights(tensors, folder, dtype, max_shard_bytes, rank)
        return
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if old and not is_spread:  # Other ranks may have begun.
        raise ModelError(f"the folder already holds weights: {', '.join(old)}", where=str(folder))
    saved_dtype = dtype or tensors[EMBEDDING].dtype
    name = str(saved_dtype).removeprefix("torch.")
    keys = [key for key in ("torch_dtype", "dtype") if key in raw] or ["torch_dtype"]
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(raw | dict.fromkeys(keys, name), indent=2, ensure_ascii=False) + "\n", "utf-8")
    for file in _write_weights(tensors, folder, dtype, max_shard_bytes, rank if is_spread else None):
        file.chmod(config_file.stat().st_mode)  # safetensors makes files that nobody else can read.
    copy_companions(source, folder, changed)


def copy_companions(source: Path, folder: Path, changed: Mapping[str, str | None] | None = None) -> None:
    """Copies tokenizer files, chat templates and generation settings. Those in `changed` get the text there instead,
    or with None do not come along."""
    changed = changed or {}
    for name, text in changed.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8", newline="")
    for name in COMPANIONS:
        path = source / name
        if name in changed:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / name, dirs_exist_ok=True, copy_function=shutil.copyfile)
        elif path.exists():
            shutil.copyfile(path, folder / name)


def _collect(
    model_or_tensors: Decoder | shards.Tensors, raw: Mapping[str, object], source: Path
) -> dict[str, Tensor | shards.Part]:
    """The tensors to write, in the order of the model, checked against the config that will stand beside them."""
    config, problems = read_config(raw)
    if config is None:
        raise ModelError("; ".join(problems), where=str(source / "config.json"))
    tensors: dict[str, Tensor | shards.Part]
    if isinstance(model_or_tensors, Decoder):
        tensors = {name: parameter.detach() for name, parameter in model_or_tensors.named_parameters()}
    else:
        tensors = dict(model_or_tensors)
    if config.tie_word_embeddings and HEAD in tensors and EMBEDDING in tensors:
        head, embedding = _values(tensors.pop(HEAD)), _values(tensors[EMBEDDING])
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            problems.append(f"tie_word_embeddings is True, but {HEAD} and {EMBEDDING} differ")
    expected = expected_shapes(config)
    problems += compare_shapes({name: tensor.shape for name, tensor in tensors.items()}, expected)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ModelError(f"the weights do not belong to this config:{listed}", where=str(source / "config.json"))
    return {name: tensors[name] for name in expected}


def _values(tensor: Tensor | shards.Part) -> Tensor:
    """What this process holds of it."""
    if isinstance(tensor, shards.Part):
        return torch.empty(0) if tensor.values is None else tensor.values
    return shards.local_values(tensor)


def _write_weights(
    tensors: Mapping[str, Tensor | shards.Part],
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    rank: int | None,
) -> list[Path]:
    """Writes whole tensors, or with `rank` its slices of them, into as many files as they need."""

    def size(tensor: Tensor | shards.Part) -> int:
        return tensor.shape.numel() * (dtype or tensor.dtype).itemsize

    members: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if size(tensor) > room and members[-1]:
            members.append([])
            room = max_shard_bytes
        members[-1].append(name)
        room -= size(tensor)
    count = len(members)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_FILE]
    for file, names in zip(files, members, strict=True):
        if rank is not None:
            shards.write_file(folder / file, {name: tensors[name] for name in names}, rank=rank, dtype=dtype)
            continue
        whole = {name: _values(tensors[name]) for name in names}
        part = {name: tensor.to("cpu", dtype or tensor.dtype).contiguous() for name, tensor in whole.items()}
        save_file(part, folder / file, metadata={"format": "pt"})
    if count == 1 or rank:
        return [folder / file for file in files]
    index = {
        "metadata": {"total_size": sum(map(size, tensors.values()))},
        "weight_map": {name: file for file, names in zip(files, members, strict=True) for name in names},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return [folder / file for file in files]
