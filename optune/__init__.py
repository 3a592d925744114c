"""optune finetunes language models from YAML recipes.

`from optune import train` gives a module that is read when it is first used, so a recipe's config can be checked, and a
typo refused, before torch is imported.
"""

import importlib
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_NOUNS = (
    "checkpoint",
    "data",
    "distributed",
    "export",
    "generation",
    "lora",
    "loss",
    "metrics",
    "models",
    "optim",
    "plan",
    "run_folder",
    "session",
    "train",
)


class _Unread(ModuleType):
    """Stands for a submodule until one of its names is used.

    Not `importlib.util.LazyLoader`: that puts the unread module into `sys.modules`, where anything that looks through
    all modules (`inspect` does, while torch is imported) reads it at a moment when it cannot be read.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(importlib.import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self.__name__))


def __getattr__(name: str) -> ModuleType:
    # Python sets the attribute to the module itself when it is imported, so this is asked only before that.
    if name not in _NOUNS:
        raise AttributeError(f"module 'optune' has no attribute {name!r}")
    return _Unread(f"{__name__}.{name}")
