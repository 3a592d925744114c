"""Which parameters are updated together: one bucket a block; embeddings, head and the rest have their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.optim import Optimizer

from optune.errors import ConfigError
from optune.optim.rounding import rounding_of
from optune.optim.subset import Slices


@dataclass(eq=False)
class Entry:
    """A trainable parameter. `held` is what the optimizer has in its groups: the weight itself, its fp32 master, or a
    transient, see `rounding.py`."""

    index: int
    name: str
    weight: nn.Parameter
    held: Tensor
    bucket: Bucket = field(init=False, repr=False)
    fired: bool = False

    @property
    def is_own(self) -> bool:
        """The optimizer steps the weight itself."""
        return self.held is self.weight

    @property
    def is_rounded(self) -> bool:
        """The weight is all that lasts; each update is rounded into it stochastically."""
        return rounding_of(self.held) is not None

    @property
    def has_master(self) -> bool:
        """The weight can be made again from what the optimizer holds."""
        return not self.is_own and not self.is_rounded


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients complete at about the same time in backward, and are updated together."""

    name: str
    entries: list[Entry]
    slices: Slices = field(default_factory=list, repr=False)
    pending: int = 0
    ready: bool = False

    @property
    def nbytes(self) -> int:
        """Of its weights, and so of its gradients."""
        return sum(entry.weight.numel() * entry.weight.element_size() for entry in self.entries)

    def reset(self) -> None:
        """Waits for all gradients again."""
        self.pending, self.ready = len(self.entries), False
        for entry in self.entries:
            entry.fired = False


def make_entries(model: nn.Module, optimizer: Optimizer) -> list[Entry]:
    """The trainable parameters of `model` in `named_parameters` order, matched with those that `optimizer` holds.

    A parameter is matched by identity, or, where the optimizer holds another tensor for it, by the names that
    `build_optimizer` leaves in its groups (`param_names`). Raises `ConfigError` when the two do not hold the same
    parameters.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_identity = {id(parameter): parameter for parameter in held}
    by_name: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        by_name |= dict(zip(group.get("param_names", ()), group["params"], strict=False))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matched = [(name, weight, by_identity.get(id(weight), by_name.get(name))) for name, weight in trainable]
    missing = [name for name, _, match in matched if match is None]
    if missing:
        raise ConfigError(
            f"{_count(missing)} trained but not held by the optimizer",
            where="optimizer",
            hint="freeze them before the optimizer is built, or build the optimizer from all trained parameters",
        )
    entries = [
        Entry(index, name, weight, match) for index, (name, weight, match) in enumerate(matched) if match is not None
    ]
    known = {id(entry.held) for entry in entries}
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ConfigError(
            f"the optimizer holds {strangers} parameters that the model does not train; "
            "the model's parameters were replaced or frozen after the optimizer was built",
            where="optimizer",
            hint="build the optimizer after everything that replaces or freezes parameters",
        )
    return entries


def smallest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The order in which to update them one by one, each freeing its gradients: what the largest one makes on the way
    finds the most room."""
    return sorted(buckets, key=lambda bucket: bucket.nbytes)


def make_buckets(model: nn.Module, entries: Sequence[Entry], patterns: Sequence[str] | None = None) -> list[Bucket]:
    """Divides `entries`; each is in one bucket, and order follows `named_parameters`.

    - `patterns`: globs on parameter names, a bucket each; what none matches falls under the rules below.
    - a model with `.blocks` (a list of modules): one bucket a block, and one for each other module that owns
      parameters, so embeddings, final norm and head stand alone.
    - any other module: one bucket for each child; its own parameters are one more.
    """
    choose = _choose_by_block(model) if isinstance(getattr(model, "blocks", None), nn.ModuleList) else _choose_by_child
    buckets: dict[str, Bucket] = {}
    for entry in entries:
        pattern = next((pattern for pattern in patterns or () if fnmatchcase(entry.name, pattern)), None)
        name = pattern if pattern is not None else choose(entry.name, entry.weight)
        entry.bucket = buckets.setdefault(name, Bucket(name, []))
        entry.bucket.entries.append(entry)
    unmatched = [pattern for pattern in patterns or () if pattern not in buckets]
    if unmatched:
        raise ConfigError(f"{unmatched[0]!r} matches no trained parameter that is left for it", where="buckets")
    for bucket in buckets.values():
        bucket.reset()
    return list(buckets.values())


def _choose_by_block(model: nn.Module) -> Callable[[str, nn.Parameter], str]:
    blocks: dict[int, str] = {}
    for index, block in enumerate(model.blocks):  # pyright: ignore[reportArgumentType]
        blocks |= {id(parameter): f"block {index}" for parameter in block.parameters()}
    return lambda name, weight: blocks.get(id(weight)) or name.rpartition(".")[0]


def _choose_by_child(name: str, weight: nn.Parameter) -> str:
    child, dot, _ = name.partition(".")
    return child if dot else ""


def _count(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} parameters ({shown}) are" if len(names) > 1 else f"{shown} is"
