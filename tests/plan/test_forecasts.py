"""Forecasts against steps with real tensors: counted by storages, and by torch's own allocator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optune import distributed
from optune.distributed.pretending import pretend
from optune.errors import ConfigError
from optune.optim import rounding
from optune.plan import (
    MOMENTS,
    PARTS,
    Bounds,
    Forecast,
    Work,
    deciding,
    forecast,
    memory,
    rehearsal,
    remembering,
    tracker,
    without_values,
)
from optune.plan.formulas import block_parameters
from optune.plan.rehearsal import SHALLOW, SHALLOW_DIVIDED
from optune.plan.settings import Current, list_settings
from tests.plan.real_steps import Case, make_config, make_task, measure

TOLERANCE = 0.05
IN_BACKWARD = "optimizer_step=in_backward activation_checkpointing=block"

CASES = [
    Case("small", share=0.4),
    Case("wide", "model.dtype=bf16 activation_checkpointing=selective"),
    Case("windows", "gradient_accumulation_steps=4", length=96),
    Case("small", "data.packing=true optimizer._target_=torch.optim.SGD"),
    Case("small", f"{IN_BACKWARD} max_grad_norm=null"),
    Case("wide", f"{IN_BACKWARD} gradient_stash=hold"),
    Case("wide", f"{IN_BACKWARD} gradient_stash=factored", rows=1, length=64),
    Case("wide", f"{IN_BACKWARD} gradient_stash=two_pass", validates=True),
    Case("deep", f"{IN_BACKWARD} gradient_stash=alias model.dtype=bf16 model.master_weights=fp32"),
    Case("deep", "model.dtype=bf16 model.update_rounding=stochastic optimizer_step=in_backward gradient_stash=cpu"),
    Case("qwen3", f"{IN_BACKWARD} gradient_accumulation_steps=4 accumulation=breadth_first max_grad_norm=null"),
    Case("small", "optimizer_step=immediate max_grad_norm=null optimizer._target_=torch.optim.Adafactor"),
    Case("wide", "lora.rank=16 lora.quantize_base=nf4 model.dtype=bf16", recipe="lora_finetune"),
]


def peak_of_step(found: Forecast) -> int:
    """The peak of what is measured: a step and a validation."""
    return max(total for moment, total in found.totals.items() if moment not in ("load", "save"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe}-{case.model}-{case.overrides or 'plain'}")
def test_peak_is_within_five_percent_of_an_exact_account_and_of_torchs_allocator(case: Case) -> None:
    task = make_task(case)
    predicted, measured = peak_of_step(forecast(task)), measure(task, allocator=True)
    assert predicted == pytest.approx(measured.storages, rel=TOLERANCE)
    assert predicted == pytest.approx(measured.allocator, rel=TOLERANCE)


def test_depth_that_is_not_rehearsed_gives_what_a_rehearsal_of_all_blocks_gives() -> None:
    task = make_task(Case("deep", IN_BACKWARD + " gradient_stash=hold", validates=True))
    assert task.layers > SHALLOW + 1
    assert forecast(task).moments == forecast(replace(task, alike=False)).moments


def test_parts_and_moments_add_up_and_the_parts_that_a_config_has_are_there() -> None:
    case = Case("small", "model.dtype=bf16 model.master_weights=fp32 gradient_accumulation_steps=2", validates=True)
    found = forecast(make_task(case), saved_on_device=True)
    assert list(found.moments) == list(MOMENTS)
    assert found.peak == max(sum(parts.values()) for parts in found.moments.values())
    assert sum(found.moments[found.fullest].values()) == found.peak
    assert all(set(parts) <= set(PARTS) for parts in found.moments.values())
    count = sum(parameter.numel() for parameter in make_task(case).outline(6).parameters())
    step = found.moments["step"]
    assert (step["weights"], step["masters"], step["gradients"]) == (2 * count, 4 * count, 2 * count)
    assert step["optimizer"] == pytest.approx(8 * count, rel=1e-3)  # and the numbers of steps
    # A copy of weights, masters and state, from the first save on.
    assert step["copies"] == found.moments["forward"]["copies"] == pytest.approx(14 * count, rel=1e-3)


def test_gradients_wait_in_the_place_that_the_stash_says() -> None:
    held, factored = (
        forecast(make_task(Case("wide", f"{IN_BACKWARD} gradient_stash={stash}", rows=1, length=32)))
        for stash in ("hold", "factored")
    )
    assert held.moments["step"].get("stash", 0) < 1000
    assert factored.moments["backward"]["stash"] > 100 * 2**10
    assert factored.moments["backward"]["gradients"] < held.moments["backward"]["gradients"] / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_each_of_several_processes_needs_what_torchs_allocator_gives_out_there() -> None:
    for count, parts in ((2, 1), (4, 2)):
        with pretend(count), distributed.start("cpu", tensor=parts) as processes:
            task = replace(make_task(Case("wide", "activation_checkpointing=block")), processes=processes)
            found = forecast(task)
            # torch's fake group moves nothing, but takes the memory for it.
            measured = measure(task, allocator=True)
        alone = forecast(make_task(Case("wide", "activation_checkpointing=block")))
        assert peak_of_step(found) == pytest.approx(measured.allocator, rel=TOLERANCE)
        assert found.moments["step"]["optimizer"] == pytest.approx(alone.moments["step"]["optimizer"] / count, rel=0.01)
        assert found.moments["backward"]["gathered"] > 0
        work = Work(2, 128, weight_bytes=4, masters=False)
        said = memory(make_config("wide"), processes.layout, work)
        assert found.moments["load"]["weights"] == said.weights
        assert found.moments["step"]["gradients"] == said.gradients
        assert found.moments["step"]["optimizer"] == pytest.approx(said.optimizer, rel=0.01)
        assert found.peak < said.total  # which adds up what is not there at one time


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_a_deep_model_in_shards_is_predicted_from_a_shallow_one() -> None:
    with pretend(2), distributed.start("cpu") as processes:
        task = replace(make_task(Case("deep")), processes=processes)
        assert task.layers > SHALLOW_DIVIDED + 1
        found = forecast(task)
        assert found.moments == forecast(replace(task, alike=False)).moments
        assert peak_of_step(found) == pytest.approx(measure(task, allocator=True).allocator, rel=TOLERANCE)
    # Embedding and head, whole, and no activations because torch makes them in the middle of a forward pass.
    assert found.moments["forward"]["gathered"] >= 2 * 512 * 96 * 4


def test_rehearsal_leaves_random_numbers_and_defaults_of_torch_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    forecast(make_task(Case("small", "lora.dropout=0.1", recipe="lora_finetune")))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32


class Counting(torch.optim.SGD):
    """What it makes depends on values."""

    def step(self, closure: Any = None) -> Any:
        torch.bincount(torch.zeros(3, dtype=torch.int64))
        return super().step(closure)


def test_what_depends_on_values_is_refused_by_its_name_and_never_guessed() -> None:
    task = make_task(Case("small"))

    def build(*arguments: Any) -> Any:
        optimizer, stepper = task.build(*arguments)
        optimizer.__class__ = Counting
        return optimizer, stepper

    with pytest.raises(ConfigError, match=r"aten\.bincount\.default needs values"):
        forecast(replace(task, build=build))


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", "model.dtype=bf16 activation_checkpointing=selective gradient_accumulation_steps=2"),
        Case("wide", "lora.rank=16 lora.quantize_base=nf4 optimizer_step=in_backward", recipe="lora_finetune"),
        Case("windows", "data.packing=true optimizer._target_=torch.optim.Adafactor accumulation=breadth_first"),
    ],
    ids=lambda case: case.model,
)
def test_what_is_remembered_or_worked_out_without_torchs_mode_gives_what_that_mode_gives(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembering, "_KNOWN", {})
    monkeypatch.setattr(tracker, "_EXTRA", {})
    known = [forecast(make_task(case)).moments for _ in range(2)]
    assert remembering._KNOWN
    torchs = partial(FakeTensorMode, allow_fallback_kernels=False, allow_non_fake_inputs=True)
    monkeypatch.setattr(rehearsal, "Mode", torchs)
    monkeypatch.setattr(deciding, "Mode", torchs)
    monkeypatch.setattr(tracker, "call", lambda func, args, kwargs: func(*args, **kwargs))
    monkeypatch.setattr(tracker, "_EXTRA", {})
    assert [forecast(make_task(case)).moments] * 2 == known


def test_two_parts_of_the_random_bits_take_what_all_of_them_take(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(Case("wide", "model.dtype=bf16 model.update_rounding=stochastic"))
    two = forecast(task).moments
    drawn: list[int] = []

    def draw_all(draw: Any, *args: Any) -> Any:
        for first, bits in draw(*args):
            drawn.append(first)
            yield first, bits

    monkeypatch.setattr(without_values, "_draw_twice", draw_all)
    assert forecast(task).moments == two
    assert max(drawn) >= 2 * rounding._CHUNK_ON_CPU  # there were more than two


@pytest.mark.slow
@pytest.mark.parametrize(("model", "microbatches"), [("wide", 1), ("wide", 2), ("small", 1)])
def test_no_setting_takes_less_than_what_is_said_to_be_its_least(model: str, microbatches: int) -> None:
    shape = make_config(model)
    current = Current(
        batch_size=2, microbatches=microbatches, length=128, checkpointing="none", step="after_backward", clips=True,
        stash="auto", accumulation="depth_first", trains_shared_head=shape.tie_word_embeddings,
    )  # fmt: skip
    words = f"gradient_accumulation_steps={microbatches} model.dtype=bf16"
    task = make_task(Case(model, words))
    bounds = Bounds(current, forecast(task), task.layers * 128 * shape.hidden_size * 2)
    close = 0
    for setting in list_settings(shape, current)[:: 4 if model == "wide" else 3]:
        changes = " ".join([words, *setting.words])
        found = forecast(make_task(Case(model, changes, rows=setting.current.batch_size)))
        least = bounds.least(setting.current)
        assert bounds.stays < least <= found.peak * 1.001, changes
        close += least > 0.8 * found.peak
        bounds.learn(setting.current, found)
    assert close >= 2  # it says something


def test_a_head_that_is_the_embedding_costs_a_product_more_where_its_gradient_is_made_late() -> None:
    current = Current(
        batch_size=1, microbatches=1, length=512, checkpointing="block", step="after_backward", clips=False,
        stash="auto", accumulation="depth_first",
    )  # fmt: skip
    shape = make_config("small")
    times = {}
    for tied in (False, True):
        for setting in list_settings(shape, replace(current, trains_shared_head=tied)):
            times[tied, *setting.words] = setting.time
    assert times[False, "optimizer_step=in_backward"] == 1
    head = shape.vocab_size * shape.hidden_size
    layer = sum(matrix.sharded(1) for matrix in block_parameters(shape))
    attention = 2 * shape.num_attention_heads * shape.head_dim * 512
    step = 6 * head + 4 * shape.num_hidden_layers * (2 * layer + attention)
    assert times[True, "optimizer_step=in_backward"] == pytest.approx(1 + 2 * head / step)


def test_settings_are_sorted_by_time_keep_the_rows_of_a_step_and_never_undo_what_is_set() -> None:
    current = Current(
        batch_size=4, microbatches=2, length=512, checkpointing="selective", step="after_backward", clips=True,
        stash="auto", accumulation="depth_first",
    )  # fmt: skip
    settings = list_settings(make_config("wide"), current)
    times = [round(setting.time, 3) for setting in settings]
    assert times == sorted(times)
    for setting in settings:
        rows = int(setting.overrides.get("batch_size", 4))
        assert rows * int(setting.overrides.get("gradient_accumulation_steps", 2)) == 8
        assert setting.overrides.get("activation_checkpointing") in (None, "block")
    slowest, fastest = settings[-1], settings[0]
    assert slowest.overrides["gradient_stash"] == "two_pass"
    assert fastest.time < 1.05 < 1.9 < slowest.time
