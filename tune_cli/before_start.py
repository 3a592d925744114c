"""What can be refused before any process starts: layouts, devices and combinations that a worker would refuse too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from optune.errors import ConfigError


def check_counts(options: Any) -> tuple[int, int]:
    """The processes of a machine, and the machines, that torchrun's `options` ask for. Raises ConfigError."""
    count, machines = _count_processes(options.nproc_per_node), _count_machines(options.nnodes)
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts must be 0 or more, not {options.max_restarts}")
    return count, machines


def _count_processes(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    if text.lstrip("+-").isdigit() and int(text) < 1:
        raise ConfigError(f"--nproc-per-node must be 1 or more, not {text}")
    try:
        return determine_local_world_size(text)
    except ValueError as error:
        if "not available" in str(error):
            raise ConfigError(f"--nproc-per-node {text!r}: {error}") from None
        raise ConfigError(f"--nproc-per-node must be a number, cpu, gpu or auto, not {text!r}") from None


def _count_machines(text: str) -> int:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        least, most = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 0 < least <= most:
        raise ConfigError(f"--nnodes must be a number, not {text!r}")
    if least < most:
        raise ConfigError(
            f"--nnodes {text}: a run keeps its number of machines; with another one a step would have other rows",
            hint=f"--nnodes {most}; `optune resume --nnodes {least} RUN_DIR batch_size=…` goes on with fewer, where "
            "batch_size x gradient_accumulation_steps x processes stays what it was",
        )
    return most


def check_config(cfg: Any, count: int, machines: int) -> None:
    """Raises ConfigError where `cfg` cannot run on `machines` with `count` processes each. No row and no
    weight is read."""
    from optune import distributed, models, optim, run_folder, train
    from optune.config import RunConfig, to_dict

    if not isinstance(cfg, RunConfig):
        return
    layout = {**to_dict(cfg, hide_secrets=False)["parallel"], "keep_whole": optim.why_whole(cfg.optimizer_step)}
    del layout["timeout_s"]
    found = distributed.divide(count * machines, **layout)
    if found.tensor > 1 and Path(cfg.model.path).is_dir():  # the hub is asked by one process of each machine
        distributed.check_model(models.check(cfg.model.path, weights=False), found)
    if count > 1:  # one alone would be asked for its current device, which takes memory there
        distributed.find_device(cfg.device, 0, count)
    train.check_accumulation(cfg.accumulation, cfg.optimizer_step, cfg.gradient_accumulation_steps)
    if machines == 1:  # else another machine's processes may have opened it already
        run_folder.check_output(cfg.output_dir, resume=cfg.resume)


def check_settings(cfg: Any, device: Any) -> None:
    """Raises ConfigError where a run on `device` would refuse what stands in `cfg`: all that a recipe asks before it
    looks at its model, its rows and its output folder."""
    from optune import models, optim, session, train
    from optune.config import read_target, schedule_keywords

    train.check_accumulation(cfg.accumulation, cfg.optimizer_step, cfg.gradient_accumulation_steps)
    if cfg.activation_offloading:
        models.check_offloading(device, cfg.accumulation)
    session.TimeLimit(cfg.max_time)
    for factory, keywords in map(read_target, cfg.loggers):
        factory(**keywords)
    if cfg.data.streaming:
        train.count_steps(None, cfg.epochs, cfg.max_steps)
    # How many steps there are is not known without rows; with more of them nothing more is refused.
    optim.build_schedule(total_steps=cfg.max_steps or 2**31, **schedule_keywords(cfg.schedule))


def share_cores(count: int) -> None:
    """Divides this machine's cores among its processes, unless the user has."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
