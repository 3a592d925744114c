"""An optimizer's state under parameter names: taken apart for a checkpoint, and put into a fresh optimizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from optune import shards
from optune.checkpoint.values import UnknownValueError, decode, encode, names_in
from optune.errors import CheckpointError, ModelError

STATE_TENSORS = Path("optune") / "optimizer.safetensors"
STATE_REST = Path("optune") / "optimizer.json"
_FORMAT = 1

IMPLEMENTATION_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings that say how to compute, not what: they belong to the machine, and a fresh optimizer keeps its own."""

_NOT_SETTINGS = IMPLEMENTATION_FLAGS | {"params", "param_names"}

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def pack_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Parameters
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of `optimizer` as (JSON, tensors). The tensors are the optimizer's own: copy them before it steps.

    `named_parameters` are the model's. Where the optimizer holds another tensor under a parameter's name (`param_names`
    of its group), that is a master weight, and becomes `state.<name>.master`; one that says how it is `rounding` has no
    values between steps, and its name alone is kept.
    Raises `CheckpointError` for state that cannot be written without pickle, by name.
    """
    own = _names_by_parameter(named_parameters)
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    masters: list[str] = []
    rounded: list[str] = []
    faults: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        members = []
        for name, parameter in _name_group(group, own):
            if name is None:
                faults.append(f"a parameter of shape {list(parameter.shape)} in group {index} has no name")
                continue
            members.append(name)
            entries: dict[str, Any] = {}
            if _is_transient(parameter):
                rounded.append(name)
            elif parameter not in own:
                masters.append(name)
                tensors[f"state.{name}.master"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                if f"state.{name}.{key}" in tensors:
                    faults.append(f"state.{name}.{key} is there twice")
                try:
                    entries[key] = encode(value, f"state.{name}.{key}", tensors, parameter.device)
                except UnknownValueError as error:
                    faults.append(str(error))
            states[name] = {"shape": list(parameter.shape), "state": entries}
        groups.append({"parameters": members, "settings": _pack_settings(group, index, tensors)})
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    faults += [f"state that belongs to no parameter: {key!r}" for key in optimizer.state if key not in held]
    if faults:
        raise CheckpointError(
            f"the state of {_class_name(optimizer)} cannot be written:\n  " + "\n  ".join(faults),
            hint="choose an optimizer whose state is tensors, numbers and text",
        )
    rest = {"format": _FORMAT, "class": _class_name(optimizer), "groups": groups, "parameters": states}
    return rest | {"masters": masters, "rounded": rounded}, tensors


def _is_transient(parameter: Tensor) -> bool:
    """Whether what an optimizer holds has values only while it steps; the weight that it stands for has them all."""
    return hasattr(parameter, "rounding")


def _names_by_parameter(named_parameters: Parameters) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in dict(named_parameters).items()}


def _name_group(group: Mapping[str, Any], own: Mapping[Tensor, str]) -> list[tuple[str | None, Tensor]]:
    """The parameters of a group with their names: the model's, else those that the group itself lists."""
    listed = group.get("param_names") or [None] * len(group["params"])
    return [(own.get(parameter, name), parameter) for parameter, name in zip(group["params"], listed, strict=True)]


def _pack_settings(group: Mapping[str, Any], index: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    settings = {}
    for key, value in group.items():
        if key in _NOT_SETTINGS:
            continue
        try:
            settings[key] = encode(value, f"group.{index}.{key}", tensors)
        except UnknownValueError:
            # A function or another object: it comes from the config, which a resumed run has too.
            continue
    return settings


def write_optimizer(folder: Path, rest: dict[str, Any], tensors: shards.Tensors, rank: int = 0) -> None:
    """Write what `pack_optimizer` returned into a checkpoint folder; with several ranks, what is this one's share."""
    if shards.is_spread(tensors):
        shards.write_file(folder / STATE_TENSORS, tensors, rank=rank)
    elif rank == 0:
        _write_whole({name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}, folder)
    if rank == 0:
        text = json.dumps(rest, indent=1, allow_nan=False) + "\n"
        (folder / STATE_REST).write_text(text, encoding="utf-8")


def _write_whole(tensors: Mapping[str, Tensor], folder: Path) -> None:
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        # The format holds each byte once and in order; views and shared storage are copied out.
        is_shared = storage in seen and tensor.numel()
        ready[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        seen.add(storage)
    save_file(ready, folder / STATE_TENSORS, metadata={"format": "pt"})


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Parameters,
    folder: Path,
    *,
    keep: Collection[str] = (),
) -> None:
    """Put the state saved in the checkpoint `folder` into a fresh `optimizer`, bit for bit and without a step.

    State keeps the type it was saved with (torch's own `load_state_dict` would cast it to the parameter's) and goes to
    the parameter's device; scalars such as `step` follow torch's rule: on the device only when the optimizer is
    capturable or, for `step`, fused. Master weights are filled in place. Group settings are restored too, except those
    of `IMPLEMENTATION_FLAGS` and those named in `keep`: the settings whose change was allowed.

    Where a parameter is a DTensor, so is its state, laid out alike; each rank reads its own slices. How many processes
    wrote the checkpoint does not matter.

    Raises `CheckpointError` listing every missing, unexpected and misshapen name at once, before anything is changed.
    """
    own = _names_by_parameter(named_parameters)
    rest = _read_rest(folder)
    try:
        with safe_open(folder / STATE_TENSORS, framework="pt", device="cpu") as stored:
            shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
            faults = _compare(optimizer, own, rest, shapes)
            if faults:
                raise CheckpointError(
                    "the optimizer state does not fit this run:\n  " + "\n  ".join(faults),
                    where=str(folder),
                    hint="the model, the adapters or the optimizer are not those that the checkpoint was made with; "
                    f"to begin a new run with its weights alone: model.path={folder}",
                )
            source = _Source(stored, folder)
            for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
                _restore_settings(group, saved["settings"], stored, keep)
                for parameter, name in zip(group["params"], saved["parameters"], strict=True):
                    _restore_parameter(optimizer, group, parameter, name, rest, source)
    except (OSError, SafetensorError, ModelError) as error:
        raise CheckpointError(f"{STATE_TENSORS} cannot be read: {error}", where=str(folder)) from error


def _read_rest(folder: Path) -> dict[str, Any]:
    try:
        rest = json.loads((folder / STATE_REST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{STATE_REST} cannot be read: {error}", where=str(folder)) from error
    if rest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{STATE_REST} has format {rest.get('format')}; this optune reads format {_FORMAT}", where=str(folder)
        )
    return rest


def _compare(
    optimizer: torch.optim.Optimizer, own: Mapping[Tensor, str], rest: dict[str, Any], stored: Mapping[str, list[int]]
) -> list[str]:
    """Everything in which the saved state and the fresh optimizer do not fit each other."""
    if rest["class"] != _class_name(optimizer):
        return [f"it is of {rest['class']}, the run has {_class_name(optimizer)}"]
    named = [
        [(name or "(no name)", parameter) for name, parameter in _name_group(group, own)]
        for group in optimizer.param_groups
    ]
    fresh = [[name for name, _ in group] for group in named]
    saved = [group["parameters"] for group in rest["groups"]]
    shapes = {name: list(parameter.shape) for group in named for name, parameter in group}
    saved_shapes = {name: entry["shape"] for name, entry in rest["parameters"].items()}
    faults = [f"missing: {name}" for name in shapes if name not in saved_shapes]
    faults += [f"unexpected: {name}" for name in saved_shapes if name not in shapes]
    faults += [
        f"misshapen: {name} is {saved_shapes[name]}, the run has {shape}"
        for name, shape in shapes.items()
        if saved_shapes.get(name, shape) != shape
    ]
    if not faults and fresh != saved:
        faults.append(f"the parameter groups are others: {_sizes(saved)}, the run has {_sizes(fresh)}")
    rounded = [name for group in named for name, parameter in group if _is_transient(parameter)]
    masters = [name for group in named for name, parameter in group if parameter not in own and name not in rounded]
    saved_rounded = rest.get("rounded", [])
    if not faults and rounded != saved_rounded:
        faults.append(
            f"updates of {len(saved_rounded)} parameters were rounded stochastically, the run rounds {len(rounded)}"
        )
    faults += [f"missing: state.{name}.master" for name in masters if name not in rest["masters"]]
    faults += [f"unexpected: state.{name}.master" for name in rest["masters"] if name not in masters]
    referred = names_in(rest["groups"]) | names_in(rest["parameters"]) | {f"state.{n}.master" for n in rest["masters"]}
    faults += [f"missing in {STATE_TENSORS.name}: {name}" for name in sorted(referred - stored.keys())]
    return faults + [f"unexpected in {STATE_TENSORS.name}: {name}" for name in sorted(stored.keys() - referred)]


def _sizes(groups: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups) + " parameters"


def _restore_settings(group: dict[str, Any], saved: dict[str, Any], stored: Any, keep: Collection[str]) -> None:
    for key, value in saved.items():
        if key in keep or key in _NOT_SETTINGS:
            continue
        setting = decode(value, lambda name, _: stored.get_tensor(name).clone())
        current = group.get(key)
        if isinstance(current, Tensor):
            # In place: a compiled step holds on to this very tensor.
            current.copy_(torch.as_tensor(setting))
        elif isinstance(setting, Tensor) and isinstance(current, int | float):
            group[key] = setting.item()
        else:
            group[key] = setting


class _Source:
    """The tensors of `STATE_TENSORS`: whole ones by way of safetensors, and the slices that a rank holds."""

    def __init__(self, stored: Any, folder: Path) -> None:
        self.get_tensor = stored.get_tensor
        self._folder = folder

    @cached_property
    def places(self) -> dict[str, shards.StoredTensor]:
        return shards.read_header(self._folder / STATE_TENSORS)


def _restore_parameter(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    name: str,
    rest: dict[str, Any],
    stored: _Source,
) -> None:
    if name in rest["masters"]:
        if shards.is_sharded(parameter):
            shards.read_part(stored.places[f"state.{name}.master"], parameter)
        else:
            with torch.no_grad():
                parameter.copy_(stored.get_tensor(f"state.{name}.master"))
    optimizer.state.pop(parameter, None)
    entries = rest["parameters"][name]["state"]
    if entries:
        optimizer.state[parameter] = {
            key: _restore_value(value, key, parameter, group, stored) for key, value in entries.items()
        }


def _restore_value(value: Any, key: str, parameter: Tensor, group: Mapping[str, Any], stored: _Source) -> Any:
    if shards.is_sharded(parameter) and isinstance(value, dict) and "wrapper" in value:
        raise CheckpointError(
            f"low-bit state ({key}) of a parameter that is spread over processes cannot be divided",
            where=str(STATE_TENSORS),
            hint="go on with one process, or with another optimizer",
        )

    def read(name: str, device: str | None) -> Tensor:
        if shards.is_sharded(parameter) and len(stored.places[name].shape):
            return shards.read_like(stored.places[name], parameter)
        tensor = stored.get_tensor(name)
        if tensor.dim() == 0 and (key == "step" or parameter.dim() > 0):
            on_device = group.get("capturable") or (key == "step" and group.get("fused"))
            return tensor.to(parameter.device if on_device else "cpu", copy=True)
        # A copy: what safe_open hands out lives in the file, and dies with it.
        return tensor.to(device or parameter.device, copy=True)

    return decode(value, read)


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
