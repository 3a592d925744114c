"""Which linear layers get an adapter: `lora.targets` and the selection in a PEFT adapter_config.json, made to names.

A target is one of
- `all-linear`: every linear layer except the output head;
- a name, the last part of a layer's path (`q_proj`), or more of its end (`self_attn.q_proj`, `layers.0.mlp.up_proj`);
- a glob (`*`, `?`, `[01]`): `layers.0.*`, `*_proj`; or a regular expression: `layers\\.[0-3]\\..*_proj`. A pattern must
  fit the whole path or an end of it that starts at a dot. It is read as a glob first, and as a regular expression if
  it holds `( ) | \\ ^ $ + { }` or fits nothing as a glob. Of what it fits, the linear layers count.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import translate as glob_to_regex

from torch import nn

from optune.errors import ConfigError

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
REGEX_ONLY = frozenset("()|\\^$+{}")
GLOB = frozenset("*?[")


def find(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """The names of the linear layers that `targets` select, in the model's order, each once.

    Raises ConfigError that lists every target which selects nothing, names something that is not a linear layer, or
    selects a layer whose weight is shared with another module.
    """
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ConfigError("the list is empty", where="lora.targets", hint=f"name layers, or use {ALL_LINEAR}")
    linear = linear_names(model)
    shared = shared_weights(model)
    selected: set[str] = set()
    problems: list[str] = []
    for target in wanted:
        if not isinstance(target, str) or not target:
            problems.append(f"{target!r} is not the name of a layer")
            continue
        names = _select(model, linear, target)
        if why := _why_refused(model, linear, target, names):
            problems.append(why)
        problems += [f"{target!r} selects {name}, which {shared[name]}" for name in names if name in shared]
        selected |= names
    if problems:
        raise ConfigError("; ".join(problems), where="lora.targets", hint=_hint(wanted, linear))
    return [name for name in linear if name in selected]


def linear_names(model: nn.Module) -> list[str]:
    """The paths of all nn.Linear modules, in the model's order."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def is_head(name: str) -> bool:
    """Whether the layer is the output head, which `all-linear` leaves out, as PEFT does."""
    return name.rpartition(".")[2] == HEAD


def shorten(model: nn.Module, names: Iterable[str]) -> list[str]:
    """`target_modules` for PEFT that select exactly `names`: a last part that stands for all layers of its name, or
    else whole paths. Sorted.
    """
    everywhere = Counter(name.rpartition(".")[2] for name, _ in model.named_modules())
    chosen = list(names)
    counts = Counter(name.rpartition(".")[2] for name in chosen)
    whole = {last for last, count in counts.items() if count == everywhere[last]}
    return sorted({last if (last := name.rpartition(".")[2]) in whole else name for name in chosen})


def _select(model: nn.Module, linear: list[str], target: str) -> set[str]:
    if target == ALL_LINEAR:
        return {name for name in linear if not is_head(name)}
    return set(linear).intersection(_fitting(target, [name for name, _ in model.named_modules()]))


def _fitting(target: str, names: list[str]) -> list[str]:
    """The names that `target` fits, whatever they are."""
    if not (GLOB | REGEX_ONLY) & set(target):
        return [name for name in names if name == target or name.endswith(f".{target}")]
    if not REGEX_ONLY & set(target):
        glob = re.compile(rf"(?:.*\.)?{glob_to_regex(target)}")
        if fitting := [name for name in names if glob.fullmatch(name)]:
            return fitting
    try:
        expression = re.compile(rf"(?:.*\.)?(?:{target})")
    except re.error:
        return []
    return [name for name in names if name and expression.fullmatch(name)]


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight is also another module's, with the reason why they cannot be adapted."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    reasons: dict[str, str] = {}
    for names in owners.values():
        for name in names if len(names) > 1 else []:
            others = ", ".join(other for other in names if other != name)
            reasons[name] = f"shares its weight with {others} (tied), so an adapter on it could not be merged"
    return reasons


def _why_refused(model: nn.Module, linear: list[str], target: str, selected: set[str]) -> str | None:
    """A target must select something, and a plain name nothing but linear layers."""
    fitting = [] if target == ALL_LINEAR else _fitting(target, [name for name, _ in model.named_modules()])
    others = [name for name in fitting if name not in selected]
    if selected and (not others or (GLOB | REGEX_ONLY) & set(target)):
        return None
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        inside = sorted({name.rpartition(".")[2] for name in linear if name.startswith(f"{others[0]}.")})
        more = f"; the linear layers in it are {', '.join(inside)}" if inside else ""
        return f"{target!r} selects {others[0]} ({kind}), which is not a linear layer{more}"
    nearest = difflib.get_close_matches(target, _endings(linear), n=1)
    return f"{target!r} matches no layer" + (f" (did you mean {nearest[0]!r}?)" if nearest else "")


def _endings(linear: list[str]) -> list[str]:
    """Every dotted ending of every linear layer's path."""
    endings: dict[str, None] = {}
    for name in linear:
        parts = name.split(".")
        endings.update(dict.fromkeys(".".join(parts[start:]) for start in range(len(parts))))
    return list(endings)


def _hint(wanted: list[str], linear: list[str]) -> str:
    lasts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if any(isinstance(target, str) and "," in target and not REGEX_ONLY & set(target) for target in wanted):
        return f"write several targets as a list, [q_proj,v_proj]; this model's linear layers are {lasts}"
    return f"this model's linear layers are {lasts}"
