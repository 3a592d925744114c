"""The reading of a call: which of its tensors are parameters, made from parameters alone, or constants.

A *constant* belongs to the model and not to a row: a buffer, a frozen parameter, a plain attribute, or what was made
from such tensors alone. `weight * mask` with a mask that is a buffer is arithmetic on parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from optune.optim.immediate_parts import Arithmetic, Derived, Operand, Slot, Surroundings, slots_of

TAG = "_optune_derived"
CONSTANT_TAG = "_optune_constant"

Kinds = int
PARAMETERS, CONSTANTS, OTHERS = 1, 2, 4

LAYERS = frozenset(
    {
        *(F.linear, F.bilinear, F.embedding, torch.embedding, F.embedding_bag, F.prelu, F.batch_norm, torch.batch_norm),
        *(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm, F.instance_norm),
        *(F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d, F.scaled_dot_product_attention),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.multi_head_attention_forward),
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    }
)
"""Functions that make an activation even where all they are given are parameters and constants (a learned input)."""


@dataclass
class Call:
    """A torch function's call, read: `leaves` flattened, with a `Slot` or `Derived` in place of each such tensor."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    operands: list[tuple[int, Tensor]]
    """Position in `leaves` and the tensor itself, for parameters and derived tensors."""
    others: list[int]
    """Positions of all other tensors."""
    varying: bool
    """Some other tensor is not a constant of the model."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return slots_of(self.leaves)

    @property
    def is_arithmetic(self) -> bool:
        """Made from parameters and constants alone, and not a layer."""
        if self.varying:
            return False
        if self.function not in LAYERS:
            return True
        return not self.others and len(self.operands) == 1 and self.operands[0][0] == 0

    @property
    def has_learned_input(self) -> bool:
        """A layer on an input that is itself made from parameters alone."""
        return not self.varying and not self.is_arithmetic and self.operands[0][0] == 0

    def with_first(self, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with `tensor` in place of the first."""
        leaves = list(self.leaves)
        for position, operand in self.operands:
            leaves[position] = operand
        leaves[0] = tensor
        return tree_unflatten(leaves, self.spec)


class Reader:
    """Reads calls: knows which tensors are parameters, derived or constants of the model."""

    def __init__(self, sweep: object, slots: Iterable[Slot], constants: Iterable[Tensor] = ()) -> None:
        self.sweep = sweep
        self.slots = {id(slot.tensor): slot for slot in slots}
        # With its version: what rows are written into is a constant no more. Held, not only named: the id of a freed
        # tensor may come back as an activation's.
        self.constants = {id(tensor): (tensor, tensor._version) for tensor in constants}
        self.any_derived = self.any_made = False

    def operand(self, value: Tensor) -> Operand | None:
        """The slot or derived tensor that `value` is, if it is one."""
        slot = self.slots.get(id(value))
        if slot is not None or not self.any_derived:
            return slot
        derived: Derived | None = getattr(value, TAG, None)
        return derived if derived is not None and derived.sweep is self.sweep else None

    def is_constant(self, value: Tensor) -> bool:
        """Whether `value` belongs to the model, or was made from such tensors alone."""
        known = self.constants.get(id(value))
        if known is not None:
            return known[1] == value._version and not value.requires_grad
        if not self.any_made or value.requires_grad:
            return False
        return getattr(value, CONSTANT_TAG, None) == (self.sweep, value._version)

    def varies(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether one of `tensors` is neither a parameter, nor derived, nor a constant."""
        return any(t is not None and self.operand(t) is None and not self.is_constant(t) for t in tensors)

    def look(self, values: Iterable[Any], kinds: Kinds = 0) -> Kinds:
        """Which of `PARAMETERS` (derived tensors included), `CONSTANTS` and `OTHERS` are among `values`, at any depth
        of lists, tuples and dictionaries. Stops at the first parameter."""
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self.slots or (self.any_derived and self.operand(value) is not None):
                    return kinds | PARAMETERS
                kinds |= CONSTANTS if self.is_constant(value) else OTHERS
            elif isinstance(value, list | tuple):
                kinds = self.look(value, kinds)
            elif isinstance(value, dict):
                kinds = self.look(value.values(), kinds)
        return kinds

    def keep_constant(self, values: Any) -> Any:
        """Marks the tensors among `values`, made from constants alone, as constants; gives `values`."""
        for value in tree_flatten(values)[0]:
            if not isinstance(value, Tensor) or value.requires_grad:
                continue
            if id(value) in self.constants:
                self.constants[id(value)] = (value, value._version)
            else:
                setattr(value, CONSTANT_TAG, (self.sweep, value._version))
                self.any_made = True
        return values

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call with its operands and other tensors told apart."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        operands: list[tuple[int, Tensor]] = []
        others: list[int] = []
        varying = False
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            operand = self.operand(leaf)
            if operand is None:
                others.append(position)
                varying = varying or not self.is_constant(leaf)
            else:
                operands.append((position, leaf))
                leaves[position] = operand
        return Call(function, leaves, spec, operands, others, varying)

    def derive(self, call: Call, run: Callable[[], Any]) -> Any:
        """Runs a call on parameters alone and marks the tensors that it makes as derived."""
        surroundings = Surroundings.read(tensor for _, tensor in call.operands)
        constants = [call.leaves[position] for position in call.others]
        versions = [constant._version for constant in constants]
        result = run()
        outputs = tree_flatten(result)[0]
        if versions != [constant._version for constant in constants]:
            # What writes into a buffer (the power iteration of a spectral norm) is not repeated.
            self.keep_constant(constants)
            return result
        if not any(isinstance(output, Tensor) for output in outputs):
            return result
        surroundings.drop_unused_randomness()
        arithmetic = Arithmetic(call.function, call.leaves, call.spec, surroundings)
        for index, output in enumerate(outputs):
            if isinstance(output, Tensor) and self.operand(output) is None:
                setattr(output, TAG, Derived(self.sweep, arithmetic, index, call.slots))
                self.any_derived = True
        return result
