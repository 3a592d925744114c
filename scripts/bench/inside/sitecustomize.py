"""Watches the optimizer of an unmodified tool: Python reads this file at the start of every process of a measured run.

`OPTUNE_BENCH_RECORD` names a folder; the process whose optimizer steps writes `PID.jsonl` there, a line for each
training step: when it was over (`time.monotonic`, one clock for all processes), the processor's time of this process
and its ended children until then, and the process's largest resident set. torch calls the hook after every
`Optimizer.step`. A training step is over when each parameter has been stepped once, whether by one optimizer or by
hundreds (a tool that steps in backward may have one for each parameter). After `OPTUNE_BENCH_STEPS` steps the process
ends: what a tool does after its last step is not measured.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

WATCHED = "torch.optim.optimizer"
TRIAL_SIZE = 2**15
"""Values of all its parameters; an optimizer that has no more is one that a tool tries out on stand-ins, or the own one
of a norm's weight, which the others of the step make up for."""


def largest_resident_mib() -> float:
    """VmHWM of this process: unlike getrusage, it starts anew with `exec`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


class Recorder:
    """The hook. Called with each optimizer that has just stepped."""

    def __init__(self, record: Path, wanted: int) -> None:
        self.record, self.wanted = record, wanted
        self.stepped: set[int] = set()
        self.steps = self.calls = self.calls_a_step = 0
        self.last = self.processor_s = 0.0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now, processor_s = time.monotonic(), sum(os.times()[:4])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if sum(parameter.numel() for parameter in parameters) <= TRIAL_SIZE:
            return
        if any(id(parameter) in self.stepped for parameter in parameters):
            self.end_step(
                optimizer
            )  # The one before: only the next step's first call tells, while the count is unknown.
        self.stepped.update(map(id, parameters))
        self.last, self.processor_s = now, processor_s
        self.calls += 1
        if self.calls == self.calls_a_step:
            self.end_step(optimizer)

    def end_step(self, optimizer: Any) -> None:
        if not self.stepped:
            return
        self.steps += 1
        self.calls_a_step, self.calls = self.calls, 0
        self.stepped.clear()
        line = {"step": self.steps, "end": self.last, "processor_s": self.processor_s}
        line |= {"resident_mib": largest_resident_mib()}
        if self.steps == 1:
            torch = sys.modules["torch"]
            line |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
            line |= {"optimizer": type(optimizer).__name__, "fused": bool(optimizer.defaults.get("fused"))}
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.steps >= self.wanted:
            os._exit(0)


class Watcher(importlib.abc.MetaPathFinder):
    """Sets the hook when the tool itself imports torch's optimizers, and imports nothing before."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        read = spec.loader.exec_module

        def read_and_hook(module: Any) -> None:
            read(module)
            record = Path(os.environ["OPTUNE_BENCH_RECORD"]) / f"{os.getpid()}.jsonl"
            module.register_optimizer_step_post_hook(Recorder(record, int(os.environ["OPTUNE_BENCH_STEPS"])))

        spec.loader.exec_module = read_and_hook
        return spec


if "OPTUNE_BENCH_RECORD" in os.environ:
    sys.meta_path.insert(0, Watcher())
