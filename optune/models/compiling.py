"""torch.compile on CPUs, without what its C++ costs at the start of a run.

Beside the products and the operations of `models.fused`, `models.attention` and `models.rope` little is left to
generate: a handful of loops, which the C++ compiler turns into code in a second or two each. Around them torch does
three things that took longer than that, one after another, with nothing kept from an earlier run.

- It compiles and loads trial programs with its vector headers, for each set of vector instructions. Here the compiler
  is asked whether it knows their flags, in milliseconds, and torch whether it runs on them itself.
- It precompiles its headers, which pays from some twenty loops on.
- It tries three smaller programs when the first block runs. They are tried here, while the start goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import subprocess
import threading
from typing import Any

import torch

from optune import kernels

_TRIES_ISA = "TORCHINDUCTOR_VEC_ISA_OK"
_PRECOMPILES = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def get_ready(device: torch.device) -> None:
    """Makes the first compilation on `device` short; returns at once. What the environment says to torch stands."""
    if device.type != "cpu":
        return
    # All imports here: two threads that import parts of one package wait for each other.
    from torch._inductor import codecache, compile_fx, config, cpu_vec_isa  # noqa: F401

    if _PRECOMPILES not in os.environ:
        config.cpp_cache_precompile_headers = False
    if _TRIES_ISA not in os.environ and config.cpp.vec_isa_ok is None and _knows_vectors():
        config.cpp.vec_isa_ok = True
    here = contextvars.copy_context()  # Torch's settings are those of a thread.
    threading.Thread(target=here.run, args=(_choose_vectors,), name="optune-compiling", daemon=True).start()
    kernels.is_ready()  # Compiled code calls them, and cannot ask for them.


def _knows_vectors() -> bool:
    """Whether the C++ compiler takes the flags that torch may give it here, and torch's own code runs on them."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    here = set(cpu_vec_isa.x86_isa_checker())
    if torch.backends.cpu.get_cpu_capability() != ("AVX512" if "avx512" in here else "AVX2"):
        return False
    sets: list[Any] = [each for each in cpu_vec_isa.supported_vec_isa_list if set(str(each).split()) <= here]
    flags = [word for each in sets for word in each.build_arch_flags().split()]
    try:
        words = [cpp_builder.get_cpp_compiler(), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except Exception:  # No compiler, in one of torch's own ways to say so: the compilation will.
        return False


def _choose_vectors() -> None:
    """What is chosen is kept, and found by the compilation."""
    from torch._inductor import cpu_vec_isa

    with contextlib.suppress(Exception):  # The compilation meets it again, and can say it.
        cpu_vec_isa.pick_vec_isa()
