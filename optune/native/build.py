"""Compiles the native libraries. Imports nothing of torch, so that it can run while torch is imported.

An installation of optune brings kernels for each level of processors in `built/`, where a compiler was at hand when it
was made (`hatch_build.py`). What it does not bring is compiled on the machine that needs it, once, and lies in the
user's cache. Both have names that say what they were made from.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from optune import files

FOLDER = Path(__file__).parent
BUILT = FOLDER / "built"
BUILT_BY = "compiler.txt"
"""In `BUILT`: the name and version of the compiler."""
SWITCH = "OPTUNE_KERNELS"
"""Set to 0 in the environment, it turns them off."""
MEMORY_SWITCH = "OPTUNE_MEMORY"
"""Likewise: torch's own memory is used then."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-fPIC", "-std=c++17")
KERNELS = ("kernels.cpp", "attention.cpp", "matrices.cpp")
KERNEL_FLAGS = (
    "-O3", "-fopenmp",
    "-fno-math-errno", "-fno-trapping-math",  # which change no result
    "-fno-strict-aliasing",  # two bf16 numbers are also read as one word
)  # fmt: skip
MEMORY = ("memory.cpp",)
MEMORY_FLAGS = ("-O2",)
TIMEOUT_S = 120


@dataclass(frozen=True)
class Level:
    """Processors that have the same code: what the compiler is told of them, and what they say of themselves."""

    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_WIDE = "-mprefer-vector-width=512"
LEVELS = (
    Level(("-march=x86-64-v4", "-mavx512bf16", _WIDE), _V4 | {"avx512_bf16"}),
    Level(("-march=x86-64-v4", _WIDE), _V4),
    Level(("-march=x86-64-v3",), _V3),
)
"""Of x86-64, from the most able on."""

_lock, _asking = threading.Lock(), threading.Lock()


class NoLibraryError(Exception):
    """Says why there is none, in words for a person."""


def start_making() -> None:
    """Makes the libraries in the background; `make_kernels` and `make_memory` wait for that, and tell what fails."""

    def make(make_one: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            make_one()

    for make_one in (make_memory, make_kernels):  # in the order in which a run asks for them
        threading.Thread(target=make, args=(make_one,), name="optune_native", daemon=True).start()


def make_kernels(*, anew: bool = False) -> tuple[Path, str]:
    """The path of the compiled kernels, and the compiler's name and version: of those that were installed, unless they
    are wanted `anew`, or `CXX` names a compiler. Raises NoLibraryError."""
    _check_allowed(SWITCH)
    level = find_level()
    built = BUILT / _name_built(level)
    if built.exists() and not anew and not os.environ.get("CXX"):
        return built, (BUILT / BUILT_BY).read_text()
    # Without a runtime of OpenMP: that of torch serves, whose threads are there already.
    return _make(KERNELS, _flags_for(level), [], " ".join(sorted(level.features)))


def find_level() -> Level:
    """That of this machine; one of its own where it is below all others, or no x86-64."""
    features = frozenset(_cpu_flags().split())
    known = LEVELS if platform.machine() == "x86_64" else ()
    return next((level for level in known if level.features <= features), Level(("-march=native",), features))


def list_levels(*, here_alone: bool) -> Sequence[Level]:
    """For which an installation brings kernels: for this machine alone, or for all of its kind. None for processors
    whose levels nobody has written down, and where there are no kernels."""
    if not sys.platform.startswith("linux"):
        return ()
    known = LEVELS if platform.machine() == "x86_64" else ()
    return (find_level(),) if here_alone else known


def build(folder: Path, levels: Sequence[Level]) -> None:
    """Compiles the kernels for an installation: into `folder`, whose content belongs in `BUILT`. Raises
    NoLibraryError."""
    compiler = _find_compiler()
    version = _ask_version(compiler)
    for level in levels:
        _compile(compiler, _flags_for(level), KERNELS, [], folder / _name_built(level))
    (folder / BUILT_BY).write_text(version)


def _flags_for(level: Level) -> list[str]:
    return [*FLAGS, *KERNEL_FLAGS, *level.flags]


def _name_built(level: Level) -> str:
    made_for = [*sorted(level.features), platform.machine()]
    return f"{_hash([*_read_sources(KERNELS), *_flags_for(level), *made_for])}.so"


def make_memory() -> tuple[Path, str]:
    """The path of the compiled allocator, which torch can be given, and the compiler's name and version. Raises
    NoLibraryError."""
    _check_allowed(MEMORY_SWITCH)
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    if not folders:
        raise NoLibraryError("torch is not installed in a folder")
    folder = Path(folders[0])
    flags = [*FLAGS, *MEMORY_FLAGS, f"-I{folder / 'include'}"]
    return _make(MEMORY, flags, [f"-L{folder / 'lib'}", "-lc10"], (folder / "version.py").read_text())


def _check_allowed(switch: str) -> None:
    if os.environ.get(switch) == "0":
        raise NoLibraryError(f"{switch}=0")
    if not sys.platform.startswith("linux"):
        raise NoLibraryError(f"they are not built on {platform.system()}")


def _make(sources: Sequence[str], flags: list[str], link: list[str], depends_on: str) -> tuple[Path, str]:
    compiler = _find_compiler()
    version = _ask_version(compiler)
    name = _hash([*_read_sources(sources), *flags, *link, *compiler, version, platform.machine(), depends_on])
    folder = _cache_folder()
    path = folder / f"{name}.so"
    with _alone(folder / f"{name}.lock") as is_alone:
        if not path.exists():
            if is_alone:
                _remove_left_over(path)
            _compile(compiler, flags, sources, link, path)
    return path, version


def _read_sources(names: Sequence[str]) -> list[str]:
    return [path.read_text() for path in sorted(FOLDER.glob("*.h")) + [FOLDER / name for name in names]]


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _find_compiler() -> list[str]:
    """With the words that belong before its arguments: `CXX="ccache g++"`."""
    wanted = os.environ.get("CXX")
    try:
        choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise NoLibraryError(f"CXX={wanted} cannot be read: {error}") from error
    for words in filter(None, choices):
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    raise NoLibraryError(f"no C++ compiler: {f'CXX={wanted}' if wanted else ', '.join(COMPILERS)} not found")


def _ask_version(compiler: list[str]) -> str:
    with _asking:  # both libraries may be made at the same time
        return _version_of(tuple(compiler), Path(compiler[0]).stat().st_mtime_ns)


@cache
def _version_of(compiler: tuple[str, ...], changed_ns: int) -> str:
    """The first line that it says of itself; `changed_ns`: when its file was changed last."""
    return next(iter(_run([*compiler, "--version"]).splitlines()), "a compiler without a name")


def _cache_folder() -> Path:
    """Of this user alone: what lies there is run."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = files.cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    with _lock:
        return _folder_of_this_process()


@cache
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


def _compile(compiler: list[str], flags: list[str], sources: Sequence[str], link: list[str], path: Path) -> None:
    # A compiler whose process has ended may still write there.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-", ignore_cleanup_errors=True) as folder:
        with ThreadPoolExecutor(len(sources)) as compilers:
            jobs = [[*compiler, *flags, "-c", str(FOLDER / name)] for name in sources]
            list(compilers.map(partial(_run, folder=Path(folder)), jobs))
        objects = [str(Path(name).with_suffix(".o")) for name in sources]
        made = Path(folder) / "library.so"
        _run([*compiler, "-shared", *objects, *link, "-o", made.name], Path(folder))
        files.sync_file(made)  # Half a library after a loss of power would be tried for ever.
        made.replace(path)


def _run(words: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, errors="replace", check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{Path(words[0]).name} cannot be used: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise NoLibraryError(f"{Path(words[0]).name} cannot compile them: {said.strip()}")
    return done.stdout


def is_amd_without_tiles() -> bool:
    """Whether the processor is AMD's and has no tiles of matrices (AMX), which torch's libraries use."""
    return _ask_processor("vendor_id") == "AuthenticAMD" and "amx_tile" not in _cpu_flags().split()


def _cpu_flags() -> str:
    """What this machine's processor says that it can do."""
    return _ask_processor("flags", "Features")


def _ask_processor(*names: str) -> str:
    """The first of these lines that the system has about it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
