"""Saving while training goes on: copy to host memory, write in a thread, keep the right ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor

from optune import files
from optune.checkpoint.folders import Say, check_keep_last, clear_leftovers, prune, say_on_stderr, set_aside_newer
from optune.checkpoint.optimizer_state import Parameters, pack_optimizer
from optune.checkpoint.writing import count_nonfinite, refuse_nonfinite, write_checkpoint


@dataclass
class SaveReport:
    """One save. `stall_s`: how long training stood still, `waited_s` of it for the save before. `write_s`: how long the
    disk took; 0 until it is done.

    `copied_bytes`: size of the copy in host memory; 0 when training waited for the disk.
    """

    step: int
    stall_s: float = 0.0
    waited_s: float = 0.0
    write_s: float = 0.0
    copied_bytes: int = 0
    path: Path | None = None
    removed: list[Path] = field(default_factory=list)


class Saver:
    """Saves the checkpoints of one run; a context manager that waits for the last one.

    `write_model(folder, tensors)` writes the model files from `model_tensors` or a copy of them. `named_parameters` are
    the model's parameters that are trained; master weights in the optimizer are found and saved.

    With `background`, `save` copies everything to host memory, returns, and a thread writes; the next `save` waits for
    it. That takes the size of a checkpoint in host memory, kept from the first such save on: fresh memory would make
    each copy several times slower. Where it is not free, the save waits for the disk instead and says so. What goes
    wrong in the thread is raised by the next `check`, `save` or `wait`.

    A checkpoint with weights that are infinite or NaN is refused, unless they were so when the saver was made.
    Older checkpoints go when a new one is whole: see `prune`. `first_step` is the step that the run goes on from;
    checkpoints of later steps are set aside.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        write_model: Callable[[Path, Mapping[str, Tensor]], None],
        model_tensors: Parameters,
        optimizer: torch.optim.Optimizer,
        named_parameters: Parameters,
        keep_last: int | None = 2,
        keep_best: bool = True,
        background: bool = True,
        first_step: int = 0,
        say: Say = say_on_stderr,
    ) -> None:
        check_keep_last(keep_last)
        set_aside_newer(run_dir, first_step, say=say)
        clear_leftovers(run_dir)
        if first_step:
            # A run that was killed between a save and the pruning after it has one too many.
            prune(run_dir, keep_last=keep_last, keep_best=keep_best)
        self._run_dir = run_dir
        self._write_model = write_model
        self._model_tensors = dict(model_tensors)
        self._optimizer = optimizer
        self._parameters = dict(named_parameters)
        self._keep: tuple[int | None, bool] = (keep_last, keep_best)
        self._background = background
        self._say = say
        self._known_nonfinite = count_nonfinite(self._parameters)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.reports: list[SaveReport] = []

    def reserve(self) -> None:
        """Take the memory of the copies ahead of the first save, in the background. Call it after a step, when the
        optimizer's state is there, and only where a save in the background will follow."""
        if self._background and not self._buffers and self._thread is None:
            live = self._collect()[1]
            if sum(tensor.nbytes for tensor in live.values()) < psutil.virtual_memory().available:
                self._thread = threading.Thread(target=self._reserve, args=(live,), name="optune-reserve", daemon=True)
                self._thread.start()

    def _reserve(self, live: Mapping[str, Tensor]) -> None:
        with contextlib.suppress(RuntimeError):  # No memory after all: the save itself will say so.
            # Training may change a tensor while it is read: these values are never used.
            self._buffers = copy_to_host(live)

    def _collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The optimizer's values that are no tensors, and all tensors, the model's under `model/…`."""
        rest, state = pack_optimizer(self._optimizer, self._parameters)
        return rest, {f"model/{name}": tensor for name, tensor in self._model_tensors.items()} | state

    def save(self, step: int, progress: Mapping[str, Any], *, is_last: bool = False) -> SaveReport:
        """Save the run as it is after `step`. Raises `CheckpointError`, also for an earlier save in the background.

        `is_last`: nothing goes on meanwhile, so nothing is copied and the checkpoint is whole on return.
        """
        start = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - start
        refuse_nonfinite(self._run_dir, step, self._parameters, self._known_nonfinite)
        rest, tensors = self._collect()
        report = SaveReport(step, waited_s=waited_s)
        self.reports.append(report)
        size = sum(tensor.nbytes for tensor in tensors.values())
        in_background = self._background and not is_last and self._has_room(size)
        if in_background:
            self._buffers = copy_to_host(tensors, self._buffers)
            tensors = {name: self._buffers[name] for name in tensors}
            report.copied_bytes = size
        model = {name: tensors.pop(f"model/{name}") for name in self._model_tensors}
        # The thread must not see later changes of the caller's dictionary.
        arguments = (report, model, rest, tensors, dict(progress))
        if in_background:
            # Not a daemon: a program that ends by an error still finishes its checkpoint.
            self._thread = threading.Thread(target=self._write, args=arguments, name="optune-save")
            self._thread.start()
        else:
            self._write(*arguments)
            self.check()
        report.stall_s = time.perf_counter() - start
        return report

    def _has_room(self, size: int) -> bool:
        free = psutil.virtual_memory().available
        if self._buffers or size < free:
            return True
        needs, has = files.format_bytes(size), files.format_bytes(free)
        self._say(f"warning: saving in the background takes {needs} of host memory, {has} are free: training waits")
        return False

    def _write(
        self,
        report: SaveReport,
        model: Mapping[str, Tensor],
        rest: dict[str, Any],
        state: Mapping[str, Tensor],
        progress: Mapping[str, Any],
    ) -> None:
        start = time.perf_counter()
        try:
            path = write_checkpoint(
                self._run_dir, report.step, lambda folder: self._write_model(folder, model), rest, state, progress
            )
            report.removed = prune(self._run_dir, keep_last=self._keep[0], keep_best=self._keep[1])
            report.path = path
        except BaseException as error:
            self._error = error
        report.write_s = time.perf_counter() - start

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way in the background."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what went wrong in a save that has ended. Costs nothing: call it at every step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> Path | None:
        """Wait until the disk has everything. Returns the newest checkpoint of this saver; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return next((report.path for report in reversed(self.reports) if report.path is not None), None)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as late:
            self._say(f"warning: {late}")


def copy_to_host(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies in host memory, into `buffers` where those fit. Tensors that are the same memory share one copy.

    What is on an accelerator goes to pinned memory, all of it on the way at once.
    """
    buffers = buffers or {}
    copies: dict[tuple[Any, ...], Tensor] = {}
    used: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or same not in copies:
            copy = buffers.get(name)
            if copy is None or id(copy) in used or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used.add(id(copy))
            copies[same] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        result[name] = copies[same]
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return result
