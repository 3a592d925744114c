"""The `local` sweep: every function with a parameter updates it in its own backward and passes on the gradient taken
with the new value.

A `TorchFunctionMode` watches the forward pass. A call that gets a parameter, or a tensor made from parameters alone,
runs as one autograd node; in backward that node (1) takes the gradient of its parameters from the saved inputs at the
old values, (2) hands it to the update, and (3) takes the gradient of its inputs at the new values. Everything else
runs as ever. A parameter with several uses sums their gradients and is updated after the last of them in backward;
until then its uses see the old value.

Before anything is updated, the graph of the loss is walked: it tells how many uses each parameter has in it, and
whether a parameter is reached in a way that the mode did not see, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from optune.errors import TrainingError
from optune.optim.immediate_match import match
from optune.optim.immediate_parts import Slot, Update, reason_hidden, set_autocast, slots_of
from optune.optim.immediate_read import CONSTANTS, PARAMETERS, Call, Reader
from optune.optim.immediate_refuse import (
    BACKWARD,
    default_gradient,
    nodes_below,
    reads_only_facts,
    refuse_backward_options,
    refuse_changes,
    refuse_hidden_access,
    refuse_node,
    single_root,
    works_in_place,
)
from optune.optim.immediate_rules import Rule
from optune.optim.immediate_use import Operation, choose_rule, record


class LocalSweep(TorchFunctionMode):
    """One forward and one backward pass in which parameters are updated as soon as their gradient is complete.

    Enter it around the forward pass; call `backward` on the loss, or let the model's own `loss.backward()` do so.
    `constants` are tensors that belong to the model and not to a row: arithmetic of parameters with them alone is still
    arithmetic on parameters.
    """

    def __init__(self, slots: Sequence[Slot], update: Update, constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.slots = slots
        self._update = update
        self.reader = Reader(self, slots, constants)
        self._state = "forward"
        device = slots[0].tensor.device if slots else torch.device("cpu")
        # Gives an autograd node to functions none of whose inputs needs a gradient.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

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
        kinds = self.reader.look(args)
        if kwargs and not kinds & PARAMETERS:
            kinds = self.reader.look(kwargs.values(), kinds)
        if not kinds & PARAMETERS or reads_only_facts(func):
            result = func(*args, **kwargs)
            return self.reader.keep_constant(result) if kinds == CONSTANTS else result
        if torch.is_grad_enabled():
            matched = match(func, args, kwargs)
            if matched is not None and self.reader.varies(matched[1]):
                return self._record(*matched)
        call = self.reader.read(func, args, kwargs)
        refuse_hidden_access(call)
        if self._state == "backward":
            self._check_repetition(tensor for _, tensor in call.operands)
        with refuse_changes(call):
            return self._run(call, args, kwargs)

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if works_in_place(call.function):
            return self._run_in_place(call.function, args, kwargs)
        if call.is_arithmetic:
            return self.reader.derive(call, lambda: call.function(*args, **kwargs))
        if not torch.is_grad_enabled():
            return call.function(*args, **kwargs)
        if call.has_learned_input:
            # The input becomes an activation with a node of its own, updated after this function's parameters.
            args, kwargs = call.with_first(self.materialize(call.operands[0][1]))
            call = self.reader.read(call.function, args, kwargs)
        return self._record_call(call, args, kwargs) if call.operands else call.function(*args, **kwargs)

    def _record_call(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._record(*choose_rule(call, args, kwargs))

    def _record(self, rule: Rule, tensors: list[Tensor | None]) -> Any:
        if self._state == "backward":
            self._check_repetition(tensors)
        return record(self, rule, tensors)

    def _run_in_place(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`x.add_(w)` as `x.copy_(add_(copy of x, w))`: the node works on the copy, torch differentiates `copy_`."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)

        def out_of_place(target: Tensor, *rest: Any, **named: Any) -> Tensor:
            copy = target.clone()
            function(copy, *rest, **named)
            return copy

        fresh = (args[0].clone(), *args[1:])
        args[0].copy_(self._record_call(self.reader.read(out_of_place, fresh, kwargs), fresh, kwargs))
        return args[0]

    def materialize(self, tensor: Tensor) -> Tensor:
        """A parameter or derived tensor as an activation: backward of it updates."""
        call = self.reader.read(torch.clone, (tensor,), {})
        return self._record_call(call, (tensor,), {}) if call.operands else tensor

    def _check_repetition(self, tensors: Iterable[Tensor | None]) -> None:
        for slot in slots_of(self.reader.operand(tensor) for tensor in tensors if tensor is not None):
            if slot.updated:
                raise reason_hidden(
                    f"activation checkpointing repeats a forward pass after {slot.name}, which it reads, was updated",
                    "turn activation checkpointing off for this module, or use optimizer_step=in_backward",
                )

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Backward of `loss` with all updates. Arguments as `Tensor.backward`; one call for each sweep."""
        refuse_backward_options(self._state, create_graph, inputs)
        if self.reader.operand(loss) is not None:
            loss = self.materialize(loss)
        gradient = default_gradient(loss) if gradient is None else gradient
        self._plan(loss)
        self._state = "backward"
        # The mode stays on for functions that checkpointing repeats; autocast is theirs to set, not backward's.
        with self, set_autocast(loss.device.type, None):
            # By its edge, because a tensor would send this call through the mode, which is off while it handles one.
            edge = torch.autograd.graph.get_gradient_edge(loss)
            torch.autograd.backward(edge, gradient, retain_graph)
        self._state = "done"
        late = [slot.name for slot in self.slots if slot.pending or slot.gradient is not None]
        if late:
            raise TrainingError(f"backward ended without the update of {', '.join(late)}")

    def _plan(self, loss: Tensor) -> None:
        """Counts the uses of each parameter in the graph of `loss`; refuses uses that the mode did not see."""
        for node in nodes_below(loss):
            if isinstance(node, Operation._backward_cls):  # type: ignore[attr-defined]
                use = node.use  # type: ignore[attr-defined]
                if use.sweep is not self:
                    raise reason_hidden(
                        "the loss depends on an activation of an earlier microbatch",
                        "detach what is carried from one microbatch to the next",
                    )
                for slot in use.slots:
                    slot.pending += 1
            else:
                refuse_node(node, self.reader)

    def complete(self, slots: Sequence[Slot], gradients: Mapping[Slot, Tensor]) -> None:
        """Takes in the gradients of one use and updates the slots that have no further use."""
        ready: list[tuple[Slot, Tensor]] = []
        for slot in slots:
            gradient = gradients.get(slot)
            if slot.gradient is None or gradient is None:
                slot.gradient = slot.gradient if gradient is None else gradient
            elif slot.gradient.layout is torch.strided:
                slot.gradient.add_(gradient)
            else:
                slot.gradient = slot.gradient + gradient
            slot.pending -= 1
            if slot.pending == 0 and slot.gradient is not None:
                ready.append((slot, slot.gradient))
                slot.gradient = None
                slot.updated = True
        if ready:
            self._update(ready)

    @property
    def is_done(self) -> bool:
        """Whether the backward pass has ended."""
        return self._state == "done"

    @property
    def is_running(self) -> bool:
        return self._state == "backward"
