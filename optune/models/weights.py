"""Weights of a Hugging Face folder: every objection is found from the headers; then tensors go straight into place.

Nothing is unpickled. Only safetensors files are read, a single one or shards with an index.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optune import memory
from optune.errors import ModelError
from optune.models.decoder import Decoder, outline
from optune.models.families import DecoderConfig, read_config
from optune.models.hub import resolve
from optune.shards import (
    FLOATS,
    StoredTensor,
    have_same_bytes,
    is_read_directly,
    local_values,
    materialize,
    read_header,
    read_part,
    read_tensor,
)
from optune.types import split_packed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_READERS = 2
"""Tensors that are read at a time, where no memory beside the model is needed for it: most of the work is to get new
memory from the system, a page at a time."""

# Tables that older versions of transformers wrote beside the weights; the decoder computes them.
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


@dataclass
class _Inspection:
    """What `config.json` and the headers of a folder say."""

    folder: Path
    config: DecoderConfig | None = None
    sources: dict[str, StoredTensor] = field(default_factory=dict)
    """Where the tensor of each parameter is stored."""
    problems: list[str] = field(default_factory=list)
    hint: str | None = None


def check(path: str | Path, *, weights: bool = True) -> DecoderConfig:
    """Reads `config.json` and tensor headers, and raises one `ModelError` with everything that is wrong. Without
    `weights` there need be none.

    Weight data is read in one case only: where a tied model stores a head as well, the two are compared.
    """
    return _inspect(resolve(path, weights=weights), weights=weights)[1]


def load(path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The model in `path`, a folder or hub id, with all weights as `dtype`; memory holds each weight once.

    Raises `ModelError` as `check` does, before any weight is read.
    """
    inspection, config = _inspect(resolve(path))
    model = outline(config)
    for name, stored in inspection.sources.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(read_tensor(stored, dtype, device)))
    model.tie()
    return model


def fill(model: nn.Module, path: str | Path, *, device: torch.device | str) -> None:
    """Gives `model` the weights in `path`, a folder or hub id; of a spread model each rank reads its own slices alone.

    `model` is a Decoder or holds one's parameters by the same names: plain tensors or DTensors, spread over ranks in
    any way, with or without adapters. Values are rounded to the dtype of each parameter; a `PackedWeight` in the place
    of a parameter takes the whole tensor and makes of it what it holds. A model on the meta device gets its memory
    here, on `device`; what the folder does not hold, such as adapters, is NaN then. Host memory beside the model: the
    largest slice of one tensor, or the whole of it where it is packed.

    Raises `ModelError` as `check` does, and where the folder is of another model, before any weight is read.
    """
    inspection, _ = _inspect(resolve(path))
    own, packed = split_packed(model)
    shapes = {name: each.shape for name, each in (*own.items(), *packed.items())}
    found = {name: stored.shape for name, stored in inspection.sources.items()}
    problems = compare_shapes(
        found, {name: shape for name, shape in shapes.items() if name in found or ".lora_" not in name}
    )
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ModelError(f"the folder holds another model:{listed}", where=str(inspection.folder))
    memory.begin()
    is_bare = set(materialize(model, device))
    direct: list[tuple[StoredTensor, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if name not in inspection.sources:
            if name in is_bare and name in own:
                local_values(parameter).fill_(float("nan"))
        elif is_read_directly(stored := inspection.sources[name], parameter):
            direct.append((stored, parameter))
        else:
            read_part(stored, parameter)
    with ThreadPoolExecutor(_READERS, "optune-reading") as readers:
        list(readers.map(lambda each: read_part(*each), direct))
    for name, weight in packed.items():
        stored = inspection.sources[name]
        weight.pack(read_tensor(stored, stored.dtype))


def expected_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight, a tied head left out."""
    return {name: parameter.shape for name, parameter in outline(config).named_parameters()}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model folder, or a `ModelError` that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("the file is missing", where=str(file)) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"the file cannot be read: {error}", where=str(file)) from None
    if not isinstance(content, dict):
        raise ModelError("the file must hold a JSON object", where=str(file))
    return content


def compare_shapes(found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> list[str]:
    """Every missing, unexpected and misshapen tensor, one line each."""
    problems = [f"missing tensor {name}, shape {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [
        f"unexpected tensor {name}, shape {list(shape)}" for name, shape in found.items() if name not in expected
    ]
    return problems + [
        f"misshapen tensor {name}: the file has {list(found[name])}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]


def _inspect(folder: Path, *, weights: bool = True) -> tuple[_Inspection, DecoderConfig]:
    inspection = _Inspection(folder)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ModelError(
            "the folder holds an adapter, not a model",
            where=str(folder),
            hint="give the model that the adapter belongs to, or merge the two with `optune export --merge`",
        )
    config, problems = read_config(read_json(folder / "config.json"))
    inspection.problems += [f"config.json: {problem}" for problem in problems]
    files = _weight_files(inspection) if weights else None
    if config is not None and files is not None:
        _match(inspection, config, files)
    if inspection.problems or config is None:
        count = len(inspection.problems)
        listed = "".join(f"\n  {problem}" for problem in inspection.problems)
        said = f"the model cannot be loaded: {count} {'thing is' if count == 1 else 'things are'} wrong{listed}"
        raise ModelError(said, where=str(folder), hint=inspection.hint)
    inspection.config = config
    return inspection, config


_Headers = dict[str, StoredTensor]


def _weight_files(inspection: _Inspection) -> _Headers | None:
    """The header entry of every stored tensor; None where the files themselves are at fault."""
    folder, problems = inspection.folder, inspection.problems
    before, index = len(problems), {}
    files = [folder / SINGLE_FILE]
    if not files[0].exists() and (folder / INDEX_FILE).exists():
        index = _read_index(inspection)
        files = [folder / name for name in dict.fromkeys(index.values())]
    elif not files[0].exists():
        _say_no_weights(inspection)
    headers: _Headers = {}
    for file in files if len(problems) == before else ():
        try:
            read = read_header(file)
        except ModelError as error:
            problems.append(str(error))
            inspection.hint = "copy or download the model again"
            continue
        twice = [name for name in read if name in headers]
        problems += [f"tensor {name} is stored twice, in {headers[name].file.name} and {file.name}" for name in twice]
        headers |= read
    if len(problems) == before:
        lost = [(name, file) for name, file in index.items() if name not in headers or headers[name].file.name != file]
        problems += [f"{INDEX_FILE}: tensor {name} is not in {file}" for name, file in lost]
    return headers if len(problems) == before else None


def _read_index(inspection: _Inspection) -> dict[str, str]:
    entries = read_json(inspection.folder / INDEX_FILE).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        inspection.problems.append(f"{INDEX_FILE}: weight_map is missing or empty")
        return {}
    # An index must not point out of its folder.
    wrong = [name for name in entries.values() if not isinstance(name, str) or Path(name).name != name]
    inspection.problems += [f"{INDEX_FILE}: {name!r} is not the name of a file in the folder" for name in wrong]
    return {} if wrong else entries


def _say_no_weights(inspection: _Inspection) -> None:
    inspection.problems.append(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}")
    pickled = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in inspection.folder.glob(pattern)
    )
    if pickled:
        inspection.problems.append(f"{', '.join(pickled)}: pickled weights are not read; they can run code")
        inspection.hint = "convert the model to safetensors, with transformers: save_pretrained(folder)"


def _match(inspection: _Inspection, config: DecoderConfig, headers: _Headers) -> None:
    """Says for every parameter where its tensor is stored, or what is wrong with the set of tensors."""
    expected = expected_shapes(config)
    found = {name: stored for name, stored in headers.items() if not _LEFTOVER.search(name)}
    foreign = [(name, stored.kind) for name, stored in found.items() if stored.kind not in FLOATS]
    if config.tie_word_embeddings and HEAD in found:
        # Like transformers: whichever of the two is stored is both. Both may be, if they are equal.
        head = found.pop(HEAD)
        if EMBEDDING in found and not foreign:
            _check_tied(inspection, head, found[EMBEDDING])
        found.setdefault(EMBEDDING, head)
    inspection.problems += compare_shapes({name: stored.shape for name, stored in found.items()}, expected)
    inspection.problems += [f"tensor {name} holds {kind}; known are {', '.join(FLOATS)}" for name, kind in foreign]
    if HEAD in expected and HEAD not in found and EMBEDDING in found:
        inspection.hint = "if the head is the embedding, set tie_word_embeddings to true in config.json"
    inspection.sources = {name: found[name] for name in expected if name in found}


def _check_tied(inspection: _Inspection, head: StoredTensor, embedding: StoredTensor) -> None:
    """Refuses a head of its own in a tied model: tools disagree on which of the two tensors is meant."""
    alike = head.kind == embedding.kind and head.shape == embedding.shape
    if not alike or not have_same_bytes(head, embedding):
        inspection.problems.append(
            f"config.json: tie_word_embeddings is True, but {HEAD} and {EMBEDDING} are both stored and differ"
        )
        inspection.hint = f"set tie_word_embeddings to false to use both, or remove {HEAD} to tie the two"
