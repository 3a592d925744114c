"""What a tensor or a module is, told without importing the class: such an import takes a part of every start."""

from __future__ import annotations

from torch import Tensor, nn

from optune.shards import is_sharded


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` itself was compiled, in place (`module.compile()`) or wrapped (`torch.compile(module)`)."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
