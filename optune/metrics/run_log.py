"""`RunLog`: everything that a run tells while it trains, in one object that a recipe calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from optune.metrics.bar import Progress, Shown
from optune.metrics.loggers import Logger
from optune.metrics.measure import format_rate, format_time, format_value, peak_memory_gib
from optune.metrics.metrics_file import MetricsFile
from optune.metrics.plots import draw_plot
from optune.metrics.summary import format_fields
from optune.metrics.window import Window


class RunLog:
    """metrics.jsonl, progress bar, loggers, summaries and plot of one run; a context manager that ends them all.

    `log_every_steps`: a line stands for that many steps, the last one for the rest. Its loss is the mean over all their
    targets; `targets` and `tokens` are sums, `step_s` is a mean, `lr` and `grad_norm` are those of its last step.
    `first_step` > 0 says that the run goes on after that step: lines of later steps are dropped and written again,
    with `owes_validation` that of the validation after it too.
    `state` is what `checkpoint_state` returned then. With `main=False` (another rank) nothing is written or shown.

    The time of a step runs from the end of the one before; wrap what is not training in `aside`.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        *,
        loggers: Sequence[Logger] = (),
        log_every_steps: int = 1,
        first_step: int = 0,
        owes_validation: bool = False,
        state: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        device: str = "cpu",
        main: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._total, self._first, self._every = run_dir, total_steps, first_step, log_every_steps
        self._device, self._main, self._clock = device, main, clock
        self._window = Window.from_state(state["window"]) if state else Window()
        self._validations: list[float] = list(state["validation_losses"]) if state else []
        self._all = Window()
        self._last_step = first_step
        self._last_loss: float | None = None
        self._aside_s = 0.0
        self._step_s: float | None = None
        self._finished = False
        self._loggers: list[Logger] = []
        if main:
            self._file = MetricsFile(run_dir / "metrics.jsonl", first_step, owes_validation=owes_validation)
            self._progress = Progress(total_steps, first_step, clock)
            try:
                for logger in loggers:
                    self._loggers.append(logger)
                    logger.start(run_dir, config or {}, first_step)
            except BaseException:
                self._end(succeeded=False)
                raise
            if self._file.dropped:
                dropped = f"dropped {self._file.dropped} lines after step {first_step}"
                self.say(f"metrics.jsonl: {dropped}: those steps are taken again")
        self._began = self._mark = clock()

    def start(self, title: str, fields: Mapping[str, object]) -> None:
        """The start summary; see `format_fields`."""
        self.say(format_fields(title, fields))
        self._mark = self._clock()

    def step(
        self,
        step: int,
        *,
        loss: float,
        targets: float,
        tokens: int,
        lr: float,
        epoch: float,
        grad_norm: float | None = None,
        skipped: bool = False,
        extra: Mapping[str, float | None] | None = None,
    ) -> None:
        """After each step; numbers are those of the whole step over all ranks. `step` counts from 1.

        `skipped`: the update was not done because its gradient was not finite. `extra` are more keys for the line.
        """
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        amounts = {"loss": loss, "targets": targets, "tokens": tokens, "skipped": skipped, "seconds": seconds}
        self._window.add(**amounts)
        self._all.add(**amounts)
        self._last_step = step
        if step > self._first + 1:  # The first step warms up.
            self._step_s = seconds if self._step_s is None else 0.9 * self._step_s + 0.1 * seconds
        if not self._main:
            return
        shown = None
        if step % self._every == 0 or step == self._total:
            window, self._window = self._window, Window()
            shown = self._log_window(window, step, epoch, lr, grad_norm, extra or {})
        self._progress.step(step, shown, self._time_left(step))

    def _log_window(
        self, window: Window, step: int, epoch: float, lr: float, grad_norm: float | None, extra: Mapping[str, Any]
    ) -> Shown:
        # A window that was begun before a resume knows the time of its later steps only.
        timed = max(1, min(window.steps, step - self._first))
        tokens = window.tokens * timed / window.steps
        memory = peak_memory_gib(self._device)
        rate = tokens / window.seconds if window.seconds > 0 else 0.0
        line: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "loss": window.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "targets": int(window.targets) if float(window.targets).is_integer() else window.targets,
            "tokens": window.tokens,
            "tokens_per_s": round(rate, 2),
            "peak_memory_gib": round(memory, 4),
            "step_s": round(window.seconds / timed, 6),
        }
        if window.skipped:
            line["skipped"] = window.skipped
        self._write(line | dict(extra))
        self._last_loss = window.loss
        return Shown(window.loss, lr, rate, memory)

    def validation(
        self, step: int, *, loss: float, epoch: float, extra: Mapping[str, float | None] | None = None
    ) -> None:
        """A validation after `step`: a line with `validation_loss`. Call it before the save of the same step."""
        is_best = all(loss < earlier for earlier in self._validations)
        self._validations.append(loss)
        if not self._main:
            return
        self._write({"step": step, "epoch": epoch, "validation_loss": loss, **(extra or {})})
        note = ", the best so far" if is_best and len(self._validations) > 1 else ""
        self.say(f"step {step}/{self._total} validation loss {format_value(loss)}{note}")

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Around what is not training (`validating`, `saving`): shown on the bar, not counted as time of a step."""
        if self._main:
            self._progress.doing(what)
        start = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - start
            self._aside_s += spent
            self._mark += spent
            if self._main:
                self._progress.doing(None)

    def checkpoint_state(self) -> dict[str, Any]:
        """What a resumed run needs so that its lines equal those of a straight one: put it into the progress of a save.

        All lines so far are on the disk when this returns: a checkpoint never claims a step whose line is lost.
        """
        if self._main:
            self._file.sync()
        return {"window": self._window.state(), "validation_losses": list(self._validations)}

    def say(self, text: str) -> None:
        """A message for people: above the bar, to standard error."""
        if self._main:
            self._progress.say(text)

    def note(self, text: str) -> None:
        """A line for `log.txt` alone."""
        log_only = getattr(sys.stderr, "log_only", None)
        if self._main and log_only is not None:
            log_only(text)

    def warn(self, text: str) -> None:
        """`warning: …`."""
        self.say(f"warning: {text}")

    def finish(self, fields: Mapping[str, object] | None = None, how: str = "finished") -> None:
        """The end: plot, loggers, end summary with `fields` (where things are). Only the first call counts.

        `how` is what the summary says, such as `stopped`; loggers are told of a success only when it is `finished`. Who
        stops a run does not wait for a plot.
        """
        if self._finished:
            return
        self._finished = True
        if not self._main:
            return
        results = self._results()
        plot = None if how == "stopped" else self._draw()
        self._end(succeeded=how == "finished")
        if self._all.steps:
            title = f"{how} after step {self._last_step} of {self._total}"
            self.say(format_fields(title, results | dict(fields or {}) | {"plot": plot}))

    def _results(self) -> dict[str, object]:
        seconds = self._clock() - self._began
        validated = [format_value(loss) for loss in (self._validations[:1] + self._validations[-1:])]
        return {
            "time": f"{format_time(seconds)}, of it {format_time(self._all.seconds)} in {self._all.steps:,} steps",
            "loss": format_value(self._last_loss) if self._last_loss is not None else None,
            "validation loss": (
                f"{' → '.join(dict.fromkeys(validated))}, best {format_value(min(self._validations))}"
                if self._validations
                else None
            ),
            "speed": f"{format_rate(self._all.tokens / max(self._all.seconds, 1e-9))} tokens/s",
            "peak memory": f"{peak_memory_gib(self._device):.2f} GiB",
            "skipped": f"{self._all.skipped} steps whose gradient was not finite" if self._all.skipped else None,
        }

    def _draw(self) -> Path | None:
        try:
            return draw_plot(self._run_dir)
        except Exception as error:  # A picture must not turn a trained model into a failure.
            self.warn(f"plot.png was not drawn: {error}")
            return None

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.append(line)
        step = line["step"]
        numbers = {key: float(value) for key, value in line.items() if key != "step" and isinstance(value, int | float)}
        for logger in list(self._loggers):
            try:
                logger.log(step, numbers)
            except Exception as error:  # Hours of training do not depend on a server that shows them.
                self._loggers.remove(logger)
                self.warn(f"{type(logger).__name__} failed and is not used any more: {error}")

    def _end(self, *, succeeded: bool) -> None:
        self._progress.close()
        for logger in self._loggers:
            try:
                logger.close(succeeded)
            except Exception as error:
                self.warn(f"{type(logger).__name__} did not close: {error}")
        self._loggers = []
        self._file.close()

    def _time_left(self, step: int) -> float | None:
        if self._step_s is None or step >= self._total:
            return None
        return (self._total - step) * (self._step_s + self._aside_s / (step - self._first))

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.finish(how="stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
