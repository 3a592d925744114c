"""What the immediate mode cannot see, or cannot do in time, is refused, and never silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optune.errors import ConfigError
from optune.optim.immediate_parts import Slot, reason_hidden, slots_of
from optune.optim.immediate_read import Call, Reader
from optune.optim.kinds import is_compiled
from optune.shards import is_sharded

SETTING = "optimizer_step"


BACKWARD = (Tensor.backward, torch.autograd.backward)
"""The functions that start a backward pass."""


def single_root(
    tensors: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    grad_tensors: Any = None,
) -> tuple[Tensor, Any, bool | None, bool, Any]:
    """The arguments of either function of `BACKWARD` as those of `Tensor.backward`; there must be one loss."""
    gradient = grad_tensors if gradient is None else gradient
    if isinstance(tensors, Tensor):
        return tensors, gradient, retain_graph, create_graph, inputs
    if len(tensors) != 1:
        raise reason_hidden(f"backward of {len(tensors)} losses at once", "sum the losses and call backward once")
    gradient = gradient[0] if isinstance(gradient, list | tuple) else gradient
    return tensors[0], gradient, retain_graph, create_graph, inputs


def default_gradient(loss: Tensor) -> Tensor:
    """The gradient of a scalar loss with respect to itself."""
    if loss.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(loss)


def nodes_below(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph that `loss` hangs on."""
    seen = {loss.grad_fn}
    open_nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    while open_nodes:
        node = open_nodes.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                open_nodes.append(below)


def refuse_node(node: Any, reader: Reader) -> None:
    """Refuses graph nodes that would give a parameter its gradient behind the mode's back."""
    slot = reader.slots.get(id(getattr(node, "variable", None)))
    if slot is not None:
        raise reason_hidden(
            f"{slot.name} reaches the loss through something that the mode cannot see: a foreign kernel or autograd "
            "Function, a compiled block, or a view of the parameter made outside of the microbatch",
            "use torch functions on the parameter inside the forward pass, or optimizer_step=in_backward",
        )
    refuse_reentrant_node(node)


def refuse_reentrant_node(node: Any) -> None:
    """Refuses a block under reentrant activation checkpointing."""
    if type(node).__name__ == "CheckpointFunctionBackward":
        raise reason_hidden(
            "reentrant activation checkpointing hides a block's parameters until its backward runs",
            "use checkpoint(..., use_reentrant=False)",
        )


def refuse_foreign_node(node: Any) -> None:
    """Refuses an autograd Function, whose inside cannot be recorded and repeated with its gradient."""
    refuse_reentrant_node(node)
    if type(node).__name__.startswith("GeneratedBackwardFor_"):
        return  # of torch.library: called through torch's dispatcher, so it was recorded
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        raise reason_hidden(
            f"the exact variant cannot repeat {type(node).__name__.removesuffix('Backward')}, a foreign autograd "
            "Function",
            "use torch functions inside the forward pass, or the local variant",
        )


def refuse_backward_options(state: str, create_graph: bool, inputs: Any) -> None:
    """Refuses what a backward pass that changes weights cannot mean."""
    if state != "forward":
        raise reason_hidden(
            "a second backward in one microbatch would use weights that the first has changed",
            "sum the losses and call backward once",
        )
    if create_graph or inputs is not None:
        raise reason_hidden(
            "backward(create_graph=…) and backward(inputs=…) have no meaning where weights change on the way",
            "call loss.backward() without them",
        )


_READABLE = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def reads_only_facts(function: Callable[..., Any]) -> bool:
    """Whether `function` reads an attribute that is no tensor made from the parameter: shape, dtype, grad …"""
    return (
        isinstance(function, MethodWrapperType)
        and function.__name__ == "__get__"
        and getattr(function.__self__, "__name__", "") not in (*_READABLE, "data")
    )


def refuse_hidden_access(call: Call) -> None:
    """Refuses `.data`, writes to attributes and hooks on a parameter, and changes in place: they go around autograd.
    Also a random generator of the caller's own, which would not draw the same numbers again."""
    function = call.function
    name = getattr(function, "__name__", "")
    if any(isinstance(leaf, torch.Generator) for leaf in call.leaves):
        raise reason_hidden(
            f"{name} draws from a generator of its own, and cannot be repeated in backward",
            "let it draw from torch's global generator",
        )
    if isinstance(function, MethodWrapperType):
        attribute = getattr(function.__self__, "__name__", "")
        hidden = name != "__get__" or attribute not in _READABLE
        name = f"{'writing' if name == '__set__' else 'reading'} .{attribute}"
    else:
        hidden = name in ("register_hook", "register_post_accumulate_grad_hook") or works_in_place(function)
    first = call.leaves[0] if call.leaves else None
    names = ", ".join(slot.name for slot in slots_of([first]))
    if hidden and names:
        raise reason_hidden(
            f"{name} on {names} inside the forward pass goes around the mode",
            "use .detach() to read a value; change parameters and set hooks outside of the microbatch",
        )


_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "and", "or", "xor")
)


def works_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function's name says that it changes its first argument."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


@contextmanager
def refuse_changes(call: Call) -> Iterator[None]:
    """Refuses a call that changes a parameter, or a tensor made from parameters, though its name does not say so."""
    versions = [tensor._version for _, tensor in call.operands]
    yield
    for (position, tensor), version in zip(call.operands, versions, strict=True):
        if tensor._version != version:
            names = ", ".join(slot.name for slot in slots_of([call.leaves[position]]))
            raise reason_hidden(
                f"{getattr(call.function, '__name__', call.function)} changes {names} in place inside the forward pass",
                "change parameters outside of the microbatch, or write the change without an in-place function",
            )


def refuse_model(model: nn.Module) -> None:
    """Raises `ConfigError` for what makes a model unfit for the mode as a whole."""
    for name, module in model.named_modules():
        where = name or type(module).__name__
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                "immediate does not work with DistributedDataParallel, whose hooks never fire there",
                where=SETTING,
                hint="give the plain module, and the mean over ranks as reduce=",
            )
        if is_compiled(module):
            raise ConfigError(
                f"immediate must see every function that gets a parameter, and {where} is compiled, which hides them",
                where=SETTING,
                hint="set compile: false, or use optimizer_step: in_backward",
            )


def refuse_unfit(slots: Sequence[Slot]) -> None:
    """Raises `ConfigError` for a parameter that cannot be updated inside backward."""
    for slot in slots:
        reason = _unfit(slot.tensor)
        if reason is not None:
            raise ConfigError(
                f"immediate cannot update {slot.name}: {reason}",
                where=SETTING,
                hint="use optimizer_step: in_backward or after_backward",
            )


def _unfit(parameter: Tensor) -> str | None:
    if is_sharded(parameter):
        return "it is sharded, and its gradient would be reduced outside of the mode"
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}, a tensor with rules of its own"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "it has hooks on its gradient, which would never fire"
    return None


def find_constants(model: nn.Module, slots: Sequence[Slot]) -> list[Tensor]:
    """Tensors that belong to the model: buffers, frozen parameters, plain attributes. Raises `ConfigError` where one of
    them is a view of a parameter: what is computed with it would not follow the update."""
    storages = {slot.tensor.untyped_storage()._cdata: slot for slot in slots}
    known = {id(slot.tensor) for slot in slots}
    constants: list[Tensor] = []
    for module_name, module in model.named_modules():
        for name, tensor in _tensors_of(module):
            if id(tensor) in known:
                continue
            slot = storages.get(_address(tensor))
            if slot is not None and not isinstance(tensor, nn.Parameter):
                raise ConfigError(
                    f"immediate: {'.'.join(filter(None, (module_name, name)))} is a view of {slot.name}, made outside "
                    "of the forward pass; what is computed with it would not follow the update",
                    where=SETTING,
                    hint="make the view inside forward, or use optimizer_step: in_backward",
                )
            constants.append(tensor)
    return constants


def _address(tensor: Tensor) -> int:
    # Tensor subclasses need not have a storage of their own.
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, nn.Parameter) else -1


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)
    for name, value in vars(module).items():
        if name not in _MODULE_INTERNALS:
            yield from ((name, tensor) for tensor in _tensors_in(value))


_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return (item for item in value if isinstance(item, Tensor))
    return ()
