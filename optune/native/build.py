"""Compiles the kernels for this very machine, once: the library lies in the user's cache, under a name that says what
it was made from. Reads nothing of torch, so that it can run while torch is imported."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from optune import files

FOLDER = Path(__file__).parent
SOURCES = ("kernels.cpp", "attention.cpp")
HEADERS = ("arithmetic.h",)
SWITCH = "OPTUNE_KERNELS"
"""Set to 0 in the environment, it turns them off."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17",
    "-fno-math-errno", "-fno-trapping-math",  # which change no result
    "-fno-strict-aliasing",  # two bf16 numbers are also read as one word
)  # fmt: skip
WIDE = "-mprefer-vector-width=512"
TIMEOUT_S = 120
_lock = threading.Lock()


class NoKernelsError(Exception):
    """Says why there are none, in words for a person."""


def start_making() -> None:
    """Makes the library in the background; `make_library` waits for that, and tells what fails."""

    def make() -> None:
        with contextlib.suppress(Exception):
            make_library()

    threading.Thread(target=make, name="optune_kernels", daemon=True).start()


def make_library() -> tuple[Path, str]:
    """The path of the compiled library, and the compiler's name and version. Raises NoKernelsError."""
    if os.environ.get(SWITCH) == "0":
        raise NoKernelsError(f"{SWITCH}=0")
    if not sys.platform.startswith("linux"):
        raise NoKernelsError(f"they are not built on {platform.system()}")
    compiler = _find_compiler()
    version = next(iter(_run([*compiler, "--version"]).splitlines()), "a compiler without a name")
    flags = [*FLAGS, *([WIDE] if "avx512f" in _cpu_flags() else [])]
    texts = [(FOLDER / name).read_text() for name in SOURCES + HEADERS]
    parts = [*texts, *flags, *compiler, version, platform.machine(), _cpu_flags()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = _cache_folder()
    path = folder / f"{name}.so"
    with _alone(folder / f"{name}.lock") as is_alone:
        if not path.exists():
            if is_alone:
                _remove_left_over(path)
            _compile(compiler, flags, path)
    return path, version


def _find_compiler() -> list[str]:
    """With the words that belong before its arguments: `CXX="ccache g++"`."""
    wanted = os.environ.get("CXX")
    try:
        choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise NoKernelsError(f"CXX={wanted} cannot be read: {error}") from error
    for words in filter(None, choices):
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    raise NoKernelsError(f"no C++ compiler: {f'CXX={wanted}' if wanted else ', '.join(COMPILERS)} not found")


def _cache_folder() -> Path:
    """Of this user alone: what lies there is run."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = files.cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    with _lock:
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    folder, owner = tempfile.mkdtemp(prefix="optune-kernels-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # A fork of it ends earlier.
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """One process at a time: the others of this machine find what the first one made. False on a file system without
    locks, where each one compiles for itself."""
    with path.open("w") as lock:
        is_alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_alone = True
        try:
            yield is_alone
        finally:  # Closing it would not do where a fork has it open too.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _remove_left_over(path: Path) -> None:
    """What a process that was killed began to make."""
    for folder in path.parent.glob(f"{path.stem}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _compile(compiler: list[str], flags: list[str], path: Path) -> None:
    # A compiler whose process has ended may still write there.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-", ignore_cleanup_errors=True) as folder:
        _run([*compiler, *flags, "-c", *(str(FOLDER / name) for name in SOURCES)], Path(folder))
        # Without a runtime of OpenMP: that of torch serves, whose threads are there already.
        objects = [str(Path(name).with_suffix(".o")) for name in SOURCES]
        _run([*compiler, "-shared", *objects, "-o", "kernels.so"], Path(folder))
        made = Path(folder) / "kernels.so"
        files.sync_file(made)  # Half a library after a loss of power would be tried for ever.
        made.replace(path)


def _run(words: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, errors="replace", check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernelsError(f"{Path(words[0]).name} cannot be used: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise NoKernelsError(f"{Path(words[0]).name} cannot compile them: {said.strip()}")
    return done.stdout


def _cpu_flags() -> str:
    """What `-march=native` depends on: a cache may be shared by machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return ""
