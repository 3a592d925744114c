"""Going on with a run: what must be the same, what may differ and is said, and the state that comes back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from optune import checkpoint
from optune.errors import ConfigError
from optune.optim import Stepper

NOT_TRAINING = frozenset(
    {
        "output_dir", "loggers", "log_every_steps", "checkpoint", "resume", "allow_change", "max_time", "device",
        "epochs", "max_steps", "validation_every_steps", "optimizer_step", "gradient_stash", "accumulation",
        "activation_checkpointing", "max_skipped_steps", "parallel", "data.validation", "data.cache",
    }
)  # fmt: skip
"""Keys whose change a run survives: they do not alter its numbers, or (its length) are spoken of apart."""

PLACES = {"model.path": "model", "data.train": "data", "data.chat_template": "data"}
"""Keys that say where something is, and the sum of what is read there. Files may move, but not change."""

DIVISIONS = frozenset({"batch_size", "gradient_accumulation_steps"})
"""Keys that divide a step among microbatches and processes. Where the sum of the data is the same, so are its rows."""

COUNTERS = {
    "step": 0, "rows_seen": 0, "targets_seen": 0.0, "tokens_seen": 0, "skipped_steps": 0, "skipped_in_a_row": 0,
    "owes_validation": False, "cursor": None,
}  # fmt: skip
"""What a run carries along beside its tensors, and where it begins."""


def make_fingerprint(identity: Mapping[str, Any], *, rows_per_step: int, data_ranks: int) -> dict[str, Any]:
    """What is kept of `identity` (`config` as plain values, sums of `data` and `model`) in each checkpoint, and how
    many rows a step has, of how many processes that see different ones."""
    config = dict(identity["config"])
    config["data"] = {key: value for key, value in config["data"].items() if f"data.{key}" not in NOT_TRAINING}
    config = {key: value for key, value in config.items() if key not in NOT_TRAINING}
    made = checkpoint.make_fingerprint(config, data=identity["data"], model=identity["model"])
    return made | {"step": {"rows": rows_per_step, "data_ranks": data_ranks}}


def restore(
    resume_from: Path,
    fingerprint: Mapping[str, Any],
    *,
    allow_change: Collection[str],
    model: nn.Module,
    optimizer: Optimizer,
    stepper: Stepper,
    total_steps: int,
) -> tuple[dict[str, Any], list[str]]:
    """Fills the optimizer's state from a checkpoint; returns its counters, and what a person should know.

    Raises `ConfigError`, before anything is changed, for differences in what alters training that `allow_change` does
    not name, and for a `total_steps` that the run has passed.
    """
    saved = checkpoint.read_progress(resume_from)
    moved, differences = _divide(checkpoint.compare_fingerprints(saved["fingerprint"], fingerprint))
    if "data" not in allow_change and any(each.key == "data" for each in differences):
        _refuse_another_step(saved["fingerprint"].get("step"), fingerprint["step"])
    allowed = checkpoint.refuse_changes(differences, allow_change)
    if total_steps < saved["step"]:
        raise ConfigError(
            f"the run would end at step {total_steps}, and {resume_from.name} is beyond it",
            where="max_steps",
            hint="ask for more steps or epochs, or go back to an earlier checkpoint by resume=<its folder>",
        )
    notes = [
        f"{each}: the same rows a step, divided otherwise"
        if each.key in DIVISIONS
        else f"{each}: elsewhere, with the same content"
        for each in moved
    ]
    others = [*allowed, *checkpoint.compare_versions(saved)]
    notes += [f"warning: goes on with another {difference}" for difference in others]
    if saved["total_steps"] != total_steps:
        notes.append(
            f"warning: the run now ends at step {total_steps}, it was to end at {saved['total_steps']}: from here "
            "the learning rate follows the schedule of the new length"
        )
    keep = {difference.key.removeprefix("optimizer.") for difference in allowed}
    keep |= {"initial_lr"} if "lr" in keep else set()
    checkpoint.load_optimizer(optimizer, dict(model.named_parameters()), resume_from, keep=keep)
    counters = {key: saved.get(key, start) for key, start in COUNTERS.items()} | {"log": saved["log"]}
    stepper.skips.in_a_row = counters["skipped_in_a_row"]
    return counters, [*notes, f"goes on after step {saved['step']} from {resume_from}"]


def _refuse_another_step(old: Mapping[str, int] | None, new: Mapping[str, int]) -> None:
    """Raises ConfigError where the rows of a step have become more or fewer: their order means another thing then."""
    if old is None or old["rows"] == new["rows"]:
        return
    then = f"{old['data_ranks']} {'process' if old['data_ranks'] == 1 else 'processes'}"
    raise ConfigError(
        f"a step had {old['rows']} rows on {then} when the checkpoint was made, and would have {new['rows']} on "
        f"{new['data_ranks']}: batch_size x gradient_accumulation_steps x processes",
        where="resume",
        hint=f"keep the product: start it as then (--nproc-per-node {old['data_ranks']}), or give another batch_size; "
        "--allow-change data goes on with steps that hold other rows",
    )


def _divide(
    differences: Collection[checkpoint.Difference],
) -> tuple[list[checkpoint.Difference], list[checkpoint.Difference]]:
    """Those that say only that something lies elsewhere or is divided otherwise, and the others."""
    changed = {difference.key for difference in differences}
    sums = PLACES | dict.fromkeys(DIVISIONS, "data")
    moved = [each for each in differences if each.key in sums and sums[each.key] not in changed]
    return moved, [each for each in differences if each not in moved]
