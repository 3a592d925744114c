"""optune finetunes language models from YAML recipes.

`from optune import train` gives a module that is read when it is first used, so a recipe's config can be checked, and a
typo refused, before torch is imported.
"""

import importlib.util
import sys
from types import ModuleType

__version__ = "0.1.0"

_LAZY = ("checkpoint", "data", "distributed", "generation", "lora", "loss", "metrics", "models", "optim", "run_folder", "train")


def __getattr__(name: str) -> ModuleType:
    if name not in _LAZY:
        raise AttributeError(f"module 'optune' has no attribute {name!r}")
    full_name = f"{__name__}.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = importlib.util.find_spec(full_name)
    if spec is None or spec.loader is None:
        raise ImportError(f"optune.{name} is missing from this installation")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    globals()[name] = module
    return module
