"""The plan's formulas against torch's own count of shards, collectives and kept tensors, and against real models."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from optune.distributed.layout import Layout
from optune.models.decoder import outline
from optune.models.families import DecoderConfig, read_config
from optune.plan import Work, bytes_on_the_wire, count_parameters, memory, traffic
from tests import fixtures

ROOT = Path(__file__).resolve().parents[2]
ODD = {
    "vocab_size": 1003, "hidden_size": 64, "intermediate_size": 101, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": ODD | {"attention_bias": True, "mlp_bias": True},
    "tied": ODD | {"tie_word_embeddings": True},
    "qwen3": ODD | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "mlp_bias": None},
    "qwen2": ODD
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "mlp_bias": None, "attention_bias": None},
}


def make_config(shape: str) -> DecoderConfig:
    config, problems = read_config(fixtures.model_config(**SHAPES[shape]))
    assert config is not None, problems
    return config


def count(layout: Layout, work: Work) -> list[dict[str, Any]]:
    """In a process of its own: what torch counts for rank 0, for each shape."""
    from scripts import scaling_check

    counted = scaling_check.count([(make_config(shape), work) for shape in SHAPES], layout)
    return [vars(each) for each in counted]


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_decoder(shape: str) -> None:
    config = make_config(shape)
    assert count_parameters(config) == sum(parameter.numel() for parameter in outline(config).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "work"),
    [
        (Layout(2, 4, 8), Work(2, 48, microbatches=2, masters=False)),
        (Layout(1, 1, 2), Work(2, 24, weight_bytes=4, masters=False, checkpointing=False)),
    ],
    ids=["512_of_them_shards_of_parts", "parts_without_checkpointing"],
)
def test_shards_and_collectives_and_kept_tensors_are_to_the_byte_what_torch_counts(layout: Layout, work: Work) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        records = pool.submit(count, layout, work).result()
    for shape, counted in zip(SHAPES, records, strict=True):
        config = make_config(shape)
        said = memory(config, layout, work)
        assert [counted[part] for part in ("weights", "gradients", "optimizer")] == [
            said.weights, said.gradients, said.optimizer,
        ], shape  # fmt: skip
        assert counted["sent"] == {(sent.kind, sent.over): sent.bytes for sent in traffic(config, layout, work)}, shape
        if layout.data_size == 1:
            assert counted["kept"] == said.activations, shape


def test_more_processes_never_need_more_memory_each_and_one_sends_nothing() -> None:
    config, work = make_config("llama"), Work(1, 64)
    totals = [memory(config, Layout(1, shard, 1), work) for shard in (2, 4, 8, 16)]
    for more, fewer in zip(totals[1:], totals, strict=False):
        assert all(asdict(more)[part] <= asdict(fewer)[part] for part in ("weights", "gradients", "optimizer"))
    assert bytes_on_the_wire(config, Layout(), work) == {"shard": 0, "replicate": 0, "tensor": 0}
    assert memory(config, Layout(), work).gathered == 0


def test_master_weights_take_the_bytes_that_the_optimizer_keeps_in_fp32() -> None:
    config, work = make_config("llama"), Work(1, 64)
    with_masters, without = (memory(config, Layout(), replace(work, masters=masters)) for masters in (True, False))
    assert with_masters.optimizer == 12 * count_parameters(config)
    assert without.optimizer == 4 * count_parameters(config)


def test_tables_of_the_page_are_those_that_the_script_makes() -> None:
    from scripts import study_scaling

    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 5
    assert study_scaling.fill(page, json.loads(study_scaling.CHECKED.read_text())) == page
