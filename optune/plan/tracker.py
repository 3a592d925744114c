"""Which storages are alive while a step runs, counted as operations make them and Python frees them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from optune.plan.remembering import call, describe, storage_key

_MAKE_WEIGHTS = ("optune::frozen", "optune::lora")
_SMALL = 2**16
_FROM_OTHERS = ("c10d", "_c10d_functional", "fsdp")
_NAMELESS = ("activations", "update")
"""Parts that are named by the moment alone."""
_DEVICE = torch.ops.prim.device.default
_EXTRA: dict[Hashable, int] = {}
"""What the inside of an operation of ours takes at most, by all that it depends on: blocks are alike."""
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class Storage:
    """Memory of one or more tensors. `serial` counts storages in the order in which they were made."""

    size: int
    part: str
    serial: int
    reference: weakref.ref[Any] | None = None


@dataclass(eq=False)
class Stretch:
    """A stretch of the step, and the most that was alive in it, in bytes by part. `serial`: see `Storage`."""

    key: tuple[Hashable, ...]
    moment: str
    parts: Counter[str] = field(default_factory=Counter)
    serial: int = 0
    total: int = 0


class Tracker(TorchDispatchMode):
    """Enters every storage that an operation makes, under the part of memory that `part` names at that moment.

    A storage is counted once, however many tensors view it, and leaves when it is freed. Parts that are known only
    later (a gradient is one when it has arrived in `.grad`) are set by `relabel`, also in what was counted before.

    `answer(func, args, kwargs)` may give the result of an operation in the operation's place; NotImplemented leaves it.
    `round_up` is what an allocator makes of a size.
    """

    def __init__(self, answer: Answer, round_up: Callable[[int], int] = int) -> None:
        super().__init__()
        self.answer, self._round_up = answer, round_up
        self._alive: dict[int, Storage] = {}
        self._parts: Counter[str] = Counter()
        self._total = self._serial = self._highest = 0
        self.part = "activations"
        self.moment = "load"
        self.stretches: list[Stretch] = []
        self.begin("load")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # every second call is this one
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others: what it does with those comes here by itself
        result = self.answer(func, args, kwargs or {})
        if result is NotImplemented and _is_looked_into(func, args):
            result = self._look_into(func, args, kwargs or {})
        elif result is NotImplemented:
            result = call(func, args, kwargs or {})
        if func.namespace in _FROM_OTHERS:
            self._name_gathered([*args, result])
        if isinstance(result, Tensor):
            self._enter(result, self.part)
        elif isinstance(result, tuple | list):
            for each in result:
                if isinstance(each, Tensor):
                    self._enter(each, self.part)
        return result

    def begin(self, *key: Hashable) -> None:
        """The stretch before ends here and one called `key` begins."""
        self.stretches.append(Stretch((self.moment, *key), self.moment))
        self._note_peak()

    def add(self, moment: str, **parts: int) -> None:
        """A stretch that was not watched."""
        self.stretches.insert(0, Stretch((moment, "added"), moment, Counter(parts)))

    def size_of(self, part: str) -> int:
        """Bytes of `part` that are alive."""
        return self._parts[part]

    def adopt(self, tensor: Tensor, part: str) -> None:
        """Counts memory that was there before, or names the part of what is counted."""
        for inner in inner_tensors(tensor):
            storage = self._alive.get(storage_key(inner))
            if storage is None:
                self._enter(inner, part)
            else:
                self._relabel(storage, part)

    def rest_of(self, *parts: str) -> list[Storage]:
        """What is alive of these parts."""
        return [storage for storage in self._alive.values() if storage.part in parts]

    def relabel(self, storages: list[Storage], part: str) -> None:
        """Names the part of `storages`, from the moment they were made."""
        for storage in storages:
            self._relabel(storage, part)

    @contextmanager
    def naming(self, part: str) -> Iterator[None]:
        """What is made meanwhile is of `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Counts storages that are emptied and filled again, as FSDP2 does with gathered weights, as `gathered`."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            known = self._alive.get(storage._cdata)
            if known is None:
                self._enter_storage(storage, "gathered")
            else:
                if known.part in _NAMELESS:
                    self._relabel(known, "gathered")
                self._count(known.part, -known.size)
                known.size = self._round_up(storage.nbytes())
                self._count(known.part, known.size)
                self._note_peak()
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def _look_into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls one of our own operations, with what its inside takes for a moment."""
        key = (func, self.answer, self._round_up, *describe((*args, *sorted(kwargs.items())), []))
        if key in _EXTRA:
            self._note_peak(_EXTRA[key])
            return call(func, args, kwargs)
        before, highest, self._highest = self._total, self._highest, self._total
        with self:
            result = OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        _EXTRA[key] = self._highest - before
        self._highest = max(highest, self._highest)
        return result

    def _name_gathered(self, values: Iterable[Any]) -> None:
        """What comes from other processes, or goes to them, and would be nameless."""
        for value in values:
            if isinstance(value, Tensor):
                self._enter(value, "gathered")
                storage = self._alive[storage_key(value)]
                if storage.part in _NAMELESS:
                    self._relabel(storage, "gathered")
            elif isinstance(value, tuple | list):
                self._name_gathered(value)

    def _enter(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._enter_storage(storage, part)

    def _enter_storage(self, storage: Any, part: str) -> None:
        key = storage._cdata
        self._serial += 1
        known = Storage(self._round_up(storage.nbytes()), part, self._serial)
        known.reference = weakref.ref(storage, lambda _: self._leave(key))
        self._alive[key] = known
        self._count(part, known.size)
        self._note_peak()

    def _leave(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        if storage is not None:
            self._count(storage.part, -storage.size)

    def _count(self, part: str, size: int) -> None:
        self._parts[part] += size
        self._total += size

    def _note_peak(self, extra: int = 0) -> None:
        """Remembers what is alive, and `extra` of the part of this moment, where that is the most so far."""
        stretch, total = self.stretches[-1], self._total + extra
        self._highest = max(self._highest, total)
        if total > stretch.total:
            stretch.parts, stretch.total, stretch.serial = self._parts.copy(), total, self._serial
            stretch.parts[self.part] += extra

    def _relabel(self, storage: Storage, part: str) -> None:
        if storage.part == part:
            return
        counts = [self._parts]
        for stretch in reversed(self.stretches):
            if stretch.serial < storage.serial:
                break
            counts.append(stretch.parts)
        for count in counts:
            count[storage.part] -= storage.size
            count[part] += storage.size
        storage.part = part


def inner_tensors(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that make up a tensor: itself, the local part of a sharded one, those of a quantised one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):
                yield from inner_tensors(inner)
    else:
        yield tensor


def _is_looked_into(operation: Any, args: tuple[Any, ...]) -> bool:
    """Our own operations are made of torch's, and what those make takes memory for a moment: a weight made whole, a
    tile of scores. Tiles and chunks have an upper size; for large tensors they are many, and not worth the counting."""
    if operation.namespace != "optune":
        return False
    return operation._schema.name.startswith(_MAKE_WEIGHTS) or args[0].numel() <= _SMALL
