"""Opening a run: its folder, the state that it goes on from, a rehearsal of its saves, its log."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from optune import checkpoint, memory, metrics, optim, resuming, run_folder
from optune.distributed import Processes
from optune.session.memory import MemoryCheck, Predict
from optune.session.running import Batches, Session
from optune.signals import Requests
from optune.time_limit import TimeLimit


@contextmanager
def start(
    output_dir: str,
    processes: Processes,
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
    batches: Batches,
    total_steps: int,
    time_limit: TimeLimit,
    save_every_steps: int | None = None,
    keep_last: int | None = 2,
    log_every_steps: int = 1,
    loggers: Sequence[Any] = (),
    summary: Mapping[str, object],
    predict: Predict | None = None,
) -> Iterator[Session]:
    """Opens the run folder and gives the session; on the way out waits for the last save and publishes the result.

    All `processes` of the run call it with the same arguments; the first one writes, shows and publishes.

    - `identity`: `config` as plain values, and sums of `data` and base `model`. What alters training is kept in each
      checkpoint and compared with that of `resume_from`; a difference that `allow_change` does not name is refused,
      before anything is written.
    - `resume`: the key; it decides whether `output_dir` may hold a run already. `resume_from`: the verified checkpoint
      that it stands for, whose weights `model` already has; optimizer and counters are restored here.
    - `write_model(tensors, folder)` writes the model files of a checkpoint from `model_tensors` or copies of them.
    - `batches` count epochs, and say what of them a checkpoint keeps.
    - `predict` says what memory a step takes, for the comparison at the end.
    - `time_limit`: the run is saved and left when it is nearly over.
    """
    fingerprint = resuming.make_fingerprint(
        identity, rows_per_step=batches.units_per_step, data_ranks=processes.data_size
    )
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
    batches.seek(progress["step"], progress["cursor"])
    log_state = progress.pop("log", None)
    progress |= {"fingerprint": fingerprint, "total_steps": total_steps}
    with ExitStack() as stack:
        folder = stack.enter_context(_open_folder(output_dir, config_yaml, resume, processes))
        requests = stack.enter_context(Requests(answers=processes.is_main, is_relayed=processes.world_size > 1))
        for note in notes:
            checkpoint.say_on_stderr(note)  # and so to log.txt
        parameters = dict(model.named_parameters())
        memory.begin()
        memory.give_back()  # What the start alone needed is nothing that training adds to.
        check = MemoryCheck(predict, model, optimizer, processes)
        if processes.world_size == 1 and processes.device.type == "cpu":
            memory.touch_ahead(checkpoint.estimate_state_bytes(optimizer))
        room = checkpoint.rehearse(
            folder.path,
            write_model=lambda path: write_model(model_tensors, path),
            optimizer=optimizer,
            named_parameters=parameters,
            keep_last=keep_last,
            keep_best=identity["config"]["data"]["validation"] is not None,
            saves=math.ceil((total_steps - progress["step"]) / (save_every_steps or total_steps)),
            resume_from=resume_from,
            group=processes.file_group,
        )
        saver = checkpoint.Saver(
            folder.path,
            write_model=lambda path, tensors: write_model(tensors, path),
            model_tensors=model_tensors,
            optimizer=optimizer,
            named_parameters=parameters,
            keep_last=keep_last,
            first_step=progress["step"],
            group=processes.file_group,
        )
        stack.enter_context(saver)
        log = metrics.RunLog(
            folder.path,
            total_steps,
            first_step=progress["step"],
            owes_validation=progress["owes_validation"],
            state=log_state,
            log_every_steps=log_every_steps,
            loggers=loggers,
            config=identity["config"],
            device=str(processes.device),
            main=processes.is_main,
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
            processes,
            optimizer=optimizer,
            batches=batches,
            total_steps=total_steps,
            time_limit=time_limit,
            save_s=room.write_s,
            memory=check,
            saves_ahead=save_every_steps is not None and save_every_steps < total_steps,
            resume_from=resume_from,
            progress=progress,
        )
        yield run
        run.publish()


def _open_folder(output_dir: str, config_yaml: str, resume: str | None, processes: Processes) -> run_folder.RunFolder:
    """Opened by the first process, followed by the others."""
    opened: list[run_folder.RunFolder] = []

    def open_it() -> None:
        opened.append(run_folder.open_run(output_dir, config_yaml, resume=resume))

    processes.barrier()  # until here each may have looked whether the folder is free
    processes.on_main(open_it)
    return opened[0] if processes.is_main else run_folder.follow_run(output_dir, processes.rank)
