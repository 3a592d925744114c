"""A forecast in a process of its own: a run of several processes cannot pretend to be others while it is itself."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from optune import distributed
from optune.distributed.pretending import pretend
from optune.errors import ConfigError

if TYPE_CHECKING:
    from optune.distributed import Processes
    from optune.plan.forecasting import Forecast

WITHIN_S = 300
"""How long the other processes wait for it at the end of their run."""


def predict_apart(processes: Processes, values: dict[str, Any]) -> Forecast:
    """`plan.predict` with `values` for rank 0 of so many `processes` in such a layout.

    The functions among `values` have to stand in a file, as those of a recipe do. Raises ConfigError.
    """
    module = sys.modules[getattr(values["outline"], "func", values["outline"]).__module__]
    layout = {name: size for name, size in asdict(processes.layout).items() if name != "keep_whole"}
    try:
        asked = pickle.dumps((processes.world_size, layout, values))
    except Exception as error:
        raise ConfigError(f"what the recipe hands over cannot be pickled: {error}", where="optune plan") from error
    work = pickle.dumps((module.__name__, module.__file__, asked))
    script = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it.answer()"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], input=work, capture_output=True, check=True, timeout=WITHIN_S,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},  # each has memory to work in
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"it took more than {WITHIN_S} s", where="optune plan") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {error.returncode}"]
        raise ConfigError(said[-1], where="optune plan") from None
    return pickle.loads(done.stdout)


def answer() -> None:
    """The other side: reads from stdin what is asked, and writes the forecast to stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A recipe that prints must not be taken for the answer.
    name, file, asked = pickle.load(sys.stdin.buffer)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

    from optune.plan.predicting import predict
    from optune.plan.working_out import numbers_only

    world_size, layout, values = pickle.loads(asked)
    others = nullcontext() if world_size == 1 else pretend(world_size)
    with numbers_only(), others, distributed.start("cpu", **layout, computes=False) as processes:
        found = predict(**values, processes=processes, is_apart=True)
    with out:
        pickle.dump(found, out)
