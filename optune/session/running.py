"""A run in progress: its steps, what it logs and saves, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from optune import checkpoint, files, memory, metrics, optim, run_folder
from optune.distributed import Processes
from optune.errors import TrainingError
from optune.session.hearing import Hearing
from optune.session.memory import MemoryCheck
from optune.signals import Requests
from optune.time_limit import TimeLimit
from optune.train import StepResult
from optune.types import Microbatch


class Batches(Protocol):
    """What a session has to know of the batches of `data.build_batches`."""

    @property
    def units_per_step(self) -> int: ...
    def epoch(self, step: int) -> float: ...
    def cursor(self, step: int) -> Any: ...
    def seek(self, step: int, cursor: Any) -> None: ...
    def describe_end(self, step: int) -> dict[str, str]: ...


class Session:
    """A run in progress; made by `start`."""

    def __init__(
        self,
        folder: run_folder.RunFolder,
        log: metrics.RunLog,
        saver: checkpoint.Saver,
        requests: Requests,
        processes: Processes,
        *,
        optimizer: Optimizer,
        batches: Batches,
        total_steps: int,
        time_limit: TimeLimit,
        save_s: float,
        saves_ahead: bool,
        memory: MemoryCheck,
        resume_from: Path | None,
        progress: dict[str, Any],
    ) -> None:
        self.step: int = progress["step"]
        """Steps done."""
        self._folder, self._log, self._saver, self._processes = folder, log, saver, processes
        self._hearing = Hearing(processes, requests, is_late=self._is_late, has_failed=lambda: saver.has_failed)
        self._optimizer, self._batches, self._total_steps = optimizer, batches, total_steps
        self._time_limit, self._save_s, self._longest_s = time_limit, save_s, 0.0
        self._step_began: float | None = None
        self._saves_ahead, self._memory = saves_ahead, memory
        self._resume_from, self._first_step = resume_from, self.step
        self._progress = progress
        self._saved_step = self.step
        self._was_owed = False
        self._stalls_s: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self._total_steps

    @property
    def owes_validation(self) -> bool:
        """Whether a signal ended the validation that belongs to the step done last: it comes before the next step."""
        return self._progress["owes_validation"]

    @property
    def exit_code(self) -> int:
        """0, also where `max_time` ended the run; 130 or 143 where a signal ended it before all was done."""
        stop = self._hearing.stop
        return 0 if stop is None or (self.is_over and not self.owes_validation) else 128 + stop

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """`numbers` summed over the ranks that see different rows. All processes call it together, and hear by it what
        one of them has been asked by a signal or the clock."""
        return self._hearing.sum(numbers)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 0 for the first of the run; ends early on a signal or at `max_time`.

        After each one the recipe has called `log_step`. Before the iteration ends the run is saved as it stands.
        """
        self._hearing.listen()
        while not self.is_over and not self._must_leave():
            self._step_began = time.monotonic()
            yield self.step
            self._hearing.listen()
            if self._hearing.has_failed:
                self._saver.wait()  # and so raise it
            if self._saves_ahead and self.step == self._first_step + 1:
                self._saver.reserve()
            self._longest_s, self._step_began = self._measure_longest_s(), None
            if self._hearing.take_save():
                self._log.say(f"SIGUSR1: saving after step {self.step}")
                self.save()
        if self._progress["skipped_steps"] >= self.step > 0:
            raise TrainingError(
                f"the gradient was not finite in any of {self.step} steps: no weight has changed, nothing is saved",
                hint="look for NaN or inf in the model's weights, or lower optimizer.lr",
            )
        self._save(is_last=True)

    def _must_leave(self) -> bool:
        """Whether this process takes no further step, which is then said."""
        if self._hearing.stop is not None:
            when = f"saving after step {self.step}" if self.step > self._saved_step else "nothing new to save"
            self._log.say(f"{self._hearing.stop.name}: {when}")
            return True
        # One step at least: a run that always left before its first one would never end.
        if self.step == self._first_step or not self._hearing.is_late:
            return False
        self._log.say(f"max_time is nearly over: saving after step {self.step} of {self._total_steps}")
        return True

    def _is_late(self) -> bool:
        """Whether the time is too short for another step and a save."""
        save_s = max([self._save_s, *(report.write_s for report in self._saver.reports)])
        return not self._time_limit.leaves(self._measure_longest_s() + save_s)

    def _measure_longest_s(self) -> float:
        under_way_s = 0.0 if self._step_began is None else time.monotonic() - self._step_began
        return max(self._longest_s, under_way_s)

    def log_step(self, result: StepResult) -> None:
        """Counts the step as done and logs it."""
        self.step += 1
        self._memory.saw(result)
        progress = self._progress
        progress["rows_seen"] += result.rows
        progress["targets_seen"] += result.targets
        progress["tokens_seen"] += result.tokens
        progress["skipped_steps"] += result.skipped
        progress["skipped_in_a_row"] = progress["skipped_in_a_row"] + 1 if result.skipped else 0
        self._log.step(
            self.step,
            epoch=self._batches.epoch(self.step),
            loss=result.loss,
            lr=optim.get_learning_rate(self._optimizer),
            grad_norm=result.grad_norm,
            targets=result.targets,
            tokens=result.tokens,
            skipped=result.skipped,
        )
        if result.skipped:
            self._log.warn(f"step {self.step} skipped: the gradient norm is {result.grad_norm}")

    def is_due(self, every_steps: int | None) -> bool:
        """Whether something that happens every so many steps happens now."""
        return every_steps is not None and self.step % every_steps == 0

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Around a validation: shown on the bar, not counted as time of a step; left early by `until_stopped`."""
        with self._log.aside("validating"):
            try:
                yield
            except _LeaveValidation:
                self._progress["owes_validation"] = True
                self._log.say(f"the validation after step {self.step} is left; it is taken when the run goes on")
        if self._was_owed:  # The checkpoint of this step lacks it.
            self._was_owed, self._saved_step = False, -1
            self.save()

    def until_stopped(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """`microbatches` for a validation, which may be long: a signal that asks for the end does not wait for it."""
        for microbatch in microbatches:
            if self._processes.world_size > 1:
                self._hearing.sum([])
            if self._hearing.stop is not None:
                raise _LeaveValidation
            yield microbatch

    def log_validation(self, loss: float) -> None:
        """Logs the validation loss of the weights as they are now; the checkpoint of this step carries it."""
        self._progress["validation"] = {"step": self.step, "loss": loss}
        self._log.validation(self.step, loss=loss, epoch=self._batches.epoch(self.step))
        self._was_owed, self._progress["owes_validation"] = self.owes_validation, False

    def save(self) -> None:
        """Saves a checkpoint of the weights as they are now, once a step at most."""
        self._save(is_last=self.is_over)

    def _save(self, *, is_last: bool) -> None:
        if self._saved_step == self.step:
            return
        progress = dict(self._progress)
        validation = progress.pop("validation", None)
        if validation is not None and validation["step"] == self.step:
            progress["validation_loss"] = validation["loss"]
        started = time.perf_counter()
        with self._log.aside("saving"):
            counters = {"epoch": self._batches.epoch(self.step), "log": self._log.checkpoint_state()}
            counters["cursor"] = self._batches.cursor(self.step)
            report = self._saver.save(self.step, progress | counters, is_last=is_last)
        self._saved_step = self.step
        if not is_last:
            self._stalls_s.append(time.perf_counter() - started)
            copied = f"{files.format_bytes(report.copied_bytes)} copied" if report.copied_bytes else "nothing copied"
            waited = f", {report.waited_s:.3f} s of it for the save before" if report.waited_s > 0.01 else ""
            held_s = self._stalls_s[-1]
            self._log.note(f"saving after step {self.step} held training up for {held_s:.3f} s{waited}, {copied}")

    def publish(self) -> None:
        """Waits for the last checkpoint and, where the run is complete, makes the result of it."""
        newest = self._saver.wait() or self._resume_from
        memory.give_back()  # The forecast and the plot have room now; and this process may go on after the run.
        written_s = [report.write_s for report in self._saver.reports]
        where: dict[str, object] = {}
        where |= {"predicted": None, "saving": metrics.describe_saves(written_s, self._stalls_s)}
        where |= {**self._batches.describe_end(self.step), "checkpoint": newest, "run folder": self._folder.path}
        if newest is not None and self.is_over:
            where["model"] = self._processes.on_main(self._publish_model, newest)
        if self.is_over:  # Who stops a run does not wait for it; and all that is kept is there by now.
            where["predicted"] = self._memory.compare(saves_ahead=self._saves_ahead)
        resume = f"optune resume {self._processes.launch_options}{self._folder.path}"
        if not self.is_over or self.owes_validation:
            where["go on"] = resume
        if self.step == self._first_step:
            nothing = f"nothing to train: step {self.step} of {self._total_steps} is done"
            more = {"train on": f"{resume} epochs=… or max_steps=…"} if self.is_over else {}
            title = nothing if self.is_over else f"left before step {self.step + 1} of {self._total_steps}"
            self._log.say(metrics.format_fields(title, where | more))
        self._log.finish(where, how="finished" if self.is_over else "stopped")

    def _publish_model(self, newest: Path) -> Path:
        # A process may have died between its last save and here; a result that is there may have been edited.
        is_made = self.step == self._first_step and self._folder.has_model_of(newest)
        return self._folder.model if is_made else self._folder.publish_model(newest)


class _LeaveValidation(Exception):  # noqa: N818 (a message between two methods, not a failure)
    """A signal asks for the end, and the validation is not over."""
