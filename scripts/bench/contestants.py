"""Who takes part in the side-by-side runs, and the command that each tool's user would type for it.

To add a tool: a function that writes its config and returns its command, an entry in `COMMANDS`, its environment in
`setup.py`, and its cells in `everyone`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH = 512
LEARNING_RATE = 2e-5
RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Contestant:
    """One tool in one way to train; `name` is its key in the results."""

    tool: str
    method: str = "full"
    dtype: str = "bf16"
    compiled: bool = False
    checkpointed: bool = False
    selective: bool = False
    """Checkpointing that keeps what is dear to compute again; optune has it."""
    in_backward: bool = False
    again: bool = False
    """The second start: what the first one compiled is still there."""
    rows: int = 4

    @property
    def mode(self) -> str:
        flags = {
            "compiled": self.compiled,
            "checkpointed": self.checkpointed,
            "selectively checkpointed": self.selective,
            "in backward": self.in_backward,
        }
        mode = ", ".join(word for word, is_on in flags.items() if is_on) or "eager"
        return f"{mode}, second start" if self.again else mode

    @property
    def has_second_start(self) -> bool:
        """Whether its caches are kept for the contestant `again`."""
        return dataclasses.replace(self, again=True) in everyone()

    @property
    def cell(self) -> str:
        """What tools are compared in: `full bf16 4 x 512, eager`."""
        return f"{self.method} {self.dtype} {self.rows} x {LENGTH}, {self.mode}"

    @property
    def name(self) -> str:
        return f"{self.tool}: {self.cell}"


@dataclass(frozen=True)
class Places:
    """What `setup` made. `work` is an empty folder of this run alone."""

    folder: Path
    work: Path

    @property
    def model(self) -> Path:
        return self.folder / "models/smollm2-135m"

    @property
    def rows(self) -> Path:
        return self.folder / "data/blocks.jsonl"

    def program(self, tool: str, name: str) -> str:
        return str(self.folder / "venvs" / tool / "bin" / name)

    def write(self, name: str, settings: Any) -> str:
        """A config as JSON, which is YAML too."""
        path = self.work / name
        path.write_text(json.dumps(settings, indent=1))
        return str(path)


def optune_command(one: Contestant, places: Places, steps: int) -> list[str]:
    settings: dict[str, Any] = {
        "model": {"path": str(places.model), "dtype": one.dtype},
        "data": {
            "train": str(places.rows), "format": "tokens", "train_on": "all", "max_length": LENGTH, "shuffle": False,
        },
        "batch_size": one.rows,
        "max_steps": steps,
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": LEARNING_RATE, "fused": True},
        "optimizer_step": "in_backward" if one.in_backward else "after_backward",
        "max_grad_norm": None,
        "schedule": {"name": "constant"},
        "activation_checkpointing": "block" if one.checkpointed else "selective" if one.selective else "none",
        "compile": one.compiled,
        "output_dir": str(places.work / "run"),
        "device": "cpu",
    }  # fmt: skip
    if one.method == "lora":
        settings["lora"] = {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "targets": TARGETS}
    config = places.write("config.yaml", settings)
    return [places.program("optune", "optune"), "run", f"{one.method}_finetune", "--config", config]


def torchtune_command(one: Contestant, places: Places, steps: int) -> list[str]:
    builders = "torchtune.models.llama3_2._component_builders"
    shape = json.loads((places.model / "config.json").read_text())
    model: dict[str, Any] = {
        "_component_": f"{builders}.llama3_2", "vocab_size": shape["vocab_size"],
        "num_layers": shape["num_hidden_layers"], "num_heads": shape["num_attention_heads"],
        "num_kv_heads": shape["num_key_value_heads"], "embed_dim": shape["hidden_size"], "max_seq_len": LENGTH,
        "intermediate_dim": shape["intermediate_size"], "rope_base": int(shape["rope_theta"]),
        "norm_eps": shape["rms_norm_eps"], "scale_factor": 1,
    }  # fmt: skip
    output = str(places.work / "run")
    settings: dict[str, Any] = {
        "output_dir": output,
        "model": model,
        "tokenizer": {"_component_": "torchtune_rows.NoTokenizer", "max_seq_len": LENGTH},
        "dataset": {"_component_": "torchtune_rows.Rows", "path": str(places.rows), "packed": False},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(places.model),
            "checkpoint_files": ["model.safetensors"], "recipe_checkpoint": None, "output_dir": output,
            "model_type": "LLAMA3_2",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": LEARNING_RATE, "fused": True},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": f"{output}/logs"},
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
        "seed": 0, "shuffle": False, "batch_size": one.rows, "epochs": 1, "max_steps_per_epoch": steps,
        "gradient_accumulation_steps": 1, "clip_grad_norm": None, "resume_from_checkpoint": False, "device": "cpu",
        "dtype": one.dtype, "compile": one.compiled, "enable_activation_checkpointing": one.checkpointed,
        "enable_activation_offloading": False, "log_every_n_steps": 1, "log_peak_memory_stats": False,
    }  # fmt: skip
    if one.method == "lora":
        model |= {
            "_component_": f"{builders}.lora_llama3_2", "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True,
            "apply_lora_to_output": False,
        }  # fmt: skip
        settings["save_adapter_weights_only"] = True
        schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        settings["lr_scheduler"] = {"_component_": schedule, "num_warmup_steps": 1}
    else:
        settings["optimizer_in_bwd"] = one.in_backward
    recipe = f"{one.method}_finetune_single_device"
    return [places.program("torchtune", "tune"), "run", recipe, "--config", places.write("config.yaml", settings)]


def trl_command(one: Contestant, places: Places, steps: int) -> list[str]:
    training = {
        "output_dir": str(places.work / "run"), "per_device_train_batch_size": one.rows, "max_steps": steps,
        "max_length": LENGTH, "packing": False, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "max_grad_norm": 0.0, "bf16": False, "fp16": False, "use_cpu": True,
        "gradient_checkpointing": one.checkpointed, "torch_compile": one.compiled, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "dataloader_num_workers": 0,
    }  # fmt: skip
    settings = {
        "model": str(places.model),
        "rows": str(places.rows),
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[one.dtype],
        "training": training,
        "lora": None,
    }
    if one.method == "lora":
        settings["lora"] = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": TARGETS}
    script = str(INSIDE / "trl_sft.py")
    return [places.program("trl", "python"), script, places.write("settings.json", settings)]


def litgpt_command(one: Contestant, places: Places, steps: int) -> list[str]:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE, "fused": True}}
    words = [
        f"finetune_{one.method}", str(places.folder / "models/lit/SmolLM2-135M-Instruct"),
        "--data", "litgpt_rows.Rows", "--data.path", str(places.rows),
        "--precision", {"bf16": "bf16-true", "fp32": "32-true"}[one.dtype], "--optimizer", json.dumps(optimizer),
        "--train.micro_batch_size", str(one.rows), "--train.global_batch_size", str(one.rows),
        "--train.max_steps", str(steps), "--train.max_seq_length", str(LENGTH), "--train.log_interval", "1",
        "--train.lr_warmup_steps", "1", "--eval.initial_validation", "false", "--eval.final_validation", "false",
        "--out_dir", str(places.work / "run"),
    ]  # fmt: skip
    if one.method == "lora":
        words += ["--lora_r", str(RANK), "--lora_alpha", str(ALPHA), "--lora_dropout", "0"]
        for part in ("query", "key", "value", "projection", "mlp"):
            words += [f"--lora_{part}", "true"]
    return [places.program("litgpt", "litgpt"), *words]


COMMANDS: dict[str, Callable[[Contestant, Places, int], list[str]]] = {
    "torchtune": torchtune_command,
    "litgpt": litgpt_command,
    "trl": trl_command,
    "optune": optune_command,
}


def everyone() -> list[Contestant]:
    """Each tool in each way that it offers, neighbours in a cell beside each other."""
    cells: list[tuple[str, dict[str, Any]]] = [
        ("torchtune litgpt trl optune", {}),
        ("optune", {"again": True}),
        ("torchtune trl optune", {"compiled": True}),
        ("torchtune optune", {"compiled": True, "again": True}),
        ("torchtune trl optune", {"checkpointed": True}),
        ("optune", {"selective": True}),
        ("torchtune optune", {"compiled": True, "checkpointed": True}),
        ("torchtune optune", {"in_backward": True}),
        ("torchtune optune", {"in_backward": True, "checkpointed": True}),
        ("torchtune optune", {"rows": 1, "checkpointed": True}),
        ("torchtune optune", {"rows": 1, "checkpointed": True, "in_backward": True}),
        ("torchtune litgpt trl optune", {"method": "lora"}),
        ("torchtune optune", {"method": "lora", "compiled": True}),
        ("torchtune trl optune", {"method": "lora", "checkpointed": True}),
        ("torchtune litgpt trl optune", {"dtype": "fp32"}),
        ("torchtune optune", {"dtype": "fp32", "compiled": True}),
        ("torchtune litgpt trl optune", {"dtype": "fp32", "method": "lora"}),
    ]
    return [Contestant(tool, **cell) for tools, cell in cells for tool in tools.split()]


def quick() -> list[Contestant]:
    """The cells that say most, each tool once: about 20 minutes on two cores."""
    cells: list[tuple[str, dict[str, Any]]] = [
        ("torchtune optune", {}),
        ("optune", {"again": True}),
        ("torchtune optune", {"compiled": True}),
        ("torchtune optune", {"checkpointed": True}),
        ("torchtune litgpt trl optune", {"method": "lora"}),
        ("torchtune trl optune", {"dtype": "fp32"}),
    ]
    return [Contestant(tool, **cell) for tools, cell in cells for tool in tools.split()]
