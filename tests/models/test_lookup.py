"""The gradient of a weight that is embedding and head, against torch's own lookup and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optune import models
from optune.loss import next_token_loss
from optune.models.families import read_config
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.optim.memory_tracker import GradientTracker, gradient_bytes

PAD = 3
TOKENS_BT = torch.tensor([[0, 7, 7, 30, 31, PAD], [0, 7, 60, 61, 62, PAD], [9, 7, 7, 7, 7, PAD]])
LABELS_BT = torch.tensor([[7, 7, 30, 31, PAD, IGNORE], [7, 60, 61, 62, 5, IGNORE], [7, 7, 7, 7, 9, IGNORE]])
TIED: dict[str, Any] = {"tie_word_embeddings": True, "pad_token_id": PAD, "num_hidden_layers": 2}
Step = Callable[[models.Decoder], None]


def make_model(dtype: torch.dtype, **shape: Any) -> models.Decoder:
    config, problems = read_config(fixtures.model_config(**TIED | shape))
    assert config is not None, problems
    torch.manual_seed(0)
    model = models.Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model.to(dtype)


def microbatch(tokens_BT: Tensor = TOKENS_BT, labels_BT: Tensor = LABELS_BT) -> Microbatch:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand(tokens_BT.shape)
    return Microbatch(tokens_BT, labels_BT, positions_BT, num_tokens=tokens_BT.numel())


def train(model: models.Decoder, batch: Microbatch | None = None) -> None:
    batch = batch or microbatch()
    next_token_loss(model, model.hidden(batch.tokens_BT), batch).backward()


def train_plainly(model: models.Decoder, batch: Microbatch | None = None) -> None:
    """torch's lookup and cross-entropy, of which autograd sums the gradients itself."""
    batch = batch or microbatch()
    weight_VD = model.model.embed_tokens.weight
    hidden_BTD = F.embedding(batch.tokens_BT, weight_VD, padding_idx=PAD)
    context = model.context(batch.positions_BT, dtype=hidden_BTD.dtype)
    for block in model.blocks:
        hidden_BTD = block(hidden_BTD, context)
    logits_NV = (model.final_norm(hidden_BTD) @ weight_VD.T).flatten(0, 1)
    F.cross_entropy(logits_NV, batch.labels_BT.flatten(), ignore_index=IGNORE, reduction="sum").backward()


def gradients(model: models.Decoder, step: Step) -> dict[str, Tensor]:
    model.zero_grad()
    step(model)
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def twice(step: Step) -> Step:
    """Accumulates two microbatches of different words."""

    def both(model: models.Decoder) -> None:
        step(model)
        step(model, microbatch(TOKENS_BT + 1, LABELS_BT))  # type: ignore[call-arg]

    return both


def over_one_graph(model: models.Decoder) -> None:
    """As the stash two_pass does: the graph of the blocks serves two losses, and the first gradient is thrown away."""
    hidden_BTD = model.hidden(TOKENS_BT)
    next_token_loss(model, hidden_BTD, microbatch()).backward(retain_graph=True)
    model.zero_grad()
    next_token_loss(model, hidden_BTD, microbatch()).backward()


def with_checkpointing(model: models.Decoder) -> None:
    model.activation_checkpointing = "block"
    train(model)


@pytest.mark.parametrize(
    ("step", "judge"),
    [
        (train, train_plainly),
        (twice(train), twice(train_plainly)),
        (over_one_graph, train_plainly),
        (with_checkpointing, train_plainly),
    ],
    ids=["once", "accumulated", "two backwards of one graph", "checkpointed"],
)
def test_gradients_are_those_of_torchs_own_lookup(step: Step, judge: Step) -> None:
    model = make_model(torch.float64)
    expected = gradients(model, judge)
    made = gradients(model, step)
    assert made.keys() == expected.keys()
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_words_that_come_often_are_summed_nearer_to_the_truth_than_by_torch_in_bf16() -> None:
    tokens_BT = torch.randint(4, 9, (4, 256), generator=torch.Generator().manual_seed(0))
    batch = microbatch(tokens_BT, tokens_BT.roll(-1, 1))
    model = make_model(torch.bfloat16, num_hidden_layers=1)
    name = "model.embed_tokens.weight"
    mine, torchs = (
        gradients(model, step)[name].double() for step in (lambda m: train(m, batch), lambda m: train_plainly(m, batch))
    )
    truth = gradients(model.double(), lambda m: train_plainly(m, batch))[name]
    assert (mine - truth).norm() < 0.7 * (torchs - truth).norm()


def cut_off(model: models.Decoder) -> None:
    """Another graph than that of the lookup: the head's part alone arrives."""
    hidden_BTD = model.hidden(TOKENS_BT).detach().requires_grad_()
    next_token_loss(model, hidden_BTD, microbatch()).backward()


def headless(model: models.Decoder) -> None:
    model.hidden(TOKENS_BT).square().sum().backward()


def lookup_alone(model: models.Decoder) -> None:
    """As the breadth-first schedule differentiates it."""
    hidden_BTD = model.embed(TOKENS_BT)
    hidden_BTD.backward(torch.ones_like(hidden_BTD))


def test_parts_of_the_graph_alone_give_their_part_of_the_gradient() -> None:
    model = make_model(torch.float64)
    name = "model.embed_tokens.weight"
    weight_VD = model.model.embed_tokens.weight
    hidden_ND = model.hidden(TOKENS_BT).detach()[LABELS_BT != IGNORE]
    losses = F.cross_entropy(hidden_ND @ weight_VD.T, LABELS_BT[LABELS_BT != IGNORE], reduction="sum")
    (expected,) = torch.autograd.grad(losses, weight_VD)
    torch.testing.assert_close(gradients(model, cut_off)[name], expected)
    counts_V = TOKENS_BT.flatten().bincount(minlength=len(weight_VD)).double()
    counts_V[PAD] = 0
    assert torch.equal(gradients(model, lookup_alone)[name], counts_V[:, None].expand_as(weight_VD))
    used = gradients(model, headless)[name].abs().sum(1).nonzero().flatten().tolist()
    assert used == sorted(set(TOKENS_BT.flatten().tolist()) - {PAD})


def test_the_shared_weight_is_differentiated_as_torch_asks_for_it_too() -> None:
    """`autograd.grad` leaves `.grad` alone, and a hook on the embedding sees its call."""
    model = make_model(torch.float64)
    expected = gradients(model, train_plainly)
    weight_VD = model.model.embed_tokens.weight
    (found,) = torch.autograd.grad(next_token_loss(model, model.hidden(TOKENS_BT), microbatch()), weight_VD)
    torch.testing.assert_close(found, expected["model.embed_tokens.weight"])
    calls: list[Any] = []
    model.model.embed_tokens.register_forward_hook(lambda *call: calls.append(call))
    torch.testing.assert_close(gradients(model, train), expected)
    assert len(calls) == 1


def test_gradient_arrives_once_and_whole() -> None:
    model = make_model(torch.float64)
    expected = gradients(model, train_plainly)["model.embed_tokens.weight"]
    arrived: list[Tensor] = []
    weight_VD = model.model.embed_tokens.weight
    weight_VD.register_post_accumulate_grad_hook(lambda weight: arrived.append(weight.grad.clone()))  # pyright: ignore
    gradients(model, train)
    assert len(arrived) == 1
    torch.testing.assert_close(arrived[0], expected)


def test_no_table_is_made_beside_the_gradients() -> None:
    """A plain lookup makes a second one, and autograd may make a third for the sum."""
    model = make_model(torch.float32, vocab_size=4001, num_hidden_layers=1)
    all_gradients = gradient_bytes(model.parameters())
    table = gradient_bytes([model.model.embed_tokens.weight])
    with GradientTracker(model) as plain:
        train_plainly(model)
    model.zero_grad()
    with GradientTracker(model) as tracker:
        train(model)
    assert tracker.peak_bytes < 1.02 * all_gradients < all_gradients + table <= plain.peak_bytes
