"""The `exact` sweep: each parameter's gradient is taken with everything downstream of it already updated.

The reference for study and tests (block Gauss–Seidel, from the last function to the first): before a parameter's
gradient is taken, the forward pass is run again with the present weights, so the cost grows with the square of the
depth. The forward pass is recorded as a tape of the torch functions whose results depend on a parameter; what depends
on none (rows, masks, random tensors made from nothing) enters as it was. Random numbers repeat.

Parameters of one function are updated together, as in the `local` sweep; one with several uses has its turn at the
earliest of them in the forward pass, which is the last in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from optune.optim.immediate_parts import Slot, Surroundings, Update, reason_hidden, settle, slots_of
from optune.optim.immediate_read import CONSTANTS, Call, Reader
from optune.optim.immediate_refuse import (
    BACKWARD,
    nodes_below,
    reads_only_facts,
    refuse_backward_options,
    refuse_changes,
    refuse_foreign_node,
    refuse_hidden_access,
    single_root,
    works_in_place,
)

Turn = tuple[int, int]
"""When a function comes in the forward pass; the second number puts a learned input before its function."""


@dataclass(frozen=True)
class Register:
    """Where a tensor lives when the tape runs."""

    index: int


@dataclass
class Entry:
    """One recorded call. `leaves` are its arguments: `Slot`, `Register`, or the value itself."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    surroundings: Surroundings
    outputs: list[tuple[int, Register]]
    """Flattened position and register of each tensor that the call made."""


class Tape:
    """The recorded functions, and the tensors that they started from."""

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        self._slots = slots
        self._entries: list[Entry] = []
        self._registers = 0
        # Tensors are held with their register, so that an identity is never given to another.
        self._made: dict[int, tuple[Tensor, Register]] = {}
        self._given: dict[tuple[int, int], tuple[Tensor, Register]] = {}
        self._start: dict[Register, Tensor] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def depends(self, values: Iterable[Any]) -> bool:
        """Whether a parameter, or a tensor made from one, is among `values`."""
        return any(isinstance(v, Tensor) and (id(v) in self._slots or id(v) in self._made) for v in values)

    def record(self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, run: Callable[[], Any]) -> Any:
        """Runs a call and adds it, unless it only read facts such as a size."""
        located = [self._locate(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        surroundings = Surroundings.read(leaf for leaf in leaves if isinstance(leaf, Tensor))
        result = run()
        surroundings.drop_unused_randomness()
        changed = False
        for leaf, place, version in zip(leaves, located, versions, strict=True):
            if isinstance(leaf, Tensor) and isinstance(place, Register) and leaf._version != version:
                self._made[id(leaf)] = (leaf, place)
                changed = True
        outputs: list[tuple[int, Register]] = []
        for position, output in enumerate(tree_flatten(result)[0]):
            if isinstance(output, Tensor) and id(output) not in self._slots:
                _, register = self._made.setdefault(id(output), (output, self._new_register()))
                outputs.append((position, register))
        if outputs or changed:
            self._entries.append(Entry(function, located, spec, surroundings, outputs))
        return result

    def _locate(self, tensor: Tensor) -> Slot | Register:
        """Where a tensor's value is found when the tape runs; one from outside is copied as it is at this moment."""
        if id(tensor) in self._slots:
            return self._slots[id(tensor)]
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        key = (id(tensor), tensor._version)
        if key not in self._given:
            if tensor.requires_grad:
                raise reason_hidden(
                    "a tensor that needs a gradient comes from outside of what the exact variant records: a foreign "
                    "autograd Function, a compiled block, or an input that is not a parameter",
                    "use torch functions inside the forward pass, or the local variant",
                )
            register = self._new_register()
            self._given[key] = (tensor, register)
            self._start[register] = tensor.detach().clone()
        return self._given[key][1]

    def _new_register(self) -> Register:
        self._registers += 1
        return Register(self._registers)

    def run(self, values: Mapping[Slot, Tensor], loss: Tensor) -> Tensor:
        """Runs the tape with `values` for the parameters and returns what `loss` is then."""
        registers = {register: tensor.clone() for register, tensor in self._start.items()}

        def look_up(leaf: Any) -> Any:
            if isinstance(leaf, Register):
                return registers[leaf]
            return values[leaf] if isinstance(leaf, Slot) else leaf

        for entry in self._entries:
            args, kwargs = tree_unflatten([look_up(leaf) for leaf in entry.leaves], entry.spec)
            with torch.set_grad_enabled(entry.surroundings.grad), entry.surroundings.again():
                results = tree_flatten(entry.function(*args, **kwargs))[0]
            for position, register in entry.outputs:
                registers[register] = results[position]
        return look_up(self._locate(loss))


class ExactSweep(TorchFunctionMode):
    """One forward pass, and the updates of all parameters from the last function to the first.

    Used as `LocalSweep`.
    """

    def __init__(self, slots: Sequence[Slot], update: Update, constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.slots = slots
        self._update = update
        self.reader = Reader(self, slots, constants)
        self._tape = Tape(self.reader.slots)
        self._turns: dict[Slot, Turn] = {}
        self._state = "forward"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            return self.backward(*single_root(*args, **kwargs))
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if reads_only_facts(func) or not self._tape.depends(leaves):
            result = func(*args, **kwargs)
            return self.reader.keep_constant(result) if self.reader.look(leaves) == CONSTANTS else result
        call = self.reader.read(func, args, kwargs)
        refuse_hidden_access(call)
        with refuse_changes(call):
            return self._tape.record(func, leaves, spec, lambda: self._run(call, args, kwargs))

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if call.is_arithmetic and not works_in_place(call.function):
            return self.reader.derive(call, lambda: call.function(*args, **kwargs))
        learned = slots_of(call.leaves[:1]) if call.has_learned_input else ()
        for slot in call.slots:
            turn = (len(self._tape), 0 if slot in learned else 1)
            self._turns[slot] = min(turn, self._turns.get(slot, turn))
        return call.function(*args, **kwargs)

    @property
    def is_done(self) -> bool:
        """Whether the backward pass has ended."""
        return self._state == "done"

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """All updates, in the order of backward. Arguments as `Tensor.backward`; one call for each sweep."""
        refuse_backward_options(self._state, create_graph, inputs)
        groups = self._plan(loss)
        self._state = "backward"
        for index, group in enumerate(groups):
            values = {slot: slot.tensor.detach() for slot in self.slots}
            wanted = {slot: values[slot].detach().requires_grad_() for slot in group}
            with torch.enable_grad():
                repeated = self._tape.run(values | wanted, loss)
            if index == 0:
                _check_repeated(repeated, loss)
            found = torch.autograd.grad([repeated], list(wanted.values()), gradient, allow_unused=True)
            missing = [slot.name for slot, grad in zip(group, found, strict=True) if grad is None]
            if missing:
                raise _unseen(missing[0])
            self._update([(slot, settle(grad, slot.tensor)) for slot, grad in zip(group, found, strict=True)])
            for slot in group:
                slot.updated = True
        self._state = "done"

    def _plan(self, loss: Tensor) -> list[list[Slot]]:
        """The parameters with a gradient, in groups that are updated together, in the order of their turns."""
        operand = self.reader.operand(loss)
        for slot in slots_of([operand]):
            self._turns.setdefault(slot, (len(self._tape), 0))
        groups: dict[Turn, list[Slot]] = {}
        for node in nodes_below(loss):
            refuse_foreign_node(node)
            slot = self.reader.slots.get(id(getattr(node, "variable", None)))
            if slot is None:
                continue
            if slot not in self._turns:
                raise _unseen(slot.name)
            groups.setdefault(self._turns[slot], []).append(slot)
        return [groups[turn] for turn in sorted(groups, reverse=True)]


def _unseen(name: str) -> Exception:
    return reason_hidden(
        f"{name} reaches the loss through something that the exact variant cannot record: a foreign kernel or autograd "
        "Function, a compiled block, or a view of the parameter made outside of the microbatch",
        "use torch functions on the parameter inside the forward pass, or optimizer_step=in_backward",
    )


def _check_repeated(repeated: Tensor, loss: Tensor) -> None:
    """The tape must give the loss that the forward pass gave, while no weight has changed."""
    eps = torch.finfo(loss.dtype).eps
    if not torch.allclose(repeated.detach(), loss.detach(), rtol=1e3 * eps, atol=eps, equal_nan=True):
        raise reason_hidden(
            f"the recorded forward pass gives {repeated.tolist()} where the first gave {loss.tolist()}; something in "
            "it is not a torch function or does not repeat",
            "use the local variant",
        )
