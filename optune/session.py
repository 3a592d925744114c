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

import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from optune import checkpoint, metrics, optim, run_folder
from optune.errors import ConfigError
from optune.signals import Requests
from optune.train import StepResult

NOT_TRAINING = frozenset(
    {
        "output_dir", "loggers", "log_every_steps", "checkpoint", "resume", "allow_change", "max_time", "device",
        "epochs", "max_steps", "validation_every_steps", "optimizer_step", "gradient_stash", "accumulation",
        "activation_checkpointing", "max_skipped_steps",
    }
)  # fmt: skip
"""Keys whose change a run survives: they do not alter its numbers, or (its length) are spoken of apart."""


def say(message: str) -> None:
    """A line for people: stderr, and with it the run's log.txt."""
    sys.stderr.write(f"{message}\n")


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
        max_time_s: float | None,
        progress: dict[str, Any],
    ) -> None:
        self.step: int = progress["step"]
        """Steps done."""
        self._folder, self._log, self._saver, self._requests = folder, log, saver, requests
        self._optimizer, self._epoch_at = optimizer, epoch_at
        self._total_steps, self._max_time_s = total_steps, max_time_s
        self._progress = progress
        self._saved_step = self.step

    @property
    def is_over(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self._total_steps

    @property
    def exit_code(self) -> int:
        """0; 130 or 143 where a signal ended the run before its last step."""
        return 0 if self.is_over else self._requests.exit_code

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 0 for the first of the run; ends early on a signal or at `max_time`.

        After each one the recipe has called `log_step`. Before the iteration ends the run is saved as it stands.
        """
        begun, longest = time.monotonic(), 0.0
        while not self.is_over:
            started = time.monotonic()
            yield self.step
            self._saver.check()
            longest = max(longest, time.monotonic() - started)
            if self._requests.take_save():
                self.save()
            if self._requests.stop is not None and not self.is_over:
                self._log.say(f"{self._requests.stop.name}: saving after step {self.step}")
                break
            # Twice the longest step: one for the step, one for the save that follows.
            if (
                self._max_time_s is not None
                and time.monotonic() - begun + 2 * longest > self._max_time_s
                and not self.is_over
            ):
                self._log.say(f"max_time is nearly over: saving after step {self.step} of {self._total_steps}")
                break
        self.save()

    def log_step(self, result: StepResult) -> None:
        """Counts the step as done and logs it."""
        self.step += 1
        self._progress["targets_seen"] += result.targets
        self._progress["tokens_seen"] += result.tokens
        self._progress["skipped_steps"] += result.skipped
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

    def log_validation(self, loss: float) -> None:
        """Logs the validation loss of the weights as they are now; the checkpoint of this step carries it."""
        self._progress["validation_loss"] = loss
        self._log.validation(self.step, loss=loss, epoch=self._epoch_at(self.step))

    def validating(self) -> AbstractContextManager[None]:
        """Around a validation: shown on the bar, not counted as time of a step."""
        return self._log.aside("validating")

    def save(self) -> None:
        """Saves a checkpoint of the weights as they are now, once a step at most."""
        if self._saved_step != self.step:
            with self._log.aside("saving"):
                counters = {"epoch": self._epoch_at(self.step), "log": self._log.checkpoint_state()}
                self._saver.save(self.step, self._progress | counters, is_last=self.is_over)
            self._saved_step = self.step
        self._progress.pop("validation_loss", None)

    def publish(self) -> None:
        """Waits for the last checkpoint and, where the run is complete, makes the result of it."""
        newest = self._saver.wait()
        where: dict[str, object] = {"checkpoint": newest, "run folder": self._folder.path}
        if newest is not None and self.is_over:
            where["model"] = self._folder.publish_model(newest)
        elif newest is not None:
            where["go on"] = f"optune resume {self._folder.path}"
        self._log.finish(where)


@contextmanager
def start(
    output_dir: str,
    *,
    config_yaml: str,
    resume_from: Path | None,
    in_place: bool,
    allow_change: Collection[str] = (),
    identity: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    write_model: Callable[[Mapping[str, Tensor], Path], None],
    model_tensors: Mapping[str, Tensor],
    epoch_at: Callable[[int], float],
    total_steps: int,
    max_time_s: float | None = None,
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
    - `resume_from`: a verified checkpoint whose weights `model` already has; optimizer and counters are restored here.
    - `in_place`: the run goes on in `output_dir`, which may hold what it did so far.
    - `write_model(tensors, folder)` writes the model files of a checkpoint from `model_tensors` or copies of them.
    - `epoch_at(step)`: epochs done after so many steps.
    - `max_time_s`: the run is saved and left when so many seconds are nearly over.
    """
    progress = _restore(identity, resume_from, allow_change, model, optimizer, total_steps)
    with ExitStack() as stack:
        folder = stack.enter_context(run_folder.open_run(output_dir, config_yaml, resume=in_place))
        requests = stack.enter_context(Requests())
        parameters = dict(model.named_parameters())
        if resume_from is None:
            # A run must not die at its first save, hours from here.
            rehearsal = checkpoint.rehearse(
                folder.path,
                write_model=lambda path: write_model(model_tensors, path),
                optimizer=optimizer,
                named_parameters=parameters,
                keep_last=keep_last,
                keep_best=True,
                saves=1 + (total_steps - 1) // (save_every_steps or total_steps),
            )
            summary = {**summary, "checkpoints": f"{rehearsal}; one was tried in {rehearsal.write_s:.1f} s"}
        saver = checkpoint.Saver(
            folder.path,
            write_model=lambda path, tensors: write_model(tensors, path),
            model_tensors=model_tensors,
            optimizer=optimizer,
            named_parameters=parameters,
            keep_last=keep_last,
            first_step=progress["step"],
            say=say,
        )
        stack.enter_context(saver)
        log = metrics.RunLog(
            folder.path,
            total_steps,
            first_step=progress["step"],
            state=progress.pop("log", None),
            log_every_steps=log_every_steps,
            loggers=loggers,
            config=identity["config"],
            device=str(next(model.parameters()).device),
        )
        stack.enter_context(log)
        log.start("run", {**summary, "output": folder.path})
        run = Session(
            folder,
            log,
            saver,
            requests,
            optimizer=optimizer,
            epoch_at=epoch_at,
            total_steps=total_steps,
            max_time_s=max_time_s,
            progress=progress,
        )
        yield run
        run.publish()


def _restore(
    identity: Mapping[str, Any],
    resume_from: Path | None,
    allow_change: Collection[str],
    model: nn.Module,
    optimizer: Optimizer,
    total_steps: int,
) -> dict[str, Any]:
    """The counters that a checkpoint keeps; the optimizer's state is filled in from it."""
    config = {key: value for key, value in identity["config"].items() if key not in NOT_TRAINING}
    fingerprint = checkpoint.make_fingerprint(config, data=identity["data"], model=identity["model"])
    counters: dict[str, Any] = {"step": 0, "targets_seen": 0.0, "tokens_seen": 0, "skipped_steps": 0}
    if resume_from is not None:
        saved = checkpoint.read_progress(resume_from)
        differences = checkpoint.compare_fingerprints(saved["fingerprint"], fingerprint)
        allowed = checkpoint.refuse_changes(differences, allow_change)
        for difference in [*allowed, *checkpoint.compare_versions(saved)]:
            say(f"warning: goes on with another {difference}")
        if saved["total_steps"] != total_steps:
            say(
                f"warning: the run now ends at step {total_steps}, it was to end at {saved['total_steps']}: from here "
                "the learning rate follows the schedule of the new length"
            )
        keep = {difference.key.removeprefix("optimizer.") for difference in allowed}
        keep |= {"initial_lr"} if "lr" in keep else set()
        checkpoint.load_optimizer(optimizer, dict(model.named_parameters()), resume_from, keep=keep)
        counters = {key: saved[key] for key in (*counters, "log")}
        say(f"goes on after step {saved['step']} from {resume_from}")
    return counters | {"fingerprint": fingerprint, "total_steps": total_steps}


def parse_duration(text: str | None, *, where: str) -> float | None:
    """Seconds: `90s`, `30m`, `1h30m`, `2d`, `01:30:00` or a plain number of seconds. None stays None."""
    if text is None:
        return None
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d)", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    if clock:
        hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        total = 3600 * hours + 60 * minutes + seconds
    elif units and text:
        days, hours, minutes, seconds = (float(part or 0) for part in units.groups())
        total = 86400 * days + 3600 * hours + 60 * minutes + seconds
    else:
        total = 0.0
    if total <= 0:
        raise ConfigError(f"{text!r} is not a length of time", where=where, hint="such as 90s, 30m, 1h30m or 01:30:00")
    return total


def summarize(
    name: str,
    source: Path,
    model: nn.Module,
    batches: Any,
    total_steps: int,
    optimizer: Optimizer,
    stepper: optim.Stepper,
) -> dict[str, object]:
    """What a person should know before the first step, line by line. The model was asked for as `name` and found in
    `source`; `batches`: see `data.build_batches`."""
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    report = batches.rows.report
    fields: dict[str, object] = {
        "model": name if name == str(source) else f"{name} ({source})",
        "parameters": metrics.describe_parameters(trained, sum(parameter.numel() for parameter in parameters)),
        "weights": f"{', '.join(sorted({_dtype_name(p) for p in parameters}))} on {parameters[0].device}",
    }
    files = list(report.formats)
    fields["data"] = ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
    fields["rows"], *rest = report.lines()
    for line in rest:
        label, _, text = line.partition(": ")  # `skipped: …`, `note: …`
        fields[label] = f"{fields[label]}; {text}" if label in fields else text
    if batches.packs is not None:
        fields["packs"] = f"{batches.units:,} of {batches.max_length} tokens, {batches.fill:.1%} full"
    fields["steps"] = metrics.describe_steps(
        total_steps, steps_per_epoch=batches.steps_per_epoch, rows_per_step=batches.units_per_step
    )
    fields["optimizer"] = type(optimizer).__name__
    fields["step"] = stepper.describe()
    fields["warning"] = optim.warn_lost_updates(model.named_parameters(), optimizer)
    return fields


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
