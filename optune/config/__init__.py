"""Config: the sections that every recipe reads, and `load`, which checks a file and overrides against them.

The rules a user meets stand in docs/configuration.md. A name is read from its file when it is first used: `optune ls`
must not wait for a YAML reader, and nothing here imports torch before a config is otherwise right.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optune.config.emit import to_dict, to_run_yaml, to_yaml
    from optune.config.loading import load
    from optune.config.options import option
    from optune.config.paths import looks_like_path
    from optune.config.problems import ConfigProblemsError
    from optune.config.sections import (
        CheckpointSection,
        DataSection,
        DataSource,
        LoraSection,
        ModelSection,
        RunConfig,
        ScheduleSection,
    )
    from optune.config.targets import bind_targets, read_target, resolve_target, schedule_keywords

__all__ = [
    "CheckpointSection",
    "ConfigProblemsError",
    "DataSection",
    "DataSource",
    "LoraSection",
    "ModelSection",
    "RunConfig",
    "ScheduleSection",
    "bind_targets",
    "load",
    "looks_like_path",
    "option",
    "read_target",
    "resolve_target",
    "schedule_keywords",
    "to_dict",
    "to_run_yaml",
    "to_yaml",
]

_FILES = {
    "to_dict": "emit",
    "to_run_yaml": "emit",
    "to_yaml": "emit",
    "load": "loading",
    "option": "options",
    "looks_like_path": "paths",
    "ConfigProblemsError": "problems",
    "bind_targets": "targets",
    "read_target": "targets",
    "resolve_target": "targets",
    "schedule_keywords": "targets",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'optune.config' has no attribute {name!r}")
    module = importlib.import_module(f"optune.config.{_FILES.get(name, 'sections')}")
    value = globals()[name] = getattr(module, name)
    return value
