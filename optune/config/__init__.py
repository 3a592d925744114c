"""Config: the sections that every recipe reads, and `load`, which checks a file and overrides against them.

The rules a user meets stand in docs/configuration.md. Nothing here imports torch before a config is otherwise right.
"""

from optune.config.emit import to_dict, to_yaml
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
from optune.config.targets import resolve_target

__all__ = [
    "CheckpointSection",
    "ConfigProblemsError",
    "DataSection",
    "DataSource",
    "LoraSection",
    "ModelSection",
    "RunConfig",
    "ScheduleSection",
    "load",
    "looks_like_path",
    "option",
    "resolve_target",
    "to_dict",
    "to_yaml",
]
