"""One call with parameters, as a node of the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from optune.optim.immediate_match import match
from optune.optim.immediate_parts import (
    Arithmetic,
    Derived,
    Operand,
    Slot,
    Surroundings,
    reason_hidden,
    resolve,
    settle,
    slots_of,
)
from optune.optim.immediate_read import Call, Reader
from optune.optim.immediate_rules import Gradients, Reevaluation, Rule


class Sweep(Protocol):
    """What a node needs of the pass that it belongs to."""

    reader: Reader
    anchor: Tensor
    """A leaf that gives a node to calls none of whose inputs needs a gradient."""

    @property
    def is_running(self) -> bool:
        """Whether the backward pass of this sweep is under way."""
        ...

    def complete(self, slots: Sequence[Slot], gradients: Mapping[Slot, Tensor]) -> None:
        """Takes in the gradients of one use and updates the slots that have no further use."""
        ...


def record(sweep: Sweep, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs `call` as a node that updates its parameters in backward; gives the function's result."""
    use = Use(sweep, call, args, kwargs)
    outputs = Operation.apply(sweep.anchor, use, *use.inputs)
    leaves = list(use.outputs)
    for position, output in zip(use.output_positions, outputs, strict=True):
        leaves[position] = output
    return tree_unflatten(leaves, use.output_spec)


class Use:
    """One call with parameters: its rule, its operands, and which of its tensors are inputs."""

    def __init__(self, sweep: Sweep, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.sweep = sweep
        self.slots = call.slots
        self.outputs: list[Any] = []
        self.output_positions: list[int] = []
        self.output_spec: Any = None
        matched = match(call.function, args, kwargs)
        self.rule: Rule
        if matched is not None:
            self.rule, self._tensors = matched
        else:
            positions = sorted([position for position, _ in call.operands] + call.others)
            self._tensors = list(_tensors_at(call, positions))
            held = [None if isinstance(leaf, Tensor | Slot | Derived) else leaf for leaf in call.leaves]
            surroundings = Surroundings.read(tensor for tensor in self._tensors if tensor is not None)
            self.rule = Reevaluation(call.function, held, call.spec, positions, surroundings)
        reader = sweep.reader
        self.operands: list[Operand | None] = [
            None if tensor is None else reader.operand(tensor) for tensor in self._tensors
        ]

    @property
    def inputs(self) -> list[Tensor | None]:
        """The tensors that are no operands, for autograd to track. To be read before `run`."""
        return [
            tensor if operand is None else None for tensor, operand in zip(self._tensors, self.operands, strict=True)
        ]

    def run(self, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The result's tensors and what else must be saved."""
        tensors = [
            tensor.detach() if operand is not None and tensor is not None else given
            for tensor, operand, given in zip(self._tensors, self.operands, inputs, strict=True)
        ]
        pairs = zip(tensors, self.operands, strict=True)
        held = [tensor for tensor, operand in pairs if tensor is not None and operand is not None]
        self._tensors = []
        result, kept = self.rule.run(tensors)
        self.outputs, self.output_spec = tree_flatten(result)
        self.output_positions = [i for i, leaf in enumerate(self.outputs) if isinstance(leaf, Tensor)]
        made = [_own(self.outputs[i], held) for i in self.output_positions]
        for i in self.output_positions:
            self.outputs[i] = None
        return made, kept

    def parameter_gradients(
        self, inputs: Sequence[Tensor | None], kept: Sequence[Tensor], grads: Any
    ) -> dict[Slot, Tensor]:
        """The gradient of each slot at its old value."""
        derived = [operand for operand in self.operands if isinstance(operand, Derived)]
        values = {slot: slot.tensor.detach().requires_grad_(bool(derived)) for slot in self.slots}
        done: dict[Arithmetic, list[Any]] = {}
        with torch.enable_grad():
            seen = [resolve(operand, values, done) for operand in self.operands]
        tensors = _merge(inputs, [None if value is None else value.detach() for value in seen])
        found = self.rule.gradients(tensors, kept, grads, [operand is not None for operand in self.operands])
        gradients: dict[Slot, Tensor] = {}
        through: list[tuple[Tensor, Tensor]] = []
        for operand, value, gradient in zip(self.operands, seen, found, strict=True):
            if gradient is None or operand is None:
                continue
            if isinstance(operand, Slot):
                gradients[operand] = gradients[operand] + gradient if operand in gradients else gradient
            elif value.requires_grad:
                through.append((value, gradient.to(value.dtype)))
        if through:
            _add_gradients_through(through, slots_of(derived), values, gradients)
        return {slot: settle(gradient, slot.tensor, grads) for slot, gradient in gradients.items()}

    def input_gradients(
        self, inputs: Sequence[Tensor | None], kept: Sequence[Tensor], grads: Any, wanted: Sequence[bool]
    ) -> Gradients:
        """The gradient of each input at the slots' present values."""
        values = {slot: slot.tensor.detach() for slot in self.slots}
        done: dict[Arithmetic, list[Any]] = {}
        return self.rule.gradients(
            _merge(inputs, [resolve(operand, values, done) for operand in self.operands]), kept, grads, wanted
        )


def _add_gradients_through(
    through: Sequence[tuple[Tensor, Tensor]],
    slots: Sequence[Slot],
    values: Mapping[Slot, Tensor],
    gradients: dict[Slot, Tensor],
) -> None:
    """Takes the gradients of derived tensors back to their slots."""
    found = torch.autograd.grad(
        [value for value, _ in through],
        [values[slot] for slot in slots],
        [gradient for _, gradient in through],
        allow_unused=True,
    )
    for slot, gradient in zip(slots, found, strict=True):
        if gradient is not None:
            gradients[slot] = gradients[slot] + gradient if slot in gradients else gradient


class Operation(torch.autograd.Function):
    """The autograd node of one use. Parameters are no inputs of it: they are held by reference, in the slots."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: Use, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        outputs, kept = use.run(inputs)
        ctx.use = use
        ctx.set_materialize_grads(False)
        # Something is always saved: reading it makes checkpointing repeat the block before its parameters change.
        ctx.save_for_backward(anchor, *(inputs if use.rule.keeps_inputs else [None] * len(inputs)), *kept)
        ctx.num_inputs = len(inputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        if not use.sweep.is_running:
            raise reason_hidden(
                "backward ran outside of the microbatch, or a second time",
                "call loss.backward() once, inside `with stepper.microbatch(...)`",
            )
        # With the mode still on: checkpointing repeats the block here, and its calls must be seen.
        _, *saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        wanted = ctx.needs_input_grad[2:]
        arrived = any(grad is not None for grad in grads)
        with torch._C.DisableTorchFunction():
            use.sweep.complete(use.slots, use.parameter_gradients(inputs, kept, grads) if arrived else {})
            if not arrived or not any(wanted):
                return (None,) * (2 + ctx.num_inputs)
            return (None, None, *use.input_gradients(inputs, kept, grads, wanted))


def _own(output: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`output`, copied where it is a view of a parameter: an activation keeps its value when the parameter changes."""
    if type(output) is Tensor and output._is_view():
        address = output.untyped_storage().data_ptr()
        if any(address == parameter.untyped_storage().data_ptr() for parameter in parameters):
            return output.clone()
    return output


def _tensors_at(call: Call, positions: Sequence[int]) -> Iterator[Tensor]:
    operands = dict(call.operands)
    for position in positions:
        yield operands[position] if position in operands else call.leaves[position]


def _merge(inputs: Sequence[Tensor | None], operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [given if operand is None else operand for given, operand in zip(inputs, operands, strict=True)]
