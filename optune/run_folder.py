"""The folder of one run: who may use it, what it is called, what is said in it, and the result in `model/`.

    runs/my-run/
      config.yaml   metrics.jsonl   log.txt   checkpoints/step-000120/   model/   logs/rank-0001.txt

One process holds the folder at a time: `.lock` carries an advisory lock, which ends with the process however it ends.
The other processes of its run follow it: they write nothing but a log of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from tqdm import tqdm

from optune import files, folder_lock
from optune.errors import ConfigError, OptuneError
from optune.folder_lock import OTHER_FOLDER

_OWN_NAMES = ("config.yaml", "metrics.jsonl", "log.txt", "checkpoints", "model")


class RunFolder:
    """An open run folder; a context manager that lets go of it. Made by `open_run`, or by `follow_run` without a lock.

    While it is open, all that is written to `sys.stderr` also goes, with the time, to the log. An exception that
    leaves the context is written there too: its cause alone when it is an `OptuneError`, else with its traceback.
    """

    def __init__(self, path: Path, lock: IO[str] | None, log: Path) -> None:
        self.path = path
        self._lock = lock
        self._terminal = sys.stderr
        # What a follower says, the first process says too, or else it is for the log.
        self._shown: IO[str] = sys.stderr if lock is not None else Path(os.devnull).open("w")  # noqa: SIM115
        self._tee = _Tee(self._shown, log.open("ab", buffering=0))
        sys.stderr = cast(Any, self._tee)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def has_model_of(self, checkpoint: Path) -> bool:
        """Whether `model/` holds the weights of `checkpoint`."""
        return self.model.is_dir() and _weights(self.model) == _weights(checkpoint)

    def publish_model(self, checkpoint: Path) -> Path:
        """Make `model/` from the model files of `checkpoint`: all but its `optune/`.

        Weights are hard links where the disk allows it; small files, which people edit, are copies. The old `model/`
        stays until the new one is complete, and is replaced in one go.
        """
        aside = self.path / f"{files.ASIDE}model"
        try:
            files.remove_tree(aside)
            aside.mkdir()
            for source in files.walk(checkpoint):
                name = source.relative_to(checkpoint)
                if name.parts[0] == "optune":
                    continue
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                if source.suffix == ".safetensors":
                    files.link_or_copy(source, aside / name)
                else:
                    shutil.copyfile(source, aside / name)
            files.sync_tree(aside)
            files.replace_folder(aside, self.model)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OptuneError(
                f"the result could not be put together: {_cause(error)}",
                where=str(self.model),
                hint=f"the same weights are in {checkpoint}",
            ) from error
        return self.model

    def close(self) -> None:
        """Give `sys.stderr` back and let go of the folder. Closing twice does nothing."""
        if self._tee.is_closed:
            return
        if sys.stderr is self._tee:
            sys.stderr = self._terminal
        self._tee.close()
        if self._lock is None:
            self._shown.close()
        else:
            self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OptuneError):
            self._tee.log_only(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        elif error is not None:
            self._tee.log_only("".join(traceback.format_exception(error)))
        self.close()


def _weights(folder: Path) -> dict[str, str]:
    return {path.name: files.hash_file(path) for path in folder.glob("*.safetensors")}


Resume = bool | str | None
"""The key `resume`: null, `auto`, a folder; True is `auto`, False is null."""


def open_run(output_dir: str | Path, config_yaml: str, resume: Resume = None) -> RunFolder:
    """Take `output_dir` for a run: lock it, write `config.yaml`, start `log.txt`. Nothing is created before.

    Where `resume` is `auto`, this very folder, or a checkpoint in it, the run goes on with what the folder holds. Else
    the folder must not hold a run. One that never logged a step holds nothing, and its folder may be used again; for a
    run that goes on from another folder's checkpoint, one that never saved does.

    Raises `ConfigError` when the folder holds a run, is in use, or cannot be written.
    """
    path = Path(output_dir).absolute()
    check_output(path, resume=resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = folder_lock.take(path)
        try:
            # Again under the lock: another process may have been faster.
            _check_output(path, resume)
            if not _goes_on(path, resume):
                (path / "log.txt").unlink(missing_ok=True)
                (path / "metrics.jsonl").unlink(missing_ok=True)
                files.remove_tree(path / "logs")
            (path / "checkpoints").mkdir(exist_ok=True)
            files.write_whole(path / "config.yaml", config_yaml.encode())
            return RunFolder(path, lock, path / "log.txt")
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise _unwritable(path, _cause(error)) from error


def follow_run(output_dir: str | Path, rank: int) -> RunFolder:
    """The folder that the first process of this run has opened, for the process `rank`: its words go to
    `logs/rank-0001.txt`, and not to the terminal."""
    path = Path(output_dir).absolute()
    log = path / "logs" / f"rank-{rank:04}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return RunFolder(path, None, log)
    except OSError as error:
        raise _unwritable(path, _cause(error)) from error


def check_output(output_dir: str | Path, *, resume: Resume = None) -> None:
    """Raise `ConfigError` when `open_run` would refuse `output_dir`, as far as that shows without writing."""
    path = Path(output_dir).absolute()
    try:
        _check_output(path, resume)
        folder_lock.refuse_held(path)
    except OSError as error:
        raise _unwritable(path, _cause(error)) from error


def _check_output(path: Path, resume: Resume) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file", where="output_dir", hint=OTHER_FOLDER)
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{path} cannot be made: {nearest} is a file", where="output_dir", hint=OTHER_FOLDER)
    if not _may_write(nearest):
        raise ConfigError(
            f"{path} cannot be written: no permission in {nearest}", where="output_dir", hint=OTHER_FOLDER
        )
    goes_on = _goes_on(path, resume)
    if not path.exists() or (goes_on and any((path / "checkpoints").glob("step-*"))):
        return
    held = [name for name in _OWN_NAMES if (path / name).exists()]
    is_free = _never_saved(path) if resume else _never_stepped(path)
    if not held or ((path / folder_lock.NAME).exists() and is_free):
        return
    if goes_on:
        raise ConfigError(
            f"{path} holds no checkpoint to go on from, only {', '.join(held)}", where="output_dir", hint=OTHER_FOLDER
        )
    raise ConfigError(
        f"{path} already holds a run ({', '.join(held)})",
        where="output_dir",
        hint=f"go on with it by `optune resume {path}`, or {OTHER_FOLDER}",
    )


def _goes_on(path: Path, resume: Resume) -> bool:
    """Whether `resume` means the run in `path` itself."""
    if not isinstance(resume, str):
        return bool(resume)
    source, own = Path(resume).resolve(), path.resolve()
    return resume == "auto" or source == own or own in source.parents


def _may_write(folder: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def _never_stepped(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return not (metrics.exists() and metrics.stat().st_size) and _never_saved(path)


def _never_saved(path: Path) -> bool:
    checkpoints = path / "checkpoints"
    has_one = checkpoints.exists() and not all(entry.name.startswith(files.ASIDE) for entry in checkpoints.iterdir())
    return not has_one and not (path / "model").exists()


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {why}", where="output_dir", hint=OTHER_FOLDER)


def _cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class _Tee:
    """What stands in for `sys.stderr`: everything reaches the terminal, and `log.txt` line by line.

    `terminal` is the stream behind it. A progress bar draws on that one directly, so redraws never reach the log; a
    line that arrives while a bar is up clears it, and the bar comes back below.
    """

    def __init__(self, terminal: IO[str], log: IO[bytes]) -> None:
        self.terminal = terminal
        self._log = log
        self._line = ""
        self._held = ""
        self.is_closed = False

    def write(self, text: str) -> int:
        self._line += text
        *lines, self._line = self._line.split("\n")
        self._write_log(lines)
        self._held += text
        if any(getattr(bar, "fp", None) == self.terminal for bar in getattr(tqdm, "_instances", ())):
            # Half a line would be drawn over by the bar.
            shown, newline, self._held = self._held.rpartition("\n")
            if newline:
                with tqdm.external_write_mode(file=self.terminal):
                    self.terminal.write(shown + newline)
        else:
            shown, self._held = self._held, ""
            self.terminal.write(shown)
        return len(text)

    def log_only(self, text: str) -> None:
        """Write `text` to `log.txt` alone: for what the terminal shows in another form."""
        self._write_log(text.rstrip("\n").split("\n"))

    def _write_log(self, lines: list[str]) -> None:
        if not lines or self._log.closed:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        # What a carriage return has overwritten was never meant to stay.
        shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\r").rpartition("\r")[2]) for line in lines]
        try:
            self._log.write("".join(f"{now} {line}".rstrip() + "\n" for line in shown).encode())
        except OSError as error:
            self._log.close()
            self.terminal.write(f"warning: log.txt: {_cause(error)}: nothing more is written to it\n")

    def close(self) -> None:
        """Let what was held back out, and end the log. `terminal` stays open."""
        if self._line:
            self._write_log([self._line])
        self.terminal.write(self._held)
        self._line = self._held = ""
        self._log.close()
        self.is_closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
