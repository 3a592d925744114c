"""Steps with real tensors, and what they take: counted by storages, and by torch's own allocator.

The model, the optimizer and the stepper are those that the recipe builds for a run; weights are random.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from optune import config, plan, train
from optune.models.families import DecoderConfig, read_config
from optune.plan import Task
from optune.shards import local_values, materialize
from optune.types import IGNORE, Microbatch, MicrobatchShape
from tests import fixtures
from tests.optim.memory_tracker import StorageTracker

ROOT = Path(__file__).resolve().parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    },
    "deep": {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32,
    },
    "wide": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "mlp_bias": None,
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
    },
    "windows": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "mlp_bias": None, "attention_bias": None,
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration. `share`: of the positions that are targets."""

    model: str
    overrides: str = ""
    recipe: str = "full_finetune"
    rows: int = 2
    length: int = 128
    share: float = 1.0
    validates: bool = False

    @property
    def shape(self) -> MicrobatchShape:
        packed = "data.packing=true" in self.overrides
        return MicrobatchShape(self.rows, self.length, int(self.rows * self.length * self.share), packed=packed)


def make_task(case: Case) -> Task:
    """What `optune plan` makes of the recipe and the config."""
    recipe = load_recipe(case.recipe)
    words = [f"batch_size={case.rows}", f"data.max_length={case.length}", *case.overrides.split()]
    cfg = config.load(recipe.Config, ROOT / "configs" / "tiny" / "full.yaml", words)
    shape = make_config(case.model)
    return plan.make_task(
        partial(recipe.outline, cfg),
        partial(recipe.build, cfg),
        recipe.loss_sum,
        shape,
        case.shape,
        microbatches=cfg.gradient_accumulation_steps,
        accumulation=cfg.accumulation,
        validation=case.shape if case.validates else None,
    )


def make_config(model: str) -> DecoderConfig:
    found, problems = read_config(fixtures.model_config(**SHAPES[model]))
    assert found is not None, problems
    return found


def load_recipe(name: str) -> ModuleType:
    found = sys.modules.get(f"planned_{name}")
    if found is not None:
        return found
    spec = importlib.util.spec_from_file_location(f"planned_{name}", ROOT / "recipes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Measured:
    """Peak bytes of the second step: counted by storages, and by what torch's allocator gave out."""

    storages: int
    allocator: int


@torch.compiler.set_stance("force_eager")
def measure(task: Task, *, allocator: bool = False) -> Measured:
    """Takes two steps with real tensors (and a validation, where the task has one) and counts in the second."""
    torch.manual_seed(0)
    model = task.outline(task.layers)
    optimizer, stepper = task.build(model, task.processes, fill, task.positions_per_step)
    batch = [make_microbatch(task.shape, index, model.config.vocab_size) for index in range(task.microbatches)]

    def step(number: int) -> None:
        train.train_step(model, task.loss, stepper, batch, seed=0, step=number, accumulation=task.accumulation)
        if task.validation is not None:
            train.evaluate(model, task.loss, batch[:1])

    step(0)
    gc.collect()
    held = list(live_tensors(model, optimizer, batch))
    storages = [local_values(tensor).untyped_storage() for tensor in held]
    before = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    with StorageTracker(held) as tracker:
        step(1)
    if not allocator:
        return Measured(tracker.peak_bytes, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step(2)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in watched.profiler.kineto_results.events()  # pyright: ignore
        if event.name() == "[memory]"
    ]
    most = now = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return Measured(tracker.peak_bytes, before + most)


def fill(model: Any) -> None:
    """Small random weights."""
    materialize(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def live_tensors(model: Any, optimizer: Any, batch: Sequence[Microbatch]) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for microbatch in batch:
        yield from (value for value in vars(microbatch).values() if isinstance(value, torch.Tensor))


def make_microbatch(shape: MicrobatchShape, seed: int, vocabulary: int) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(vocabulary, (shape.rows, shape.length), generator=generator)
    labels_BT = tokens_BT.roll(-1, 1).flatten()
    labels_BT[shape.targets :] = IGNORE
    positions_BT = torch.arange(shape.length).repeat(shape.rows, 1)
    documents_BT = positions_BT // (shape.length // 2) if shape.packed else None
    return Microbatch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT.view(shape.rows, shape.length),
        positions_BT=positions_BT % (shape.length // 2) if shape.packed else positions_BT,
        documents_BT=documents_BT,
        num_tokens=shape.positions,
        rows=("",) * shape.rows,
    )
