"""The gradient of a head that is the embedding too, made at the end of backward: the same numbers, less memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optune import kernels, loss, models, optim, train
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch, SharedHead
from tests import fixtures
from tests.optim.memory_tracker import StorageTracker

VOCABULARY, WIDTH, ROWS, LENGTH = 777, 32, 3, 67


def load_model(folder: Path, dtype: torch.dtype, **shape: Any) -> models.Decoder:
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "head_dim": 8, "num_hidden_layers": 2} | shape
    fixtures.write_model(folder, tie_word_embeddings=True, **shape)
    return models.load(folder, dtype=dtype)


def make_microbatch(seed: int = 0, *, weighted: bool = False) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels_BT = tokens_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE
    labels_BT[0, :20] = IGNORE
    weights_BT = torch.rand(ROWS, LENGTH, generator=generator) if weighted else None
    positions_BT = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return Microbatch(tokens_BT, labels_BT, positions_BT, weights_BT=weights_BT, num_tokens=tokens_BT.numel())


def run_forward(model: models.Decoder, microbatch: Microbatch, *, late: bool) -> tuple[Tensor, SharedHead]:
    hidden_BTD = model.hidden(microbatch.tokens_BT)
    shared = SharedHead.of(hidden_BTD)
    assert shared is not None
    shared.later.is_wanted = late
    return hidden_BTD, shared


def differentiate(model: models.Decoder, microbatch: Microbatch, *, late: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    hidden_BTD, _ = run_forward(model, microbatch, late=late)
    value = next_token_loss(model, hidden_BTD, microbatch)
    (value * 0.37).backward()
    return value.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch's"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows_of_chunk", "rows_of_block", "words_of_block"), [(1024, 64, 100), (64, 128, 2**11), (50, 7, 64)], ids=str
)
def test_numbers_are_those_of_an_early_gradient_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype, is_native, rows_of_chunk, rows_of_block, words_of_block
) -> None:
    monkeypatch.setattr("optune.loss.CHUNK_BYTES", rows_of_chunk * VOCABULARY * dtype.itemsize)
    monkeypatch.setattr("optune.loss.BLOCK_LOGITS", rows_of_block * VOCABULARY)
    monkeypatch.setattr("optune.loss.BLOCK_WORDS", words_of_block)
    monkeypatch.setattr("optune.cross_entropy.PART_ON_CPU", 5 * VOCABULARY)
    model = load_model(tmp_path / "m", dtype)
    with nullcontext() if is_native else kernels.turned_off():
        for microbatch in (make_microbatch(), make_microbatch(weighted=True)):
            early_loss, early = differentiate(model, microbatch, late=False)
            late_loss, late = differentiate(model, microbatch, late=True)
            assert torch.equal(early_loss, late_loss)
            assert early.keys() == late.keys()
            assert [name for name in early if not torch.equal(early[name], late[name])] == []


def test_without_targets_it_is_zero(tmp_path: Path) -> None:
    model = load_model(tmp_path / "m", torch.float32)
    microbatch = make_microbatch()
    microbatch.labels_BT.fill_(IGNORE)
    value, gradients = differentiate(model, microbatch, late=True)
    assert value == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each late gradient that is made."""
    calls: list[int] = []
    make = loss._LateGradient.make

    def watched(self: Any, grad_total: Tensor) -> Tensor:
        calls.append(len(self.weight_VD))
        return make(self, grad_total)

    monkeypatch.setattr(loss._LateGradient, "make", watched)
    return calls


def run_steps(
    model: models.Decoder, checkpointing: Any, count: int, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    model.activation_checkpointing = checkpointing
    optimizer = optim.build_optimizer(
        model.named_parameters(),
        factory=torch.optim.AdamW,
        settings={"lr": 0.01},
        master_weights="fp32" if options.get("stash") == "alias" else "none",
    )
    stepper = optim.build_stepper(model, optimizer, **options)
    losses = []
    for step in range(3):
        microbatches = [make_microbatch(10 * step + index) for index in range(count)]
        losses.append(train.train_step(model, next_token_loss, stepper, microbatches, seed=0, step=step).loss)
    stepper.close()
    return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


CLIPPED: dict[str, Any] = {"when": "in_backward", "max_grad_norm": 0.1}
"""Where gradients wait for the norm, the stash says how."""


@pytest.mark.parametrize(
    ("options", "checkpointing", "count", "expected"),
    [
        ({"when": "in_backward"}, "block", 1, 3),
        (CLIPPED | {"stash": "two_pass"}, "block", 1, 6),
        (CLIPPED | {"stash": "alias"}, "block", 1, 3),
        (CLIPPED | {"stash": "hold"}, "block", 1, 0),
        ({"when": "in_backward"}, "none", 1, 0),
        ({"when": "in_backward"}, "selective", 1, 0),
        ({"when": "in_backward"}, "block", 2, 0),
        ({"when": "after_backward"}, "block", 1, 0),
    ],
    ids=str,
)
def test_steps_that_free_gradients_and_keep_little_make_it_late_and_end_at_the_same_bits(
    tmp_path: Path, made: list[int], options, checkpointing, count, expected
) -> None:
    dtype = torch.bfloat16 if options.get("stash") == "alias" else torch.float32
    usual = {"when": "after_backward", "max_grad_norm": options.get("max_grad_norm")}
    master = {"stash": "alias"} if options.get("stash") == "alias" else {}
    judge = load_model(tmp_path / "m", dtype)
    losses, weights = run_steps(judge, checkpointing, count, **usual | master)
    assert made == []
    late_losses, late_weights = run_steps(load_model(tmp_path / "m", dtype), checkpointing, count, **options)
    assert made == [VOCABULARY] * expected
    assert losses == late_losses
    assert [name for name in weights if not torch.equal(weights[name], late_weights[name])] == []


def test_neither_a_sum_over_chunks_nor_the_gradient_is_there_while_blocks_are_differentiated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is in fp32, twice the gradient's size."""
    monkeypatch.setattr("optune.loss.CHUNK_BYTES", 64 * 40_000 * 2)
    microbatch = make_microbatch()
    peaks = []
    for late in (False, True):
        model = load_model(tmp_path / "m", torch.bfloat16, vocab_size=40_000, num_hidden_layers=1)
        differentiate(model, microbatch, late=late)
        model.zero_grad()
        gc.collect()
        with StorageTracker(list(model.parameters())) as tracker:
            differentiate(model, microbatch, late=late)
        peaks.append(tracker.peak_bytes)
        head = model.lm_head.weight.nbytes
    assert peaks[0] - peaks[1] > 1.9 * head


def test_a_weight_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    model = load_model(tmp_path / "m", torch.float32)
    hidden_BTD, _ = run_forward(model, make_microbatch(), late=True)
    value = next_token_loss(model, hidden_BTD, make_microbatch())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed"):
        value.backward()


def test_what_it_is_made_from_is_let_go(tmp_path: Path) -> None:
    model = load_model(tmp_path / "m", torch.float32)
    hidden_BTD, shared = run_forward(model, make_microbatch(), late=True)
    next_token_loss(model, hidden_BTD, make_microbatch()).backward()
    kept = weakref.ref(hidden_BTD), weakref.ref(shared)
    gc.disable()
    try:
        del hidden_BTD, shared
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()
