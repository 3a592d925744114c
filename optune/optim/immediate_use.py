"""One call with parameters, as a node of the autograd graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from optune.optim.immediate_match import Matched, match
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


def choose_rule(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Matched:
    """The closed form for a call, or its re-evaluation, and the call's tensors in the rule's order."""
    matched = match(call.function, args, kwargs)
    if matched is not None:
        return matched
    operands = dict(call.operands)
    positions = sorted([*operands, *call.others])
    tensors: list[Tensor | None] = [operands.get(position, call.leaves[position]) for position in positions]
    leaves = [None if isinstance(leaf, Tensor | Slot | Derived) else leaf for leaf in call.leaves]
    surroundings = Surroundings.read(tensor for tensor in tensors if tensor is not None)
    return Reevaluation(call.function, leaves, call.spec, positions, surroundings), tensors


def record(sweep: Sweep, rule: Rule, tensors: Sequence[Tensor | None]) -> Any:
    """Runs a call as a node that updates its parameters in backward; gives the function's result."""
    use = Use(sweep, rule, tensors)
    outputs = Operation.apply(sweep.anchor, use, *use.inputs)
    if use.output_spec is None:
        return outputs[0]
    leaves = list(use.outputs)
    for position, output in zip(use.output_positions, outputs, strict=True):
        leaves[position] = output
    return tree_unflatten(leaves, use.output_spec)


class Use:
    """One call with parameters: its rule, its operands, and which of its tensors are inputs."""

    def __init__(self, sweep: Sweep, rule: Rule, tensors: Sequence[Tensor | None]) -> None:
        self.sweep = sweep
        self.rule = rule
        self.operands: list[Operand | None] = [
            None if tensor is None else sweep.reader.operand(tensor) for tensor in tensors
        ]
        self.slots = slots_of(self.operands)
        # Detached, so that no graph and no cast kept by autocast hangs on a parameter.
        self._values = [
            tensor.detach() if tensor is not None and operand is not None else None
            for tensor, operand in zip(tensors, self.operands, strict=True)
        ]
        self.inputs = [
            tensor if operand is None else None for tensor, operand in zip(tensors, self.operands, strict=True)
        ]
        self.outputs: list[Any] = []
        self.output_positions: list[int] = []
        self.output_spec: Any = None

    def run(self, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The result's tensors and what else must be saved. The use then holds no tensor but its slots."""
        values, self._values, self.inputs = self._values, [], []
        result, kept = self.rule.run(_merge(inputs, values))
        if not isinstance(self.rule, Reevaluation):
            return [result], kept
        self.outputs, self.output_spec = tree_flatten(result)
        self.output_positions = [i for i, leaf in enumerate(self.outputs) if isinstance(leaf, Tensor)]
        made = [_own(self.outputs[i], values) for i in self.output_positions]
        for i in self.output_positions:
            self.outputs[i] = None
        return made, kept

    def parameter_gradients(
        self, inputs: Sequence[Tensor | None], kept: Sequence[Tensor], grads: Any
    ) -> dict[Slot, Tensor]:
        """The gradient of each slot at its old value."""
        derived = [operand for operand in self.operands if isinstance(operand, Derived)]
        values = {slot: slot.tensor.detach().requires_grad_(bool(derived)) for slot in self.slots}
        seen = _resolve(self.operands, values, with_graph=bool(derived))
        tensors = _merge(inputs, [None if value is None else value.detach() for value in seen])
        found = self.rule.gradients(tensors, kept, grads, [operand is not None for operand in self.operands])
        gradients: dict[Slot, Tensor] = {}
        through: list[tuple[Tensor, Tensor]] = []
        for operand, value, gradient in zip(self.operands, seen, found, strict=True):
            if gradient is None or operand is None or value is None:
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
        return self.rule.gradients(_merge(inputs, _resolve(self.operands, values)), kept, grads, wanted)


def _resolve(
    operands: Sequence[Operand | None], values: Mapping[Slot, Tensor], *, with_graph: bool = False
) -> list[Tensor | None]:
    done: dict[Arithmetic, list[Any]] = {}
    with torch.set_grad_enabled(with_graph):
        return [resolve(operand, values, done) for operand in operands]


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


def _own(output: Tensor, parameters: Sequence[Tensor | None]) -> Tensor:
    """`output`, copied where it is a view of a parameter: an activation keeps its value when the parameter changes."""
    if type(output) is Tensor and output._is_view():
        address = output.untyped_storage()._cdata
        if any(p is not None and address == p.untyped_storage()._cdata for p in parameters):
            return output.clone()
    return output


def _merge(inputs: Sequence[Tensor | None], operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [given if operand is None else operand for given, operand in zip(inputs, operands, strict=True)]
