"""Immediate on modules of many kinds, against references that know nothing of torch functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune.optim.immediate import ImmediateStepper
from tests.optim.immediate_nets import LR, loss_of, step_once
from tests.optim.immediate_reference import step_layer_by_layer, step_leaf_modules
from tests.optim.small import SmallModel


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_parameters(ours: nn.Module, reference: nn.Module, start: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, left), right, before in zip(
        ours.named_parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        difference = float((left - right).detach().abs().max())
        assert difference <= tolerance * max(1.0, float(right.detach().abs().max())), f"{name}: {difference}"
        assert not torch.equal(left, before), f"{name} did not move"
    for left, right in zip(ours.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(left, right)


def make_conv() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding="same", groups=2, padding_mode="zeros"),
        nn.GroupNorm(2, 4),
        nn.PReLU(),
        nn.ConvTranspose2d(4, 2, 2, stride=2, output_padding=1, dilation=2),
        nn.Conv2d(2, 2, (3, 1), stride=(2, 1), dilation=(1, 2)),
        nn.InstanceNorm2d(2, affine=True),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    rows = torch.randn(2, 3, 6, 6)
    model(rows)
    return model, rows


def make_attention() -> tuple[nn.Module, Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=-2)
            self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=True)
            self.norm = nn.LayerNorm((4, 8), bias=False)
            self.bag = nn.EmbeddingBag(11, 8, mode="mean")
            self.mix = nn.Bilinear(8, 8, 6)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.norm(self.first(self.embed(tokens)))
            return self.mix(hidden, self.bag(tokens)[:, None].expand_as(hidden).contiguous())

    return Net(), torch.randint(0, 11, (3, 4))


def make_recurrent() -> tuple[nn.Module, Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(4, 6, 2)
            self.lstm = nn.LSTM(6, 5, 2, dropout=0.3, bidirectional=True, batch_first=True)
            self.gru = nn.GRU(10, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.gru(self.lstm(self.convolution(rows).transpose(1, 2))[0])[0])

    return Net(), torch.randn(2, 4, 6)


def make_decoder() -> tuple[nn.Module, Tensor]:
    model = SmallModel(blocks=2, dropout=0.1).double()
    return model, torch.randint(0, 48, (2, 7))


MODELS = [make_conv, make_attention, make_recurrent, make_decoder]


@pytest.mark.parametrize("make", MODELS)
def test_local_equals_a_reference_that_wraps_leaf_modules(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    ours, rows = make()
    start, reference = copy.deepcopy(ours), copy.deepcopy(ours)
    with torch.no_grad():
        # A scale that the reference cannot see, being no module of its own; its gradient stays the standard one.
        for model in (ours, reference, start):
            if isinstance(model, SmallModel):
                model.long_rows = None  # type: ignore[assignment]
                rows = rows[:, :6]
    step_once(ours, rows)
    step_leaf_modules(reference, lambda model: loss_of(model, rows), LR)
    assert_equal_parameters(ours, reference, start)


def layers_of(model: nn.Module, order: Sequence[str]) -> list[list[str]]:
    return [[f"{name}.{key}" for key, _ in model.get_submodule(name).named_parameters()] for name in order]


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (make_conv, ["0", "1", "3", "4", "5", "6", "7", "8", "10"]),
        (
            make_attention,
            # The encoder layer's attention is one function.
            [
                "embed",
                "first.norm1",
                "first.self_attn",
                "first.norm2",
                "first.linear1",
                "first.linear2",
                "norm",
                "bag",
                "mix",
            ],
        ),
        (make_recurrent, ["convolution", "lstm", "gru", "head"]),
    ],
)
def test_exact_equals_one_ordinary_gradient_after_another(make: Callable[[], Any], order: list[str]) -> None:
    ours, rows = make()
    reference = copy.deepcopy(ours)
    step_once(ours, rows, "exact")
    step_layer_by_layer(reference, lambda model: loss_of(model, rows), layers_of(reference, order), LR)
    for (name, left), right in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-11, msg=name)


def test_running_statistics_are_updated_once_as_in_standard_training() -> None:
    for variant in ("local", "exact"):
        ours, rows = make_conv()
        standard = copy.deepcopy(ours)
        step_once(ours, rows, variant)
        loss_of(standard, rows)
        for left, right in zip(ours.buffers(), standard.buffers(), strict=True):
            assert torch.equal(left, right)


class Odd(nn.Module):
    """Parameters in keywords, lists, in-place writes into activations, and learned inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5))
        self.b = nn.Parameter(torch.randn(5))
        self.cls = nn.Parameter(torch.randn(1, 5))
        self.shift = nn.Parameter(torch.randn(5))
        self.gate = nn.Parameter(torch.randn(5))
        self.latents = nn.Parameter(torch.randn(2, 5))
        self.mix = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("canvas", torch.zeros(4, 5))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(input=rows, weight=self.w, bias=self.b))
        hidden = torch.cat([self.cls, hidden]) * 1.0
        hidden += self.shift
        hidden[1:] *= self.gate
        hidden[2] = self.shift
        latents = F.scaled_dot_product_attention(self.mix(self.latents)[None], hidden[None], hidden[None])[0]
        return torch.add(latents, other=self.scale, alpha=2)


def test_keywords_lists_writes_into_activations_and_learned_inputs_match_plain_code() -> None:
    class Plain(Odd):
        def forward(self, rows: Tensor) -> Tensor:
            hidden = torch.tanh(F.linear(rows, self.w, self.b))
            hidden = torch.cat([torch.zeros(1, 5), hidden]) + F.pad(self.cls, (0, 0, 0, 3))
            hidden = hidden + self.shift
            rest = hidden[1:] * self.gate
            hidden = torch.cat([hidden[:1], rest[:1], (torch.zeros(5) + self.shift)[None], rest[2:]])
            latents = self.mix(torch.zeros(2, 5) + self.latents)
            latents = F.scaled_dot_product_attention(latents[None], hidden[None], hidden[None])[0]
            return latents + 2 * self.scale

    torch.manual_seed(1)
    ours, rows = Odd(), torch.randn(3, 5)
    plain = Plain()
    plain.load_state_dict(ours.state_dict())
    before = copy.deepcopy(ours)
    step_once(ours, rows)
    step_once(plain, rows)
    assert_equal_parameters(ours, plain, before, tolerance=1e-13)
    assert not torch.equal(ours.w, standard_step(before, rows).w)


def standard_step(model: nn.Module, rows: Tensor) -> Any:
    model = copy.deepcopy(model)
    loss_of(model, rows).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return model


def test_a_shared_parameter_is_updated_once_after_its_last_use_with_the_summed_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.hidden = nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.hidden(self.embed(tokens))), self.embed.weight)

    ours, tokens = Tied(), torch.randint(0, 7, (5,))
    start = copy.deepcopy(ours)
    step_once(ours, tokens)

    def stages(model: Tied, inner: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = model.embed(tokens)
        hidden = hidden if inner is None else inner
        return hidden, F.linear(torch.tanh(model.hidden(hidden)), model.embed.weight)

    _, output = stages(start)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    head = start.embed.weight.detach().requires_grad_()
    inner = torch.tanh(start.hidden(start.embed(tokens))).detach().requires_grad_()
    out = F.linear(inner, head)
    # The head's input gets its gradient with the old weight, because the embedding is still to come.
    g_inner, g_head = torch.autograd.grad((out * weights).mean() + out.pow(2).mean(), [inner, head])
    embedded = start.embed(tokens).detach()
    before = start.hidden(embedded)
    g_before = g_inner * (1 - torch.tanh(before) ** 2)
    new_hidden = start.hidden.weight - LR * g_before.t() @ embedded
    g_embedded = g_before @ new_hidden
    g_rows = torch.zeros(7, 4).index_add(0, tokens, g_embedded)
    torch.testing.assert_close(ours.hidden.weight, new_hidden, rtol=0, atol=1e-13)
    torch.testing.assert_close(ours.embed.weight, start.embed.weight - LR * (g_head + g_rows), rtol=0, atol=1e-13)


def test_parameters_outside_of_the_graph_stay_and_a_penalty_on_weights_counts_as_a_use() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.idle = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 3)

        def forward(self, rows: Tensor) -> Tensor:
            self.idle(rows)  # a branch that the loss does not see
            penalty = self.second.weight.pow(2).sum() + self.first.bias.abs().sum()
            return self.second(torch.tanh(self.first(rows))) + 0.1 * penalty

    ours, rows = Net(), torch.randn(4, 3)
    start = copy.deepcopy(ours)
    step_once(ours, rows)
    standard = standard_step(start, rows)
    assert torch.equal(ours.idle.weight, start.idle.weight)
    torch.testing.assert_close(ours.second.weight, standard.second.weight, rtol=0, atol=1e-14)
    # second.weight has its penalty as a second use: its update comes before or after first's, never twice.
    assert not torch.equal(ours.first.weight, start.first.weight)


def test_a_loss_made_from_parameters_alone_is_descended_as_by_sgd() -> None:
    for variant in ("local", "exact"):
        model = nn.Linear(3, 2)
        start = copy.deepcopy(model)
        stepper = ImmediateStepper(model, torch.optim.SGD(model.parameters(), lr=LR), variant=variant)
        with stepper.microbatch(True):
            (model.weight.pow(2).sum() + model.bias.sum()).backward()
        stepper.finish()
        torch.testing.assert_close(model.weight, start.weight * (1 - 2 * LR))
        torch.testing.assert_close(model.bias, start.bias - LR)
