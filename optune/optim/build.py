"""The two factories: an ordinary torch optimizer, and the stepper that decides when it steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optune import memory
from optune.errors import ConfigError
from optune.optim.after_backward import AfterBackwardStepper
from optune.optim.buckets import Bucket, make_buckets, make_entries
from optune.optim.groups import divide_parameters
from optune.optim.immediate import ImmediateStepper
from optune.optim.in_backward import InBackwardStepper, refuse_plain_ddp
from optune.optim.masters import choose_held
from optune.optim.rounding import STEP_KEY
from optune.optim.stash.choose import make_stash
from optune.optim.stepper import SkipCounter, Stepper
from optune.optim.subset import check_no_closure, check_subset_step, find_subset_fault
from optune.optim.update import Update
from optune.shards import is_sharded

IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how a step is computed. They belong to this run, not to the checkpoint that it resumes from."""
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
"""What torch 2.13 can step fused where parameters are sharded."""
MODES = ("after_backward", "in_backward", "immediate")
TORCHAO_ROUNDING = "bf16_stochastic_round"


def why_whole(when: str) -> str | None:
    """Why each process needs whole parameters in the mode `when`; None where they may be sharded."""
    if when != "immediate":
        return None
    return (
        "optimizer_step=immediate updates a weight between the two halves of its own backward, and a shard of it has "
        "no such moment"
    )


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    factory: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    parameter_groups: Sequence[Mapping[str, Any]] = (),
    master_weights: str = "none",
    update_rounding: str = "nearest",
    seed: int = 0,
) -> Optimizer:
    """An ordinary, unwrapped torch optimizer over the parameters that require a gradient.

    - `factory`: any `torch.optim.Optimizer` class, such as `torch.optim.AdamW`, or those of torchao and bitsandbytes.
    - `settings`: its keywords. Where it offers a fused step and neither `fused` nor `foreach` is given, fused is used:
      implementations differ in the last bit, so one is chosen here and used in every mode.
    - `parameter_groups`: `{"match": pattern, setting: value, …}`, see `divide_parameters`.
    - `master_weights="fp32"`: the optimizer holds an fp32 copy of each low-precision parameter.
    - `update_rounding="stochastic"`: the optimizer computes and keeps its state in fp32, and each result is rounded
      into the bf16 parameter up or down by chance, by random numbers that `seed`, the step and the parameter's name
      decide. torchao's own `bf16_stochastic_round`, whose numbers depend on the order of updates, is taken as this.

    Each group has `initial_lr`, the rate that schedules multiply, and `param_names`, the names of its parameters.
    Loading a state dict does not change the implementation. Raises `ConfigError` for a keyword that the optimizer does
    not know, a value that it refuses, a pattern without a match, and when nothing is trained.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter requires a gradient: there is nothing to train", where="optimizer")
    check_keywords(factory, settings)
    names = [name for name, _ in trained]
    groups = divide_parameters(names, parameter_groups)
    if settings.get(TORCHAO_ROUNDING) is True:
        update_rounding, settings = "stochastic", {**settings, TORCHAO_ROUNDING: False}
    memory.keep_apart(parameter for _, parameter in trained)
    held = choose_held(trained, master_weights=master_weights, update_rounding=update_rounding, seed=seed)
    optimizer = _construct(
        factory,
        settings,
        [group | {"params": [held[n] for n in group["params"]]} for group in groups],
        is_spread=any(map(is_sharded, held.values())),
    )
    check_no_closure(optimizer)
    if type(optimizer).__module__.startswith("torchao."):
        # torch 2.13 says at the first compiled step that its cache knows torchao's tensors by their pickle alone.
        warnings.filterwarnings("ignore", message=".*does not implement _stable_hash_for_caching")
    for group, chosen in zip(optimizer.param_groups, groups, strict=True):
        unknown = [key for key in chosen if key != "params" and key not in optimizer.defaults]
        if unknown:
            _raise_unknown(unknown[0], optimizer.defaults, "parameter_groups", type(optimizer).__name__)
        group["param_names"] = chosen["params"]
        group["initial_lr"] = float(group["lr"])
        if update_rounding == "stochastic":
            group[STEP_KEY] = 0
        if isinstance(group["lr"], Tensor):
            # Groups that take the default would share one tensor, and setting one rate would set them all.
            group["lr"] = group["lr"].clone()
    _keep_implementation(optimizer)
    return optimizer


def build_stepper(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    when: str = "after_backward",
    max_grad_norm: float | None = None,
    stash: str = "auto",
    max_skipped_steps: int = 5,
    expected_tokens: int | None = None,
    buckets: Sequence[str] | None = None,
    variant: Literal["local", "exact"] = "local",
    reduce: Callable[[Tensor], Tensor] | None = None,
    max_parameter_grad_norm: float | None = None,
) -> Stepper:
    """The stepper for `when`: after_backward, in_backward or immediate.

    Made after everything that replaces parameters or modules (adapters, sharding, compiling).

    - `max_grad_norm`: the global norm that gradients are clipped to; None is off.
    - `stash`: how gradients wait for the norm when in_backward clips; see `optune.optim.stash`.
    - `max_skipped_steps`: so many steps in a row with a gradient that is not finite end the run.
    - `expected_tokens`: tokens fed in one step, padding included, which decide what `auto` takes.
    - `buckets`: globs on parameter names that are updated together, for models without `.blocks`.
    - `variant`, `reduce`, `max_parameter_grad_norm`: of immediate, see `ImmediateStepper`.

    Raises `ConfigError` for a combination that cannot be right, with the reason.
    """
    if when not in MODES:
        raise ConfigError(f"{when!r} is not one of {', '.join(MODES)}", where="optimizer_step")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"{max_grad_norm} is not positive", where="max_grad_norm", hint="null turns clipping off")
    if max_skipped_steps < 1:
        raise ConfigError(f"{max_skipped_steps} is less than 1", where="max_skipped_steps")
    refuse_plain_ddp(model)
    check_no_closure(optimizer)
    if when == "immediate":
        return ImmediateStepper(
            model,
            optimizer,
            max_grad_norm=max_grad_norm,
            max_parameter_grad_norm=max_parameter_grad_norm,
            variant=variant,
            reduce=reduce,
        )
    if variant != "local" or reduce is not None or max_parameter_grad_norm is not None:
        raise ConfigError(
            f"variant, reduce and max_parameter_grad_norm belong to immediate, and the mode is {when}",
            where="optimizer_step",
        )
    update = Update(optimizer, make_entries(model, optimizer), max_grad_norm)
    if when == "after_backward":
        # Steps the weights themselves, or what it steps cannot be divided: nothing is gained by parts.
        at_once = all(entry.is_own for entry in update.entries) or find_subset_fault(optimizer) is not None
        whole = None if at_once else _make_parts(model, update, buckets)
        return AfterBackwardStepper(update, whole, max_skipped_steps=max_skipped_steps)
    check_subset_step(optimizer)
    parts = _make_parts(model, update, buckets)
    policy = make_stash(
        stash,
        model=model,
        update=update,
        buckets=parts,
        skips=SkipCounter(max_skipped_steps),
        expected_tokens=expected_tokens,
        processes=_count_processes(),
    )
    return InBackwardStepper(model, parts, policy)


def _make_parts(model: nn.Module, update: Update, patterns: Sequence[str] | None) -> list[Bucket]:
    parts = make_buckets(model, update.entries, patterns)
    for part in parts:
        part.slices = update.prepare(part.name, part.entries).slices
    return parts


def check_keywords(factory: Callable[..., Any], settings: Mapping[str, Any], *, where: str = "optimizer") -> None:
    """Raises `ConfigError` for a keyword that `factory` does not take, with the nearest one that it does."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    accepted = [key for key in list(parameters)[1:] if key != "self"]
    for key in settings:
        if key not in accepted:
            _raise_unknown(key, accepted, where, getattr(factory, "__name__", str(factory)))


def _raise_unknown(key: str, accepted: Iterable[str], where: str, name: str) -> None:
    near = get_close_matches(key, list(accepted), n=1)
    raise ConfigError(
        f"{name} takes no {key!r}",
        where=where,
        hint=f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(accepted)}",
    )


def _construct(
    factory: Callable[..., Optimizer], settings: Mapping[str, Any], groups: list[dict[str, Any]], *, is_spread: bool
) -> Optimizer:
    attempts = [dict(settings)]
    if _may_fuse(factory, [settings, *groups]) and (not is_spread or factory in FUSED_ON_SHARDS):
        attempts.insert(0, {**settings, "fused": True})
    for attempt in attempts:
        try:
            # Constructors consume the groups that they are given.
            return factory([dict(group) for group in groups], **attempt)
        except RuntimeError as error:
            if attempt is attempts[-1]:
                raise _wrap(factory, error) from error
        except (TypeError, ValueError) as error:
            raise _wrap(factory, error) from error
    raise AssertionError("an attempt returns or raises")


def _may_fuse(factory: Callable[..., Optimizer], settings: Sequence[Mapping[str, Any]]) -> bool:
    if any(key in each for each in settings for key in IMPLEMENTATION_FLAGS):
        return False  # the user's choice
    # torch 2.13's fused SGD fails when a parameter gets its first gradient, and so its momentum, later than others.
    if factory is torch.optim.SGD and any(each.get("momentum") for each in settings):
        return False
    return "fused" in inspect.signature(factory).parameters


def _wrap(factory: Callable[..., Optimizer], error: Exception) -> ConfigError:
    # torch words what it refuses as ValueError or RuntimeError; a TypeError is Python's, about a line of its code.
    said = str(error) if not isinstance(error, TypeError) else f"a value is of the wrong kind ({error})"
    return ConfigError(f"{getattr(factory, '__name__', factory)} refuses its settings: {said}", where="optimizer")


def _keep_implementation(optimizer: Optimizer) -> None:
    """Puts this run's flags into each state dict before it is loaded, so that torch places state as they need it."""
    flags = [{key: group[key] for key in IMPLEMENTATION_FLAGS if key in group} for group in optimizer.param_groups]

    def keep(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [group | own for group, own in zip(state_dict["param_groups"], flags, strict=False)]
        return state_dict | {"param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep)


def _count_processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
