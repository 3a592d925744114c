"""PEFT's adapter_config.json: what it says, and what in it cannot be honoured.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint; fields: peft.LoraConfig.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from optune.errors import ModelError
from optune.lora import targets as selection
from optune.lora.layer import LoraLinear
from optune.lora.quantized import Nf4Linear

CONFIG_FILE = "adapter_config.json"

_SAYS_NOTHING = {
    # Where the adapter came from, how PEFT holds it in memory, options of features that another field turns on.
    *("auto_mapping", "peft_version", "revision", "inference_mode", "megatron_core", "runtime_config"),
    *("qalora_group_size", "loftq_config", "eva_config"),
    # PEFT itself sets fan_in_fan_out to false for a linear layer; the other one matters for adapted embeddings only.
    *("fan_in_fan_out", "ensure_weight_tying"),
}
_HONOURED = {
    *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias"),
    *("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"),
    "init_lora_weights",
}
_STARTS_THAT_KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says, in PEFT's terms. `base` is base_model_name_or_path, None if it is not there."""

    path: Path
    base: str | None
    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    target_modules: str | list[str]
    exclude_modules: str | list[str] = field(default_factory=list)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: list[int] | None = None
    layers_pattern: list[str] = field(default_factory=list)

    def select(self, model: nn.Module) -> list[str]:
        """The linear layers of `model` that PEFT would adapt, in the model's order, adapted ones included."""
        kinds = (nn.Linear, Nf4Linear, LoraLinear)
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        return [name for name in names if self._targets(name) and not self._excludes(name)]

    def settings(self, name: str) -> tuple[int, float]:
        """Rank and alpha of the layer `name`."""
        rank = self.rank_pattern.get(_pattern_for(self.rank_pattern, name), self.rank)
        return rank, self.alpha_pattern.get(_pattern_for(self.alpha_pattern, name), self.alpha)

    def _targets(self, name: str) -> bool:
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == selection.ALL_LINEAR:
                return not selection.is_head(name)
            return re.fullmatch(self.target_modules, name) is not None
        return _ends_with_any(name, self.target_modules) and self._in_layers(name)

    def _excludes(self, name: str) -> bool:
        if isinstance(self.exclude_modules, str):
            return re.fullmatch(self.exclude_modules, name) is not None
        return _ends_with_any(name, self.exclude_modules)

    def _in_layers(self, name: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        found = next((m for p in patterns if (m := re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", name))), None)
        return found is not None and int(found.group(1)) in self.layers_to_transform


def read(folder: Path) -> AdapterConfig:
    """The adapter_config.json of `folder`.

    Raises ModelError that names the file and, all at once, every field that is missing, mistyped or cannot be honoured.
    """
    path = folder / CONFIG_FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("there is no such file, so this is not an adapter", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read as JSON: {error}", where=str(path)) from None
    if not isinstance(said, dict):
        raise ModelError(f"must hold an object, not {type(said).__name__}", where=str(path))
    if problems := _problems(said):
        raise ModelError("; ".join(problems), where=str(path))
    layers = said.get("layers_to_transform")
    layers_pattern = said.get("layers_pattern") or []
    return AdapterConfig(
        path=path,
        base=said.get("base_model_name_or_path") or None,
        rank=said["r"],
        alpha=said["lora_alpha"],
        dropout=said.get("lora_dropout") or 0.0,
        use_rslora=bool(said.get("use_rslora")),
        target_modules=said["target_modules"],
        exclude_modules=said.get("exclude_modules") or [],
        rank_pattern=said.get("rank_pattern") or {},
        alpha_pattern=said.get("alpha_pattern") or {},
        layers_to_transform=[layers] if isinstance(layers, int) else layers or None,
        layers_pattern=[layers_pattern] if isinstance(layers_pattern, str) else layers_pattern,
    )


def write(folder: Path, model: nn.Module, adapted: Mapping[str, LoraLinear], *, base: str) -> None:
    """Writes the adapter_config.json of the layers `adapted` of `model`; layers may differ in rank and alpha."""
    first = next(iter(adapted.values()))
    rank = Counter(layer.rank for layer in adapted.values()).most_common(1)[0][0]
    alpha = Counter(layer.alpha for layer in adapted.values()).most_common(1)[0][0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": first.dropout,
        "use_rslora": first.use_rslora,
        "target_modules": selection.shorten(model, adapted),
        "rank_pattern": {name: layer.rank for name, layer in adapted.items() if layer.rank != rank},
        "alpha_pattern": {name: _whole(layer.alpha) for name, layer in adapted.items() if layer.alpha != alpha},
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "use_dora": False,
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _problems(said: dict[str, Any]) -> list[str]:
    rules = {
        "peft_type": (said.get("peft_type") == "LORA", "only LORA adapters can be read"),
        "task_type": (said.get("task_type") in (None, "CAUSAL_LM"), "only CAUSAL_LM (or null) can be honoured"),
        "r": (_is_count(said.get("r")), "must be an integer of at least 1"),
        "lora_alpha": (_is_number(said.get("lora_alpha")), "must be a number"),
        "lora_dropout": (_is_dropout(said.get("lora_dropout")), "must be a number in [0, 1)"),
        "target_modules": (_are_names(said.get("target_modules"), empty=False), "must be names or one pattern"),
        "exclude_modules": (_are_names(said.get("exclude_modules") or [], empty=True), "must be names or one pattern"),
        "rank_pattern": (_maps_to(said.get("rank_pattern"), _is_count), "must map names to integers"),
        "alpha_pattern": (_maps_to(said.get("alpha_pattern"), _is_number), "must map names to numbers"),
        "layers_to_transform": (_are_indices(said.get("layers_to_transform")), "must be layer numbers"),
        "layers_pattern": (_are_names(said.get("layers_pattern") or [], empty=True), "must be names"),
        "bias": (said.get("bias") in (None, "none"), "only 'none' can be honoured"),
        "init_lora_weights": (
            said.get("init_lora_weights") in _STARTS_THAT_KEEP_THE_BASE,
            "changes the base weights when PEFT loads it; convert the adapter to ordinary LoRA when saving it",
        ),
    }
    problems = [f"{key} is {said.get(key)!r}: {rule}" for key, (holds, rule) in rules.items() if not holds]
    unknown = {key: value for key, value in said.items() if key not in _HONOURED | _SAYS_NOTHING}
    return problems + [f"{key} is {value!r}: cannot be honoured" for key, value in unknown.items() if value]


def _ends_with_any(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _pattern_for(patterns: Mapping[str, Any], name: str) -> str:
    """The first key that fits `name` or an end of it, as PEFT looks it up."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), name)


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_dropout(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value < 1)


def _are_names(value: Any, *, empty: bool) -> bool:
    if isinstance(value, str):
        return _compiles(value)
    return isinstance(value, list) and (empty or bool(value)) and all(isinstance(name, str) for name in value)


def _are_indices(value: Any) -> bool:
    return value is None or _is_count_or_zero(value) or (isinstance(value, list) and all(map(_is_count_or_zero, value)))


def _is_count_or_zero(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _maps_to(value: Any, holds: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(holds, value.values())) and all(map(_compiles, value)))


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
