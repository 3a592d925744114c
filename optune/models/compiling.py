"""torch.compile on CPUs that have no native kernels: loops in C++, without what they need not cost at the start of a
run. Around them torch does three things that took longer than the loops, one after another.

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
from torch import Tensor

_TRIES_ISA = "TORCHINDUCTOR_VEC_ISA_OK"
_PRECOMPILES = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def get_ready(weight: Tensor) -> None:
    """Makes the first compilation of a block with weights like `weight` short. What the environment says to torch
    stands."""
    if weight.device.type != "cpu":
        return
    # All imports here: two threads that import parts of one package wait for each other.
    from torch._inductor import codecache, compile_fx, config, cpu_vec_isa  # noqa: F401

    if _PRECOMPILES not in os.environ:
        config.cpp_cache_precompile_headers = False
    if _TRIES_ISA not in os.environ and config.cpp.vec_isa_ok is None and _knows_vectors():
        config.cpp.vec_isa_ok = True
    here = contextvars.copy_context()  # Torch's settings are those of a thread.
    threading.Thread(target=here.run, args=(_choose_vectors,), name="optune-compiling", daemon=True).start()


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
