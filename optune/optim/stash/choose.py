"""Which stash a run gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from optune.errors import ConfigError
from optune.optim.buckets import Bucket
from optune.optim.stash.alias import AliasStash
from optune.optim.stash.base import HoldStash, NoStash, Stash
from optune.optim.stash.factored import FactoredStash, find_layers, has_compiled_part
from optune.optim.stash.host import HostStash, make_mover
from optune.optim.stash.two_pass import TwoPassStash
from optune.optim.stepper import SkipCounter
from optune.optim.update import Update
from optune.shards import is_offloaded

STASHES: dict[str, type[Stash]] = {
    "hold": HoldStash,
    "cpu": HostStash,
    "alias": AliasStash,
    "factored": FactoredStash,
    "two_pass": TwoPassStash,
}
POLICIES = ("auto", *STASHES)
WORTHWHILE = 0.5
"""`auto` takes factors when they hold at most this part of what gradients would: their matrix products cost time."""


@dataclass(frozen=True)
class Choice:
    """A policy and the reason for it, for the start summary."""

    policy: str
    reason: str


def frees_gradients(policy: str) -> bool:
    """Whether gradients are gone before backward ends: with a policy, or `none` where nobody waits for the norm. False
    for `auto`, which is not decided yet."""
    return (STASHES | {"none": NoStash}).get(policy, HoldStash).frees_gradients


def make_stash(
    policy: str,
    *,
    model: nn.Module,
    update: Update,
    buckets: Sequence[Bucket],
    skips: SkipCounter,
    expected_tokens: int | None,
    processes: int,
) -> Stash:
    """The stash `policy` names; `auto` is resolved by `choose_policy`.

    Raises `ConfigError` for an unknown policy and for one that this model or run cannot have.
    """
    if policy not in POLICIES:
        raise ConfigError(
            f"no policy is called {policy!r}", where="gradient_stash", hint=f"one of {', '.join(POLICIES)}"
        )
    # Without clipping nobody has to wait for the norm, whatever the policy says.
    if update.max_grad_norm is None:
        return NoStash(update, buckets, skips)
    choice = Choice(policy, "as asked")
    if policy == "auto":
        choice = choose_policy(model, update, expected_tokens=expected_tokens, processes=processes)
    if choice.policy == "alias":
        refuse_alias(update)
        return AliasStash(update, buckets, skips, choice.reason)
    if choice.policy == "factored":
        if processes > 1:
            raise ConfigError(
                f"factored works in one process, and there are {processes}: the norm of a sum over processes has terms "
                "between them that no process can compute",
                where="gradient_stash",
                hint="use gradient_stash: auto or hold",
            )
        return FactoredStash(update, buckets, skips, choice.reason, model)
    if choice.policy == "cpu":
        weight = update.entries[0].weight
        device = weight.device
        gains = device.type != "cpu"
        home = "gradients come to host memory anyway" if is_offloaded(weight) else "the device is the host itself"
        reason = choice.reason if gains else f"{choice.reason}; {home}, so hold does the same"
        return HostStash(update, buckets, skips, reason, make_mover(device))
    if choice.policy == "two_pass":
        return TwoPassStash(update, buckets, skips, f"{choice.reason}; each step runs forward and backward twice")
    return HoldStash(update, buckets, skips, choice.reason)


def choose_policy(model: nn.Module, update: Update, *, expected_tokens: int | None, processes: int) -> Choice:
    """The cheapest policy for this device, model and number of tokens in a step.

    `two_pass` is never chosen: it holds least, but costs another forward and backward, which is for the user to say.
    """
    device = update.entries[0].weight.device
    total = sum(entry.weight.nbytes for entry in update.entries)
    aliased = sum(entry.weight.nbytes for entry in update.entries if entry.has_master)
    if aliased > 0.5 * total:
        return Choice("alias", "fp32 masters are kept, so working weights can hold their gradients for no memory")
    if expected_tokens is not None and processes == 1 and not has_compiled_part(model):
        held = factored_bytes(model, update, expected_tokens)
        if held <= WORTHWHILE * total:
            return Choice(
                "factored",
                f"with about {expected_tokens} tokens a step, inputs and output gradients take {_mib(held)} where "
                f"gradients take {_mib(total)}",
            )
    if device.type == "cuda":
        return Choice("cpu", f"up to {_mib(total)}; what finds no room in freed activations goes to pinned host memory")
    if is_offloaded(update.entries[0].weight):
        return Choice("hold", f"{_mib(total)} in host memory, where the update is made")
    return Choice("hold", f"{_mib(total)} that take the place of freed activations")


def factored_bytes(model: nn.Module, update: Update, tokens: int) -> int:
    """An upper bound of what `factored` holds for `tokens` in a step; inputs are counted once a layer."""
    held = {entry.index: entry.weight.nbytes for entry in update.entries}
    for layer in find_layers(model, update.entries):
        if layer.are_factors_smaller(tokens):
            weight = layer.entry.weight
            widths = weight.shape[1] if isinstance(layer.module, nn.Embedding) else sum(weight.shape)
            held[layer.entry.index] = tokens * widths * weight.element_size()
    return sum(held.values())


def refuse_alias(update: Update) -> None:
    """Raises `ConfigError` when no weight has a master whose working copy could hold a gradient."""
    if not any(entry.has_master for entry in update.entries):
        dtype = str(update.entries[0].weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"alias keeps gradients in the working weights, which needs fp32 master weights beside them; here the "
            f"{dtype} weights are the only ones",
            where="gradient_stash",
            hint="set model.dtype=bf16 with model.master_weights=fp32, or use gradient_stash: auto",
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
