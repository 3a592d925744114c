"""What a tensor or a module is, told without importing the class: such an import takes a part of every start."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor: one rank's part of a tensor."""
    return type(tensor).__name__ == "DTensor"


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` itself was compiled, in place (`module.compile()`) or wrapped (`torch.compile(module)`)."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
