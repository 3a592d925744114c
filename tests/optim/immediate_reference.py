"""References for immediate that know nothing of torch functions, for any loss and SGD.

`local`: each leaf module is one autograd Function that differentiates the module's own forward. `exact`: ordinary
gradients of the whole model through `functional_call`, one layer after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class _LeafStep(torch.autograd.Function):
    """A module as one node: gradients of its parameters, an SGD step, gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: nn.Module, call: Callable[..., Any], lr: float, *inputs: Any) -> Any:
        ctx.module, ctx.call, ctx.lr, ctx.inputs = module, call, lr, inputs
        ctx.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        ctx.noise = torch.get_rng_state()
        return call(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parameters = list(ctx.module.parameters())
        after = {name: buffer.clone() for name, buffer in ctx.module.named_buffers()}

        def pull(inputs: Sequence[Any], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            for name, buffer in ctx.module.named_buffers():
                buffer.copy_(ctx.buffers[name])
            torch.set_rng_state(ctx.noise)
            with torch.enable_grad():
                output = ctx.call(*inputs)
            outputs = output if isinstance(output, tuple) else (output,)
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if isinstance(o, Tensor) and g is not None]
            return torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs])

        updates = pull([i.detach() if isinstance(i, Tensor) else i for i in ctx.inputs], parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, updates, strict=True):
                parameter -= ctx.lr * grad
        inputs = [i.detach().requires_grad_(i.is_floating_point()) if isinstance(i, Tensor) else i for i in ctx.inputs]
        leaves = [i for i in inputs if isinstance(i, Tensor) and i.requires_grad]
        found = iter(pull(inputs, leaves) if leaves else ())
        for name, buffer in ctx.module.named_buffers():
            buffer.copy_(after[name])
        return (
            None,
            None,
            None,
            None,
            *(next(found) if isinstance(i, Tensor) and i.requires_grad else None for i in inputs),
        )


def step_leaf_modules(model: nn.Module, loss: Callable[[nn.Module], Tensor], lr: float) -> None:
    """One step of `local` with every leaf module as one function; `model` is changed and of no further use."""
    anchor = torch.zeros((), requires_grad=True)

    def wrap(module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention) or (not list(module.children()) and list(module.parameters())):
            call = module.forward

            def forward(*inputs: Any, **settings: Any) -> Any:
                tensors = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
                return _LeafStep.apply(anchor, module, lambda *given: call(*given, **settings), lr, *tensors)

            module.forward = forward  # type: ignore[method-assign]
            return
        for child in module.children():
            wrap(child)

    wrap(model)
    loss(model).backward()


def step_layer_by_layer(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], layers: Sequence[Sequence[str]], lr: float
) -> None:
    """One step of `exact`. `layers`: the parameters of each function, in the order of the forward pass."""
    state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    new = dict(state)

    class _Call(nn.Module):
        def forward(self, *args: Any) -> Any:
            return functional_call(model, {**state, **new, **leaves}, args)

    for names in reversed(layers):
        leaves = {name: new[name].requires_grad_() for name in names}
        grads = torch.autograd.grad(loss(_Call()), list(leaves.values()))
        new.update({name: new[name].detach() - lr * grad for name, grad in zip(names, grads, strict=True)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(new[name])
