"""The config's sections: the keys that every recipe reads, their types and defaults.

A recipe's `Config` is a subclass of `RunConfig`; a key of its own is one more line there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from optune.config.options import Rules, option

DataFormat = Literal["auto", "messages", "sharegpt", "alpaca", "completion", "text", "tokens", "preference"]
NOT_NEGATIVE = Rules(minimum=0)
MOST_WEIGHT = 10_000
"""Of a data source."""
OPTIMIZER_NUMBERS = {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "momentum": NOT_NEGATIVE}

OTHER_NAMES = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "betas": "optimizer.betas",
    "dataset": "data",
    "packed": "data.packing",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "tokenizer": "model.path",
    "checkpointer": "checkpoint",
    "lr_scheduler": "schedule",
    "num_warmup_steps": "schedule.warmup_steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps_per_epoch": "max_steps",
    "per_device_train_batch_size": "batch_size",
    "clip_grad_norm": "max_grad_norm",
    "optimizer_in_bwd": "optimizer_step",
    "enable_activation_checkpointing": "activation_checkpointing",
    "gradient_checkpointing": "activation_checkpointing",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint.save_every_steps",
    "eval_steps": "validation_every_steps",
    "logging_steps": "log_every_steps",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_attn_modules": "lora.targets",
    "target_modules": "lora.targets",
}
"""What other tools call a key: used to suggest the real one, never accepted."""


@dataclass
class ModelSection:
    """`path` is a folder in Hugging Face layout or a hub id; `dtype` is what the weights have in memory.

    What keeps small updates of bf16 weights: `master_weights`, an fp32 copy; or `update_rounding`, by chance.
    """

    path: str = option(is_path=True, not_empty=True)
    dtype: Literal["bf16", "fp32"] = "bf16"
    master_weights: Literal["none", "fp32"] = "none"
    update_rounding: Literal["nearest", "stochastic"] = "nearest"


@dataclass
class DataSource:
    """One of several sources of rows: a file, a folder, a pattern, or `hf://OWNER/NAME`.

    A null `format` is that of the `data` section. `weight`: how often an epoch has the source's rows. `max_rows`: the
    first so many. `split`: a named split, a part of the rows (`[:90%]`), or both. `name`: of a hub dataset's config.
    """

    path: str = option(is_path=True, not_empty=True)
    format: DataFormat | dict[str, Any] | None = option(None, target="format", null="the format of the data section")
    weight: float = option(1.0, above=0, maximum=MOST_WEIGHT)
    max_rows: int | None = option(None, minimum=1, null="all rows")
    split: str | None = option(None, not_empty=True, null="train, and the whole of a file")
    name: str | None = option(None, not_empty=True, null="the only config of the dataset")


@dataclass
class DataSection:
    """Where the rows come from and what of them is trained. `max_length` counts tokens; null is no limit.

    `chat_template` is a file, or the name of a template; null is the model's own. `template_date` is the day that
    templates print which ask for the date. `pad_to_multiple`: sequences are padded to a multiple of so many tokens.
    `cache`: the folder in which prepared rows are kept, `auto` for the usual one, null for none.
    """

    train: list[str | DataSource] = option(is_path=True, not_empty=True)
    validation: list[str | DataSource] | None = option(None, is_path=True, null="no validation")
    format: DataFormat | dict[str, Any] = option("auto", target="format")
    max_length: int | None = option(2048, minimum=2, null="no limit")
    truncation: Literal["drop", "error", "truncate_right", "truncate_left"] = "drop"
    packing: bool = False
    shuffle: bool = True
    streaming: bool = False
    shuffle_window: int | None = option(None, minimum=1, null="a window of 10,000 rows")
    group_by_length: bool = False
    pad_to_multiple: int = option(1, minimum=1)
    cache: str | None = option("auto", is_path=True, not_empty=True, null="no cache")
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    chat_template: str | None = option(None, is_path=True, not_empty=True, null="the template of the model")
    template_date: str = option("2024-07-26", not_empty=True)
    parse_special: bool = False


@dataclass
class ScheduleSection:
    """How the learning rate moves. `min_lr_ratio` is the share of the base rate that is left at the end."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    warmup_steps: int = option(0, minimum=0)
    min_lr_ratio: float = option(0.0, minimum=0, maximum=1)
    decay_steps: int | None = option(None, minimum=0, null="a fifth of the run, for wsd")


@dataclass
class CheckpointSection:
    """When the run is saved. The last step is always saved."""

    save_every_steps: int | None = option(None, minimum=1, null="a save at the end alone")
    keep_last: int | None = option(2, minimum=1, null="to keep all")


@dataclass
class LoraSection:
    """Adapters beside the linear layers that `targets` names. `quantize_base`: how the frozen weights of linear layers
    are held; null is as they are, in `model.dtype`."""

    rank: int = option(8, minimum=1)
    alpha: float = option(16.0, above=0)
    dropout: float = option(0.0, minimum=0, below=1)
    targets: list[str] = option(["q_proj", "k_proj", "v_proj", "o_proj"], not_empty=True)
    use_rslora: bool = False
    quantize_base: Literal["nf4"] | None = option(None, null="weights as they are, in model.dtype")


@dataclass
class ParallelSection:
    """How several processes share the run: `replicate` copies of the model, each divided among `shard` x `tensor`
    processes. `offload`: weights, gradients and optimizer state stay in host memory, and the optimizer steps there.
    `timeout_s` is how long a process waits for one that does not answer."""

    shard: int | Literal["auto"] = option("auto", minimum=1)
    replicate: int = option(1, minimum=1)
    tensor: int = option(1, minimum=1)
    offload: bool = False
    timeout_s: int = option(600, minimum=1)


@dataclass
class RunConfig:
    """The keys that every recipe reads."""

    model: ModelSection
    data: DataSection
    batch_size: int = option(4, minimum=1)
    gradient_accumulation_steps: int = option(1, minimum=1)
    epochs: int = option(1, minimum=1)
    max_steps: int | None = option(None, minimum=1, null="as many as the epochs have")
    optimizer: dict[str, Any] = option(
        {"_target_": "torch.optim.AdamW", "lr": 2.0e-5, "weight_decay": 0.0},
        target="optimizer",
        numbers=OPTIMIZER_NUMBERS,
    )
    parameter_groups: list[dict[str, Any]] = option([], numbers=OPTIMIZER_NUMBERS)
    optimizer_step: Literal["after_backward", "in_backward", "immediate"] = "after_backward"
    max_grad_norm: float | None = option(1.0, above=0, null="no clipping")
    immediate_variant: Literal["local", "exact"] = "local"
    max_parameter_grad_norm: float | None = option(None, above=0, null="no clipping of this kind")
    max_skipped_steps: int = option(5, minimum=1)
    schedule: ScheduleSection | dict[str, Any] = option(ScheduleSection, target="schedule")
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    activation_offloading: bool = False
    compile: bool = False
    gradient_stash: Literal["auto", "hold", "cpu", "alias", "factored", "two_pass"] = "auto"
    accumulation: Literal["depth_first", "breadth_first"] = "depth_first"
    parallel: ParallelSection = option(ParallelSection)
    checkpoint: CheckpointSection = option(CheckpointSection)
    resume: str | None = option(None, is_path=True, not_empty=True, null="to begin anew")
    allow_change: list[str] = option([])
    max_time: str | None = option(None, not_empty=True, null="no limit")
    validation_every_steps: int | None = option(None, minimum=1, null="a validation at the end alone")
    log_every_steps: int = option(1, minimum=1)
    loggers: list[dict[str, Any]] = option([], target="logger")
    output_dir: str = option("runs/my-run", is_path=True, not_empty=True)
    seed: int = option(0, minimum=0)
    device: str = option("auto", not_empty=True)
