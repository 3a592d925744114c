"""One process holds a run folder at a time: `.lock` carries an advisory lock, which ends with the process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

from optune.errors import ConfigError

NAME = ".lock"
OTHER_FOLDER = "choose another output_dir"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_TRIES = 10


def take(path: Path) -> IO[str]:
    """Hold `.lock` for as long as the returned file is open; the owner's process and host stand in it."""
    lock = (path / NAME).open("a+", encoding="utf-8")
    try:
        if not _try(lock, fcntl.LOCK_EX):
            raise _in_use(path, _read_owner(lock))
        lock.seek(0)
        lock.truncate()
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        lock.write(json.dumps(owner) + "\n")
        lock.flush()
    except BaseException:
        lock.close()
        raise
    return lock


def refuse_held(path: Path) -> None:
    """Raise `ConfigError` where another process holds `path` now. Writes nothing and holds nothing."""
    try:
        lock = (path / NAME).open(encoding="utf-8")
    except FileNotFoundError:
        return
    with lock:
        if not _try(lock, fcntl.LOCK_SH):
            raise _in_use(path, _read_owner(lock))


def _try(lock: IO[str], kind: int) -> bool:
    """Whether the lock could be had; True where the file system has none and its last owner is gone."""
    for attempt in range(_TRIES):
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD:
                _refuse_living_owner(Path(lock.name).parent, lock)
                if kind == fcntl.LOCK_EX:
                    folder = Path(lock.name).parent
                    sys.stderr.write(f"warning: {folder} is on a file system without locks: let no second run use it\n")
                return True
            # Another process may only be looking whether the folder is held.
            if attempt < _TRIES - 1:
                time.sleep(0.02)
        else:
            return True
    return False


def _read_owner(lock: IO[str]) -> dict[str, Any]:
    lock.seek(0)
    try:
        owner = json.loads(lock.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _refuse_living_owner(path: Path, lock: IO[str]) -> None:
    """Where locks do not exist, the process number has to do, on this host."""
    owner = _read_owner(lock)
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("pid"), int):
        return
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return
    except PermissionError:
        pass
    if owner["pid"] != os.getpid():
        raise _in_use(path, owner)


def _in_use(path: Path, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if len(owner) == 3 else "another process"
    return ConfigError(
        f"{path} is in use by {who}", where="output_dir", hint=f"wait for it, stop it, or {OTHER_FOLDER}"
    )
