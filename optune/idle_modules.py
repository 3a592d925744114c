"""Leaves parts of torch out of a process that does not need them, until somebody does. Each has a stand-in; whatever is
asked of that, or imported from what depends on it, imports the real one in its place.

- **The compiler.** Every optimizer and every custom operation tells `torch._dynamo` before its first call that it is to
  be left alone, and so imports it: a second of the start, and 70 MiB, for two questions whose answer is plain while
  there is no compiler. What was left alone until it comes is left alone by it too.
- **The rules of shapes** in Python: what operations give for tensors without values whose kernels for the meta device
  are not in C++. `import torch` ends with them, and with the decompositions that they stand on: a third of a second and
  18 MiB, which a model's outline does not need. A mode of fake tensors has them from its beginning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
SETTINGS = f"{COMPILER}.config"
"""The one part of the compiler that is imported alone: activation checkpointing reads a value of it."""
RULES = "torch._meta_registrations"
BESIDE_RULES = (
    "torch._decomp", "torch._prims", "torch._prims_common.wrappers", "torch._refs",
    "torch.testing._internal.common_dtype", "torch.utils._content_store",
)  # fmt: skip
"""What the rules import, and whatever else traces or divides tensors. Some need the others to be there before."""

TRIED = "2.13."
"""Versions of torch that were tried without the rules; others are left as they are."""

_lock = threading.RLock()


def leave_out_compiler() -> None:
    """From now on `torch._dynamo` is imported when it is needed. Where it has been imported nothing changes."""
    with _lock:
        if COMPILER in sys.modules:
            return
        torch = importlib.import_module("torch")
        spec = importlib.util.find_spec(COMPILER)
        if spec is None:
            return
        stand_in = _Compiler(COMPILER)
        stand_in.__spec__, stand_in.__path__ = spec, list(spec.submodule_search_locations or ())
        stand_in.__file__, stand_in.__package__ = spec.origin, COMPILER
        sys.modules[COMPILER] = stand_in
        setattr(torch, COMPILER.rpartition(".")[2], stand_in)
        sys.meta_path.insert(0, _Before(COMPILER, [COMPILER]))


def leave_out_rules() -> None:
    """Imports torch without its rules of shapes, which are imported when they are needed. Where torch has been imported
    nothing changes; where it cannot be, whoever imports it next is told.

    Only for code that is known: on the meta device, outside of a mode of fake tensors, an operation that needs a rule
    raises NotImplementedError until they are there.
    """
    with _lock:
        if "torch" in sys.modules:
            return
        try:
            if not version("torch").startswith(TRIED):
                return
            sys.modules[RULES] = _StandIn(RULES)
            sys.meta_path.insert(0, _Before(RULES, BESIDE_RULES))
            torch: Any = importlib.import_module("torch")
        except Exception:
            _forget(RULES)
            return
        mode: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
        # What comes with the rules and is no rule: without its metaclass there is no torch.Generator.
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
        begin = mode.__init__

        @functools.wraps(begin)
        def begin_with_rules(self: Any, *args: Any, **kwargs: Any) -> None:
            if mode.__init__ is begin_with_rules:
                mode.__init__ = begin
                _import(RULES)
            begin(self, *args, **kwargs)

        mode.__init__ = begin_with_rules


def tried(optimizer: Any) -> AbstractContextManager[Any]:
    """In this context a step of `optimizer` compiles nothing, which takes longer than a trial. torch's own compile
    nothing anyway, and need no compiler to be told so."""
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return nullcontext()
    return importlib.import_module("torch").compiler.set_stance("force_eager")


def is_left_out(name: str) -> bool:
    """Whether the stand-in of this module is at work."""
    return isinstance(sys.modules.get(name), _StandIn)


def _import(name: str) -> ModuleType:
    """The real one."""
    with _lock:
        _forget(name)
    return importlib.import_module(name)


def _forget(name: str) -> None:
    """The stand-in, where there is one."""
    if is_left_out(name):
        del sys.modules[name]
        others = (finder for finder in sys.meta_path if not (isinstance(finder, _Before) and finder.stand_in == name))
        sys.meta_path[:] = others


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name.startswith("__"):  # Such are asked of all modules there are, by `inspect` and `warnings`.
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        return importlib.import_module(SETTINGS) if f"{own}.{name}" == SETTINGS else getattr(_import(own), name)


class _Compiler(_StandIn):
    """Is asked by `torch._disable_dynamo` and by `Optimizer.step`."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """`fn`, which the real one will leave alone as soon as it is there."""
        if not isinstance(fn, FunctionType):
            return _import(COMPILER).disable(fn, recursive, **options)
        return _left_alone(fn, recursive, options)

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being traced."""


def _left_alone(fn: Callable[..., Any], recursive: bool, options: dict[str, Any]) -> Callable[..., Any]:
    @functools.cache
    def disabled() -> Callable[..., Any]:
        return _import(COMPILER).disable(fn, recursive, **options)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (fn if is_left_out(COMPILER) else disabled())(*args, **kwargs)

    return call


class _Before(MetaPathFinder):
    """Has the real module of a stand-in imported before any module of `packages`, which it would have been."""

    def __init__(self, stand_in: str, packages: Sequence[str]) -> None:
        self.stand_in, self.packages = stand_in, packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == SETTINGS or not any(f"{fullname}.".startswith(f"{package}.") for package in self.packages):
            return None
        _import(self.stand_in)
        if (module := sys.modules.get(fullname)) is None:
            return None
        # Python asks a module that came meanwhile for its own spec, and would run its code a second time.
        module.__spec__ = ModuleSpec(fullname, _There(module))
        return module.__spec__


class _There(Loader):
    """Gives a module that is there already: it was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
