"""An exact account of live gradient memory: bytes of tensor storages, not of the process.

Every storage that an operation creates is entered when it is made and left when it is freed. Those as large as a
trained parameter count as gradients (in tests, activations are given sizes that no parameter has); what else waits for
the step, such as inputs and output gradients, is named by the test.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class GradientTracker(TorchDispatchMode):
    """`peak_bytes` is the most that gradients, and the tensors that `waiting()` names, took at one time.

    Stands around forward, backward and the stepper's `finish()`. Storages are counted once, however many tensors view
    them.
    """

    def __init__(self, model: nn.Module, waiting: Callable[[], Iterable[Tensor]] = list) -> None:
        super().__init__()
        self._sizes = {parameter.numel() for parameter in model.parameters() if parameter.requires_grad}
        self._known = {storage_key(parameter) for parameter in model.parameters()}
        self._waiting = waiting
        self._live: dict[int, int] = {}
        self.peak_bytes = 0
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() in self._sizes:
                self._enter(leaf)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def _enter(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        storage = tensor.untyped_storage()
        # A view or an expanded scalar has few bytes of its own; a weight was there before.
        if key in self._live or key in self._known or storage.nbytes() < tensor.nbytes:
            return
        self._live[key] = storage.nbytes()
        self.made += 1
        weakref.finalize(storage, self._live.pop, key, None)

    def live_bytes(self) -> int:
        waiting = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in self._waiting()}
        return sum((waiting | self._live).values())


class StorageTracker(TorchDispatchMode):
    """`peak_bytes` is the most that all storages took at one time: `held`, and whatever operations make; `live_bytes`
    is what they take now.

    Storages that are not named are not there for it: hand over everything that lives when it begins.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0
        for tensor in held:
            self._enter(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        return result

    def _enter(self, tensor: Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(inner, Tensor):
                    self._enter(inner)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live[storage._cdata] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._leave, storage._cdata)

    def _leave(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key)


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
