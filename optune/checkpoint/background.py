"""Saving while training goes on: copy to host memory, write in a thread, keep the right ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optune import shards
from optune.checkpoint.copying import copy_to_host, find_tight_host
from optune.checkpoint.folders import Say, check_keep_last, clear_leftovers, prune, say_on_stderr, set_aside_newer
from optune.checkpoint.optimizer_state import Parameters, pack_optimizer
from optune.checkpoint.writing import count_nonfinite, refuse_nonfinite, write_checkpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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

    `write_model(folder, tensors)` writes the model files from `model_tensors` or a copy of them (`shards.Part`s with
    several processes, one for each). `named_parameters` are
    the model's parameters that are trained; master weights in the optimizer are found and saved.

    With `background`, `save` copies everything to host memory, returns, and a thread writes; the next `save` waits for
    it. That takes the size of a checkpoint in host memory, kept from the first such save on: fresh memory would make
    each copy several times slower. Where it is not free, the save waits for the disk instead and says so. What goes
    wrong in the thread is raised by the next `check`, `save` or `wait`.

    A checkpoint with weights that are infinite or NaN is refused, unless they were so when the saver was made.
    Older checkpoints go when a new one is whole: see `prune`. `first_step` is the step that the run goes on from;
    checkpoints of later steps are set aside.

    `group`: a gloo group over all processes, used by nothing else, where several save one run. Every method is called
    by all of them at the same step. Each copies and writes its own slices, from its own thread; rank 0 sums up, renames
    and prunes. What goes wrong in one is raised in all, but not at the same step: agree on `has_failed`, then `check`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        write_model: Callable[[Path, Any], None],
        model_tensors: Parameters,
        optimizer: torch.optim.Optimizer,
        named_parameters: Parameters,
        keep_last: int | None = 2,
        keep_best: bool = True,
        background: bool = True,
        first_step: int = 0,
        say: Say = say_on_stderr,
        group: ProcessGroup | None = None,
    ) -> None:
        check_keep_last(keep_last)
        self._ranks = shards.Ranks(group)
        self._run_dir = run_dir
        self._write_model = write_model
        self._model_tensors = dict(model_tensors)
        self._optimizer = optimizer
        self._parameters = dict(named_parameters)
        self._keep: tuple[int | None, bool] = (keep_last, keep_best)
        self._background = background
        self._say = say
        self._ranks.lead(lambda: self._tidy(first_step))
        self._known_nonfinite = count_nonfinite(self._parameters, group)
        self._buffers: dict[str, Tensor] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.reports: list[SaveReport] = []

    def _tidy(self, first_step: int) -> None:
        set_aside_newer(self._run_dir, first_step, say=self._say)
        clear_leftovers(self._run_dir)
        if first_step:
            # A run that was killed between a save and the pruning after it has one too many.
            self._prune()

    def _prune(self) -> list[str]:
        return [str(folder) for folder in prune(self._run_dir, keep_last=self._keep[0], keep_best=self._keep[1])]

    def reserve(self) -> None:
        """Take the memory of the copies ahead of the first save, in the background. Call it after a step, when the
        optimizer's state is there, and only where a save in the background will follow."""
        if not self._background or self._buffers is not None or self._thread is not None:
            return
        live = _values(self._take(self._collect()[1]))
        if find_tight_host(_size(live), self._ranks) is None:
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

    def _take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | dict[str, shards.Part]:
        """What this process writes of `tensors`."""
        return dict(tensors) if self._ranks.is_alone else shards.parts_of(tensors, self._ranks.rank)

    def save(self, step: int, progress: Mapping[str, Any], *, is_last: bool = False) -> SaveReport:
        """Save the run as it is after `step`. Raises `CheckpointError`, also for an earlier save in the background.

        `is_last`: nothing goes on meanwhile, so nothing is copied and the checkpoint is whole on return.
        """
        start = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - start
        refuse_nonfinite(self._run_dir, step, self._parameters, self._known_nonfinite, self._ranks)
        rest, live = self._collect()
        tensors: dict[str, Any] = self._take(live)
        report = SaveReport(step, waited_s=waited_s)
        self.reports.append(report)
        values = _values(tensors)
        in_background = self._background and not is_last and self._has_room(_size(values))
        if in_background:
            self._buffers = copy_to_host(values, self._buffers)
            tensors = shards.overlay(tensors, self._buffers)
            report.copied_bytes = _size(values)
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
        lacking = find_tight_host(size if self._buffers is None else 0, self._ranks)
        if lacking and self._ranks.is_main:
            self._say(f"warning: {lacking}: training waits")
        return lacking is None

    def _write(
        self,
        report: SaveReport,
        model: shards.Tensors,
        rest: dict[str, Any],
        state: shards.Tensors,
        progress: Mapping[str, Any],
    ) -> None:
        start = time.perf_counter()
        try:
            path = write_checkpoint(
                self._run_dir,
                report.step,
                lambda folder: self._write_model(folder, model),
                rest,
                state,
                progress,
                self._ranks,
            )
            report.removed = [Path(name) for name in self._ranks.lead(self._prune)]
            report.path = path
        except BaseException as error:
            self._error = error
        report.write_s = time.perf_counter() - start

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether `check` would raise."""
        return self._error is not None

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


def _values(tensors: Mapping[str, Tensor | shards.Part]) -> dict[str, Tensor]:
    """The memory that is to be written."""
    found = {name: each.values if isinstance(each, shards.Part) else each for name, each in tensors.items()}
    return {name: values for name, values in found.items() if values is not None}


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
