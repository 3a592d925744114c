"""What every recipe does in the same way around its loop: open the run folder, resume, log, save, stop.

    with session.start(…) as run:
        for step in run.steps():
            …one training step…
            run.log_step(result)
            if run.is_due(save_every_steps):
                run.save()
    return run.exit_code

The loop, and what is in it, belongs to the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from optune import checkpoint, files, metrics, optim, resuming, run_folder
from optune.errors import TrainingError
from optune.signals import Requests
from optune.start_summary import show, summarize
from optune.time_limit import TimeLimit
from optune.train import StepResult
from optune.types import Microbatch

__all__ = ["Session", "TimeLimit", "show", "start", "summarize"]


class Session:
    """A run in progress; made by `start`."""

    def __init__(
        self,
        folder: run_folder.RunFolder,
        log: metrics.RunLog,
        saver: checkpoint.Saver,
        requests: Requests,
        *,
        optimizer: Optimizer,
        epoch_at: Callable[[int], float],
        total_steps: int,
        time_limit: TimeLimit,
        save_s: float,
        saves_ahead: bool,
        resume_from: Path | None,
        progress: dict[str, Any],
    ) -> None:
        self.step: int = progress["step"]
        """Steps done."""
        self._folder, self._log, self._saver, self._requests = folder, log, saver, requests
        self._optimizer, self._epoch_at, self._total_steps = optimizer, epoch_at, total_steps
        self._time_limit, self._save_s, self._longest_s = time_limit, save_s, 0.0
        self._saves_ahead = saves_ahead
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
        return 0 if self.is_over and not self.owes_validation else self._requests.exit_code

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 0 for the first of the run; ends early on a signal or at `max_time`.

        After each one the recipe has called `log_step`. Before the iteration ends the run is saved as it stands.
        """
        while not self.is_over and not self._must_leave():
            started = time.monotonic()
            yield self.step
            self._saver.check()
            if self._saves_ahead and self.step == self._first_step + 1:
                self._saver.reserve()
            self._longest_s = max(self._longest_s, time.monotonic() - started)
            if self._requests.take_save():
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
        if self._requests.stop is not None:
            when = f"saving after step {self.step}" if self.step > self._saved_step else "nothing new to save"
            self._log.say(f"{self._requests.stop.name}: {when}")
            return True
        save_s = max([self._save_s, *(report.write_s for report in self._saver.reports)])
        # One step at least: a run that always left before its first one would never end.
        if self.step == self._first_step or self._time_limit.leaves(self._longest_s + save_s):
            return False
        self._log.say(f"max_time is nearly over: saving after step {self.step} of {self._total_steps}")
        return True

    def log_step(self, result: StepResult) -> None:
        """Counts the step as done and logs it."""
        self.step += 1
        progress = self._progress
        progress["rows_seen"] += result.rows
        progress["targets_seen"] += result.targets
        progress["tokens_seen"] += result.tokens
        progress["skipped_steps"] += result.skipped
        progress["skipped_in_a_row"] = progress["skipped_in_a_row"] + 1 if result.skipped else 0
        self._log.step(
            self.step,
            epoch=self._epoch_at(self.step),
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
            if self._requests.stop is not None:
                raise _LeaveValidation
            yield microbatch

    def log_validation(self, loss: float) -> None:
        """Logs the validation loss of the weights as they are now; the checkpoint of this step carries it."""
        self._progress["validation"] = {"step": self.step, "loss": loss}
        self._log.validation(self.step, loss=loss, epoch=self._epoch_at(self.step))
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
            counters = {"epoch": self._epoch_at(self.step), "log": self._log.checkpoint_state()}
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
        written_s = [report.write_s for report in self._saver.reports]
        where: dict[str, object] = {"saving": metrics.describe_saves(written_s, self._stalls_s)}
        where |= {"checkpoint": newest, "run folder": self._folder.path}
        if newest is not None and self.is_over:
            # A process may have died between its last save and here; a result that is there may have been edited.
            is_made = self.step == self._first_step and self._folder.has_model_of(newest)
            where["model"] = self._folder.model if is_made else self._folder.publish_model(newest)
        if not self.is_over or self.owes_validation:
            where["go on"] = f"optune resume {self._folder.path}"
        if self.step == self._first_step:
            nothing = f"nothing to train: step {self.step} of {self._total_steps} is done"
            more = {"train on": f"optune resume {self._folder.path} epochs=… or max_steps=…"} if self.is_over else {}
            title = nothing if self.is_over else f"left before step {self.step + 1} of {self._total_steps}"
            self._log.say(metrics.format_fields(title, where | more))
        self._log.finish(where, how="finished" if self.is_over else "stopped")


class _LeaveValidation(Exception):  # noqa: N818 (a message between two methods, not a failure)
    """A signal asks for the end, and the validation is not over."""


@contextmanager
def start(
    output_dir: str,
    *,
    config_yaml: str,
    resume: str | None,
    resume_from: Path | None,
    allow_change: Collection[str] = (),
    identity: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    stepper: optim.Stepper,
    write_model: Callable[[Mapping[str, Tensor], Path], None],
    model_tensors: Mapping[str, Tensor],
    epoch_at: Callable[[int], float],
    total_steps: int,
    time_limit: TimeLimit,
    save_every_steps: int | None = None,
    keep_last: int | None = 2,
    log_every_steps: int = 1,
    loggers: Sequence[Any] = (),
    summary: Mapping[str, object],
) -> Iterator[Session]:
    """Opens the run folder and gives the session; on the way out waits for the last save and publishes the result.

    - `identity`: `config` as plain values, and sums of `data` and base `model`. What alters training is kept in each
      checkpoint and compared with that of `resume_from`; a difference that `allow_change` does not name is refused,
      before anything is written.
    - `resume`: the key; it decides whether `output_dir` may hold a run already. `resume_from`: the verified checkpoint
      that it stands for, whose weights `model` already has; optimizer and counters are restored here.
    - `write_model(tensors, folder)` writes the model files of a checkpoint from `model_tensors` or copies of them.
    - `epoch_at(step)`: epochs done after so many steps.
    - `time_limit`: the run is saved and left when it is nearly over.
    """
    fingerprint = resuming.make_fingerprint(identity)
    progress: dict[str, Any] = dict(resuming.COUNTERS)
    notes: list[str] = []
    if resume_from is not None:
        progress, notes = resuming.restore(
            resume_from,
            fingerprint,
            allow_change=allow_change,
            model=model,
            optimizer=optimizer,
            stepper=stepper,
            total_steps=total_steps,
        )
    elif resume is not None:
        notes = [f"{output_dir} holds no checkpoint yet: starting from the beginning"]
    log_state = progress.pop("log", None)
    progress |= {"fingerprint": fingerprint, "total_steps": total_steps}
    with ExitStack() as stack:
        folder = stack.enter_context(run_folder.open_run(output_dir, config_yaml, resume=resume))
        requests = stack.enter_context(Requests())
        for note in notes:
            checkpoint.say_on_stderr(note)  # and so to log.txt
        parameters = dict(model.named_parameters())
        room = checkpoint.rehearse(
            folder.path,
            write_model=lambda path: write_model(model_tensors, path),
            optimizer=optimizer,
            named_parameters=parameters,
            keep_last=keep_last,
            keep_best=identity["config"]["data"]["validation"] is not None,
            saves=math.ceil((total_steps - progress["step"]) / (save_every_steps or total_steps)),
            resume_from=resume_from,
        )
        saver = checkpoint.Saver(
            folder.path,
            write_model=lambda path, tensors: write_model(tensors, path),
            model_tensors=model_tensors,
            optimizer=optimizer,
            named_parameters=parameters,
            keep_last=keep_last,
            first_step=progress["step"],
        )
        stack.enter_context(saver)
        log = metrics.RunLog(
            folder.path,
            total_steps,
            first_step=progress["step"],
            state=log_state,
            log_every_steps=log_every_steps,
            loggers=loggers,
            config=identity["config"],
            device=str(next(model.parameters()).device),
        )
        stack.enter_context(log)
        tried = f"; one was tried in {room.write_s:.1f} s" if room.write_s else ""
        checkpoints = f"{room}{tried}" if progress["step"] < total_steps else None
        log.start("run", {**summary, "checkpoints": checkpoints, "output": folder.path})
        run = Session(
            folder,
            log,
            saver,
            requests,
            optimizer=optimizer,
            epoch_at=epoch_at,
            total_steps=total_steps,
            time_limit=time_limit,
            save_s=room.write_s,
            saves_ahead=save_every_steps is not None and save_every_steps < total_steps,
            resume_from=resume_from,
            progress=progress,
        )
        yield run
        run.publish()
