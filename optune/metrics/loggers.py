"""Experiment loggers, chosen by `_target_` in the config's `loggers`.

To add one: a class with the three methods of `Logger`, its library imported in `__init__` by `_need`, an extra in
pyproject.toml, and a test that reads back what it wrote.
"""

from __future__ import annotations

import importlib
import re
import secrets
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optune.errors import ConfigError, OptuneError

_SECRET = re.compile(r"(^|[._-])(tokens?|api[._-]?keys?|keys?|passwords?|passwd|secrets?|credentials?)$", re.IGNORECASE)
_GROUPS = {"tokens_per_s": "speed", "step_s": "speed", "peak_memory_gib": "memory"}


class Logger(Protocol):
    """What `RunLog` calls. `metrics` has the keys of metrics.jsonl without `step`, numbers only."""

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Once, before the first metrics. `first_step` > 0: the run goes on; later steps in old logs are void."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One logged step, or one validation."""

    def close(self, succeeded: bool) -> None:
        """Once, at the end, also after an error."""


class TensorBoard:
    """Event files for TensorBoard, in `log_dir` or the run folder's `tensorboard/`. Extra: `optune[tensorboard]`."""

    def __init__(self, log_dir: str | None = None) -> None:
        _need("tensorboard", "tensorboard")
        if log_dir is not None:
            _check_folder(Path(log_dir).expanduser(), "loggers: TensorBoard: log_dir")
        self._log_dir = log_dir
        self._writer: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensorboard's own imports warn; a user can do nothing about it.
            from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._log_dir).expanduser() if self._log_dir else run_dir / "tensorboard"
        purge_step = first_step + 1 if first_step else None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        except OSError as error:
            raise _unusable(folder, "loggers: TensorBoard", error.strerror or str(error)) from error
        lines = "\n".join(f"    {key}: {value}" for key, value in _flatten(hide_secrets(config)).items())
        self._writer.add_text("config", lines, global_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(tag(key), value, global_step=step)

    def close(self, succeeded: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Weights & Biases. Extra: `optune[wandb]`.

    `mode` is online, offline or disabled; null leaves it to wandb (its environment variable `WANDB_MODE`). A run that
    goes on from a checkpoint goes on in the same W&B run, whose id stands in the run folder's `wandb-id.txt`. The key
    comes from `wandb login` or `WANDB_API_KEY`, never from the config.
    """

    def __init__(
        self,
        project: str = "optune",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ) -> None:
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f"{mode!r} is not online, offline, disabled or null", where="loggers: WandB: mode")
        self._wandb = _need("wandb", "wandb")
        self._settings = {"project": project, "name": name, "entity": entity, "group": group, "mode": mode}
        self._tags = list(tags) if tags else None
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        id_file = run_dir / "wandb-id.txt"
        if not (first_step and id_file.exists()):
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        try:
            self._run = self._wandb.init(
                **self._settings | {"name": self._settings["name"] or run_dir.name},
                tags=self._tags,
                dir=str(run_dir),
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                config=_plain(hide_secrets(config)),
                # The terminal and log.txt are ours: wandb neither prints to them nor records them.
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # no network, no key, an entity that is not there: each a class of its own
            raise OptuneError(
                f"cannot start: {' '.join(str(error).split()) or type(error).__name__}",
                where="loggers: WandB",
                hint="`wandb login` stores a key; mode: offline needs neither key nor network",
            ) from error
        # Steps of our own, so that a run which goes on from an older checkpoint may log them again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{tag(key): value for key, value in metrics.items()}})

    def close(self, succeeded: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if succeeded else 1)


def tag(key: str) -> str:
    """`train/loss`, `validation/loss`, `speed/tokens_per_s`: the name of a metric where they are grouped."""
    if key.startswith("validation_"):
        return f"validation/{key.removeprefix('validation_')}"
    return f"{_GROUPS.get(key, 'train')}/{key}"


def hide_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `***` for each value whose key looks like a secret: token, key, password, secret."""

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: "***" if _SECRET.search(str(key)) and isinstance(entry, str) and entry else hide(entry)
                for key, entry in value.items()
            }
        return [hide(entry) for entry in value] if isinstance(value, list | tuple) else value

    return hide(config)


def _check_folder(folder: Path, where: str) -> None:
    """Refuses a folder that cannot be made or written to, before anything is loaded. Leaves nothing behind."""
    folder = folder.absolute()
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise _unusable(folder, where, f"{nearest} is a file" if nearest != folder else "it is a file")
        Path(tempfile.mkdtemp(prefix=".optune-", dir=nearest)).rmdir()
    except OSError as error:
        raise _unusable(folder, where, error.strerror or str(error)) from error


def _unusable(folder: Path, where: str, cause: str) -> ConfigError:
    return ConfigError(f"cannot write to {folder}: {cause}", where=where, hint="name a folder that can be written to")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _need(module: str, extra: str) -> Any:
    """Import `module`, or say how to install it: when the logger is made, which is before the model is loaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} is not installed", where="loggers", hint=f"pip install 'optune[{extra}]'"
        ) from error
