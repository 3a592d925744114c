"""Immediate on the decoder that recipes train, through the training step that recipes use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune import lora, models, train
from optune.loss import next_token_loss
from optune.optim import build_optimizer, build_stepper
from optune.optim.functional import value_and_immediate_grad
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.optim.immediate_reference import step_leaf_modules

LR = 0.1


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return fixtures.write_model(tmp_path / "m0", tokenizer=False, **getattr(request, "param", {}))


TIED = pytest.mark.parametrize("folder", [{"tie_word_embeddings": False}, {"tie_word_embeddings": True}], indirect=True)


def make_microbatch(seed: int = 0, rows: int = 2, length: int = 9) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, len(fixtures.VOCABULARY), (rows, length), generator=generator)
    labels_BT = torch.cat([tokens_BT[:, 1:], torch.full((rows, 1), IGNORE)], dim=1)
    labels_BT[:, :3] = IGNORE
    positions_BT = torch.arange(length).expand(rows, -1)
    documents_BT = torch.arange(length).expand(rows, -1) // 5
    return Microbatch(tokens_BT, labels_BT, positions_BT, documents_BT, num_tokens=rows * length)


def one_step(model: Any, variant: Any = "local", factory: Any = torch.optim.SGD, lr: float = LR) -> train.StepResult:
    optimizer = build_optimizer(model.named_parameters(), factory=factory, settings={"lr": lr})
    stepper = build_stepper(model, optimizer, when="immediate", variant=variant)
    return train.train_step(model, next_token_loss, stepper, [make_microbatch()], seed=0, step=0)


def mean_loss(model: Any) -> Tensor:
    batch = make_microbatch()
    logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE)


def test_train_step_equals_the_leaf_module_reference(folder: Path) -> None:
    ours = models.load(folder, dtype=torch.float32).double()
    reference = copy.deepcopy(ours)
    result = one_step(ours)
    assert result.loss == pytest.approx(float(mean_loss(reference).detach()), abs=1e-12)
    step_leaf_modules(reference, mean_loss, LR)
    for (name, left), right in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12, msg=name)


@TIED
@pytest.mark.parametrize("variant", ["local", "exact"])
def test_functional_form_on_the_same_decoder_gives_the_same_weights(folder: Path, variant: Any) -> None:
    ours = models.load(folder, dtype=torch.float32).double()
    params = {name: value.detach().clone() for name, value in ours.named_parameters()}
    skeleton = copy.deepcopy(ours)

    def loss(params: dict[str, Tensor]) -> Tensor:
        class _Called(nn.Module):
            def forward(self, *args: Any) -> Tensor:
                return torch.func.functional_call(skeleton, params, args, tie_weights=True)

        return mean_loss(_Called())

    result = value_and_immediate_grad(loss, params, lambda name, p, g: p - LR * g, variant=variant)
    one_step(ours, variant)
    for name, value in ours.named_parameters():
        torch.testing.assert_close(result.params[name], value.detach(), rtol=0, atol=1e-12, msg=name)


@TIED
@pytest.mark.parametrize("variant", ["local", "exact"])
def test_block_checkpointing_changes_no_bit(folder: Path, variant: str) -> None:
    plain = models.load(folder, dtype=torch.float32)
    checkpointed = models.load(folder, dtype=torch.float32)
    checkpointed.activation_checkpointing = "block"
    results = [one_step(model, variant, torch.optim.AdamW, 1e-2) for model in (plain, checkpointed)]
    assert results[0] == results[1]
    for (name, left), right in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_adapters_alone_are_updated_with_dropout_and_checkpointing(folder: Path, variant: str) -> None:
    start = models.load(folder, dtype=torch.float32)
    names = lora.apply(start, rank=2, alpha=4, dropout=0.3, targets=["q_proj", "o_proj", "down_proj"])
    with torch.no_grad():
        for name in names:
            start.get_submodule(name).lora_B.weight.normal_(generator=torch.Generator().manual_seed(0))
    trained = [copy.deepcopy(start) for _ in range(2)]
    trained[1].activation_checkpointing = "block"
    for model in trained:
        one_step(model, variant)
    for (name, left), right, before in zip(
        trained[0].named_parameters(), trained[1].parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(left, right), name
        assert torch.equal(left, before) != ("lora_" in name), name


def test_compiled_blocks_are_refused_with_the_reason(folder: Path) -> None:
    model = models.load(folder, dtype=torch.float32)
    model.compile_blocks(backend="eager")
    with pytest.raises(train.ConfigError, match="is compiled, which hides them"):
        one_step(model)


@pytest.mark.slow
def test_a_low_bit_optimizer_steps_each_parameter_compiled_as_ever(folder: Path) -> None:
    low_bit = pytest.importorskip("torchao.optim")
    model = models.load(folder, dtype=torch.float32)
    start = copy.deepcopy(model)
    losses = [one_step(model, factory=low_bit.AdamW8bit, lr=1e-2).loss for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    for (key, left), before in zip(model.named_parameters(), start.parameters(), strict=True):
        assert not torch.equal(left, before), key
