"""Adapter folders in PEFT's format, out and in: adapter_config.json and adapter_model.safetensors.

A tensor's key is `base_model.model.<layer>.lora_A.weight` (rank × in) or `….lora_B.weight` (out × rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from optune import shards
from optune.errors import ModelError
from optune.lora import adapter, peft_config
from optune.lora.layer import LoraLinear
from optune.lora.peft_config import AdapterConfig
from optune.lora.quantized import NF4, Nf4Linear, is_quantized

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
METADATA = {"format": "pt"}
QUANTIZATION = "base_quantization"
"""Beside `METADATA`: the format of the base's weights in training. Other tools pass over it."""
LISTED = 40
"""Tensors that an error names before it counts the rest."""


def save(
    model: nn.Module, folder: str | Path, *, base: str, tensors: shards.Tensors | None = None, rank: int = 0
) -> None:
    """Writes the adapters of `model` into `folder` so that PEFT and vLLM open it.

    `base`: what the adapter belongs to, a hub id or a folder; a folder that exists is written as an absolute path.
    `tensors`: the values to write, under the names of `state`; None takes those that the model has now. Tensors are
    written in the adapters' dtype.

    Where they are spread over several processes, each calls this with its own `rank` and writes its slices; the folder
    exists then, is the same for all, and is whole when all have returned.
    """
    folder = Path(folder)
    adapted = adapter.layers(model)
    if not adapted:
        raise ModelError("the model has no adapters to save")
    values = adapter.state(model) if tensors is None else tensors
    keyed = {f"{PREFIX}{name}": tensor for name, tensor in values.items()}
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        base = str(Path(base).resolve()) if Path(base).is_dir() else base
        peft_config.write(folder, model, adapted, base=base)
    metadata = METADATA | ({QUANTIZATION: NF4} if is_quantized(model) else {})
    if shards.is_spread(keyed):
        shards.write_file(folder / WEIGHTS_FILE, keyed, rank=rank, metadata=metadata)
    elif rank == 0:
        whole = {key: tensor for key, tensor in keyed.items() if isinstance(tensor, Tensor)}
        write_tensors(whole, folder, metadata)


def load(model: nn.Module, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Puts the adapter in `folder`, written by optune or PEFT, into `model`; returns the names of the adapted layers.

    A model without adapters gets the layers, ranks, scale and dropout that adapter_config.json says, in `dtype`, and is
    frozen but for them. A model with adapters must have the same ones, and gets their values; of adapters that are
    spread over processes each reads its own slices.

    Raises ModelError that lists, all at once, what the config says that cannot be honoured; then all tensors that are
    missing, unexpected or misshapen. The model is not changed then.
    """
    folder = Path(folder)
    config = peft_config.read(folder)
    names = config.select(model)
    if not names:
        raise ModelError(f"target_modules {config.target_modules!r} match no linear layer", where=str(config.path))
    tensors = _read_header(folder / WEIGHTS_FILE)
    problems = _compare_tensors(model, config, names, tensors) + _compare_base(model, names, tensors)
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise ModelError(
            "\n  ".join(["does not fit the model:", *problems[:LISTED], *more]), where=str(folder / WEIGHTS_FILE)
        )
    adapted = adapter.layers(model)
    if adapted:
        _check_same(config, names, adapted)
    else:
        adapter.check_free(model, names, where=str(config.path))
        _build(model, config, names, dtype)
    for name, target in adapter.state(model).items():
        shards.read_part(tensors[f"{PREFIX}{name}"], target)
    return names


def _build(model: nn.Module, config: AdapterConfig, names: list[str], dtype: torch.dtype) -> None:
    model.requires_grad_(False)
    for name in names:
        rank, alpha = config.settings(name)
        adapter.put(
            model,
            name,
            rank=rank,
            alpha=alpha,
            dropout=config.dropout,
            use_rslora=config.use_rslora,
            dtype=dtype,
        )


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, metadata: Mapping[str, str] = METADATA) -> None:
    """Writes adapter_model.safetensors, keys as they are, readable by whoever may read adapter_config.json."""
    path = folder / WEIGHTS_FILE
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, path, metadata=dict(metadata))
    # safetensors makes files that nobody else can read.
    path.chmod((folder / peft_config.CONFIG_FILE).stat().st_mode)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of adapter_model.safetensors by key. Raises ModelError where it is missing or damaged."""
    header = _read_header(folder / WEIGHTS_FILE)
    return {key: shards.read_tensor(stored, stored.dtype) for key, stored in header.items()}


def read_metadata(folder: Path) -> dict[str, str]:
    """What adapter_model.safetensors says of itself. Raises ModelError where it is missing or damaged."""
    _read_header(folder / WEIGHTS_FILE)
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return file.metadata() or {}


def read_quantization(folder: str | Path) -> str | None:
    """The format in which the adapter's base was held while it was trained: `nf4`, or None for plain weights.

    Raises ModelError for a format that is not known, and where the file is missing or damaged.
    """
    folder = Path(folder)
    said = read_metadata(folder).get(QUANTIZATION)
    if said not in (None, NF4):
        raise ModelError(f"{QUANTIZATION} is {said!r}, and known is {NF4}", where=str(folder / WEIGHTS_FILE))
    return said


def _read_header(path: Path) -> dict[str, shards.StoredTensor]:
    if not path.is_file():
        pickled = path.with_name("adapter_model.bin")
        hint = "adapter_model.bin is a pickle and is not opened: save it as safetensors" if pickled.exists() else None
        raise ModelError("there is no such file", where=str(path), hint=hint)
    try:
        return shards.read_header(path)
    except ModelError as error:
        raise ModelError(f"cannot be read: {error}", where=str(path)) from None


def _compare_tensors(
    model: nn.Module, config: AdapterConfig, names: list[str], tensors: Mapping[str, shards.StoredTensor]
) -> list[str]:
    """Missing, misshapen and unexpected adapter tensors, each in words."""
    problems: list[str] = []
    wanted = {}
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear | Nf4Linear | LoraLinear), name
        rank = config.settings(name)[0]
        wanted[f"{PREFIX}{name}.lora_A.weight"] = (rank, layer.in_features)
        wanted[f"{PREFIX}{name}.lora_B.weight"] = (layer.out_features, rank)
    for key, shape in wanted.items():
        if key not in tensors:
            problems.append(f"{key} is missing, {list(shape)} wanted")
        elif tuple(tensors[key].shape) != shape:
            problems.append(f"{key} is {list(tensors[key].shape)}, {list(shape)} wanted")
    unexpected = [key for key in tensors if key not in wanted and _base_parameter(key, names) is None]
    return problems + [f"{key} is unexpected" for key in unexpected]


def _compare_base(model: nn.Module, names: list[str], tensors: Mapping[str, shards.StoredTensor]) -> list[str]:
    """PEFT puts embedding and head beside the adapter when one of them is adapted or the vocabulary has grown.

    They are accepted where they are the base's own; other values would be lost, and other sizes need a resized base.
    """
    problems = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in tensors.items():
        name = _base_parameter(key, names)
        if name is None:
            continue
        own = parameters.get(name)
        if own is None:
            problems.append(f"{key} is unexpected")
        elif own.shape != tensor.shape:
            problems.append(
                f"{key} is {list(tensor.shape)} but the base's is {list(own.shape)}: the adapter was trained with "
                f"another size of vocabulary; resize the base model first, save it, and use that as the base"
            )
        elif own.device.type != "meta" and not _holds(tensor, own):
            problems.append(f"{key} differs from the base's: changed base weights beside an adapter cannot be honoured")
    return problems


def _holds(stored: shards.StoredTensor, own: Tensor) -> bool:
    """Whether `own`, or what this process holds of it, is what is stored."""
    read = torch.empty_like(own, requires_grad=False)
    shards.read_part(stored, read)
    return torch.equal(shards.local_values(read), shards.local_values(own))


def _base_parameter(key: str, names: list[str]) -> str | None:
    """The base parameter that a key of the file stands for, or None for an adapter's."""
    name = key.removeprefix(PREFIX)
    if name.endswith(".base_layer.weight") and name.removesuffix(".base_layer.weight") in names:
        return name.replace(".base_layer", "")
    return name if name.rpartition(".")[0].rpartition(".")[2] in ("embed_tokens", "lm_head") else None


def _check_same(config: AdapterConfig, names: list[str], adapted: Mapping[str, LoraLinear]) -> None:
    """The model's adapters must be those of the file, in layers, rank and scale."""
    problems = [f"{name} has an adapter in the model only" for name in adapted if name not in names]
    for name in names:
        if name not in adapted:
            problems.append(f"{name} has an adapter in the file only")
            continue
        layer = adapted[name]
        own = (layer.rank, layer.alpha, layer.use_rslora)
        read = (*config.settings(name), config.use_rslora)
        if own != read:
            problems.append(f"{name} has {_settings(*own)} in the model and {_settings(*read)} in the file")
    if problems:
        raise ModelError("\n  ".join(["not the model's adapters:", *problems[:LISTED]]), where=str(config.path))


def _settings(rank: int, alpha: float, use_rslora: bool) -> str:
    return f"rank {rank}, alpha {alpha}, use_rslora {use_rslora}"
