"""What both immediate sweeps are made of: slots, and arithmetic on parameters alone.

A *slot* is a parameter that is updated inside backward. A *derived* tensor is made from slots (and constants) alone, as
`weight.t()`, `1 + weight`, `weight.to(bf16)` or a weight norm. It belongs to the function that uses it: the function's
parameter is the slot, seen through that arithmetic, and the arithmetic is repeated with the new value after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from optune.errors import TrainingError


@dataclass(eq=False)
class Slot:
    """A parameter under its name. `tensor` is its current value: the very `Parameter` for a module (updated in place),
    the newest tensor for the functional form. `pending` counts the uses whose backward has not run yet."""

    name: str
    tensor: Tensor
    pending: int = 0
    gradient: Tensor | None = None
    updated: bool = False


Update = Callable[[list[tuple[Slot, Tensor]]], None]
"""Gets the parameters whose gradient is complete, with that gradient, and gives each slot its new value."""


def reason_hidden(what: str, hint: str) -> TrainingError:
    """The error for what the mode cannot see, or cannot do in time."""
    return TrainingError(f"immediate: {what}", where="optimizer_step", hint=hint)


def settle(gradient: Tensor, parameter: Tensor, others: Iterable[Tensor | None] = ()) -> Tensor:
    """`gradient` in the parameter's dtype and memory layout, in memory of its own: what uses it may change it in place,
    while `others` still flow on."""
    if gradient.layout is not torch.strided:
        return gradient
    if gradient.dtype != parameter.dtype or gradient.stride() != parameter.stride():
        return torch.empty_like(parameter).copy_(gradient)
    address = gradient.untyped_storage()._cdata
    if any(other is not None and other.untyped_storage()._cdata == address for other in others):
        return gradient.clone()
    return gradient


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled functions run as they were written, so that the mode sees what they call."""
    return torch.compiler.set_stance("force_eager")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in, None where it is off."""
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def set_autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype`, or off. Without its cache of cast parameters, which would outlive an update."""
    if autocast_dtype(device_type) is None and dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@dataclass
class Surroundings:
    """The thread's settings under which a function was called: its repetition must run under the same."""

    grad: bool
    device_type: str
    autocast: torch.dtype | None
    random_states: list[tuple[torch.device, Tensor]] = field(default_factory=list)

    @classmethod
    def read(cls, tensors: Iterable[Tensor]) -> Surroundings:
        """The current settings, for the device of the first of `tensors`."""
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        kind = device.type
        surroundings = cls(
            grad=torch.is_grad_enabled(),
            device_type=kind,
            autocast=autocast_dtype(kind),
        )
        surroundings.random_states = surroundings._read_random(device)
        return surroundings

    def _read_random(self, device: torch.device) -> list[tuple[torch.device, Tensor]]:
        states = [(torch.device("cpu"), torch.get_rng_state())]
        if device.type == "cuda":
            states.append((device, torch.cuda.get_rng_state(device)))
        return states

    def drop_unused_randomness(self) -> None:
        """After the call: forgets the generators that it did not draw from."""
        self.random_states = [
            (device, state) for device, state in self.random_states if not torch.equal(state, _random_state(device))
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same settings once more; afterwards the thread's own are back, generators included."""
        with ExitStack() as stack:
            stack.enter_context(set_autocast(self.device_type, self.autocast))
            for device, state in self.random_states:
                stack.callback(_set_random_state, device, _random_state(device))
                _set_random_state(device, state)
            yield


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@dataclass(eq=False)
class Arithmetic:
    """One call on parameters alone. `leaves` are its flattened arguments: `Slot`, `Derived`, or the value itself."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    surroundings: Surroundings
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        return [leaf._version for leaf in self.leaves if isinstance(leaf, Tensor)]

    def evaluate(self, values: Mapping[Slot, Tensor], done: dict[Arithmetic, list[Any]]) -> list[Any]:
        """The call's flattened results with `values` for the slots; `done` holds the calls evaluated before."""
        if self not in done:
            if self._read_versions() != self.versions:
                raise reason_hidden(
                    f"a buffer that {getattr(self.function, '__name__', self.function)} combined with "
                    f"{', '.join(slot.name for slot in slots_of(self.leaves))} has changed since",
                    "change buffers before they are combined with parameters, or use optimizer_step=in_backward",
                )
            leaves = [resolve(leaf, values, done) for leaf in self.leaves]
            args, kwargs = tree_unflatten(leaves, self.spec)
            with torch.set_grad_enabled(self.surroundings.grad and torch.is_grad_enabled()), self.surroundings.again():
                done[self] = tree_flatten(self.function(*args, **kwargs))[0]
        return done[self]


@dataclass(eq=False)
class Derived:
    """The `index`-th flattened result of a call on parameters alone, and the slots that it is made from."""

    sweep: object
    call: Arithmetic
    index: int
    slots: tuple[Slot, ...]


Operand = Slot | Derived


def resolve(leaf: Any, values: Mapping[Slot, Tensor], done: dict[Arithmetic, list[Any]]) -> Any:
    """The value of a leaf, given the values of the slots."""
    if isinstance(leaf, Slot):
        return values[leaf]
    if isinstance(leaf, Derived):
        return leaf.call.evaluate(values, done)[leaf.index]
    return leaf


def slots_of(operands: Iterable[Any]) -> tuple[Slot, ...]:
    """The slots among and below `operands`, each once, in order."""
    found: dict[Slot, None] = {}
    for operand in operands:
        if isinstance(operand, Slot):
            found[operand] = None
        elif isinstance(operand, Derived):
            found.update(dict.fromkeys(operand.slots))
    return tuple(found)
