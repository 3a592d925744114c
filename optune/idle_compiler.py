"""Leaves torch's compiler out of a process that compiles nothing, until somebody does.

Every optimizer and every custom operation tells `torch._dynamo` before its first call that it is to be left alone, and
so imports it: a second of the start, and 70 MiB, for two questions whose answer is plain while there is no compiler. A
stand-in answers them. Whatever else is asked of it, or imported from below it, imports the real one in its place; what
was left alone until then is left alone by that one too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

NAME = "torch._dynamo"
SETTINGS = f"{NAME}.config"
"""The one part that is imported alone: activation checkpointing reads a value of it."""

_lock = threading.RLock()


def leave_out() -> None:
    """From now on `torch._dynamo` is imported when it is needed. Where it has been imported nothing changes."""
    with _lock:
        if NAME in sys.modules:
            return
        torch = importlib.import_module("torch")
        spec = importlib.util.find_spec(NAME)
        if spec is None:
            return
        stand_in = _StandIn(NAME)
        stand_in.__spec__, stand_in.__path__ = spec, list(spec.submodule_search_locations or ())
        stand_in.__file__, stand_in.__package__ = spec.origin, NAME
        sys.modules[NAME] = stand_in
        setattr(torch, NAME.rpartition(".")[2], stand_in)
        sys.meta_path.insert(0, _Below())


def tried(optimizer: Any) -> AbstractContextManager[Any]:
    """In this context a step of `optimizer` compiles nothing, which takes longer than a trial. torch's own compile
    nothing anyway, and need no compiler to be told so."""
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return nullcontext()
    return importlib.import_module("torch").compiler.set_stance("force_eager")


def is_left_out() -> bool:
    """Whether the stand-in is at work."""
    return isinstance(sys.modules.get(NAME), _StandIn)


def _import() -> ModuleType:
    """The real one."""
    with _lock:
        if is_left_out():
            del sys.modules[NAME]
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Below)]
    return importlib.import_module(NAME)


class _StandIn(ModuleType):
    """Is asked by `torch._disable_dynamo` and by `Optimizer.step`."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """`fn`, which the real one will leave alone as soon as it is there."""
        if not isinstance(fn, FunctionType):
            return _import().disable(fn, recursive, **options)
        return _left_alone(fn, recursive, options)

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Such are asked of all modules there are, by `inspect` and `warnings`.
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return importlib.import_module(SETTINGS) if f"{NAME}.{name}" == SETTINGS else getattr(_import(), name)


def _left_alone(fn: Callable[..., Any], recursive: bool, options: dict[str, Any]) -> Callable[..., Any]:
    @functools.cache
    def disabled() -> Callable[..., Any]:
        return _import().disable(fn, recursive, **options)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (fn if is_left_out() else disabled())(*args, **kwargs)

    return call


class _Below(MetaPathFinder):
    """Has the real package imported before any module of it, which it would have been."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}.") or fullname == SETTINGS:
            return None
        _import()
        is_there = fullname in sys.modules
        return ModuleSpec(fullname, _There(sys.modules[fullname])) if is_there else None


class _There(Loader):
    """Gives a module that is there already: the package has imported it while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
