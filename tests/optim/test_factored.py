"""Gradients in factors: the right norm, the right gradient, and what keeps its real gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune import optim
from optune.errors import ConfigError
from optune.optim.stash.factors import GRAM_ROWS, EmbeddingFactors, LinearFactors, gram_norms, is_gram_cheaper
from tests.optim.small import VOCABULARY, SmallModel, loss_sum


def build(model: nn.Module, **settings: Any) -> Any:
    optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 1.0})
    settings = {"stash": "factored", "max_grad_norm": 1e9} | settings
    return optim.build_stepper(model, optimizer, when="in_backward", **settings)


def layer_of(stepper: Any, name: str) -> Any:
    return next(layer for layer in stepper._stash._layers if layer.entry.name == name)


@pytest.mark.parametrize("rows", [1, 7, GRAM_ROWS - 1, GRAM_ROWS, GRAM_ROWS + 1, 3 * GRAM_ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_norms_are_the_norms_of_the_gradients(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs_TI = torch.randn(rows, 24).to(dtype)
    group, exact = [], []
    for outputs in (8, 40):
        factors = LinearFactors()
        gradient_TO = torch.randn(rows, outputs).mul(0.01).to(dtype)
        for part in torch.arange(rows).split(max(1, rows // 3)):  # microbatches: cross terms between them count
            factors.add(inputs_TI[part], gradient_TO[part])
        group.append(factors)
        exact.append(float((gradient_TO.double().t() @ inputs_TI.double()).norm()))
        torch.testing.assert_close(factors.make(), gradient_TO.t() @ inputs_TI)
    assert group[0].rows == rows
    assert [float(norm) for norm in gram_norms(group)] == pytest.approx(exact, rel=2e-5)


def test_gram_norm_of_a_gradient_that_cancels_is_not_negative() -> None:
    factors = LinearFactors()
    row = torch.randn(1, 8)
    factors.add(row.repeat(2, 1), torch.stack([torch.ones(8), -torch.ones(8)]))
    assert 0.0 <= float(gram_norms([factors])[0]) < 1e-2


@pytest.mark.parametrize("padding_index", [None, 3])
def test_embedding_factors_are_torchs_gradient(padding_index: int | None) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, padding_idx=padding_index)
    tokens_T = torch.tensor([1, 3, 3, 7, 1, 1])
    gradient_TO = torch.randn(6, 4)
    factors = EmbeddingFactors(10, padding_index)
    factors.add(tokens_T[:2], gradient_TO[:2])
    factors.add(tokens_T[2:], gradient_TO[2:])
    (embedding(tokens_T) * gradient_TO).sum().backward()
    assert embedding.weight.grad is not None
    torch.testing.assert_close(factors.make(), embedding.weight.grad)
    torch.testing.assert_close(factors.norm(), embedding.weight.grad.norm())


def test_gram_matrices_are_taken_where_they_cost_less() -> None:
    assert is_gram_cheaper(512, (4096, 4096), low_precision=True)
    assert not is_gram_cheaper(3000, (4096, 4096), low_precision=True)
    assert is_gram_cheaper(3000, (4096, 4096), low_precision=False)
    assert not is_gram_cheaper(600, (576, 576), low_precision=True)


class Mixed(nn.Module):
    """Linear layers used in every odd way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice = nn.Linear(32, 32, bias=True)
        self.also_outside = nn.Linear(32, 32, bias=False)
        self.outside_only = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.twin = nn.Linear(32, 32, bias=False)
        self.twin.weight = self.tied.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.never = nn.Linear(32, 32)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.twice(torch.tanh(self.twice(rows)))
        rows = torch.tanh(self.also_outside(rows)) + F.linear(rows, self.also_outside.weight)
        rows = torch.tanh(F.linear(rows, self.outside_only.weight))
        rows = self.frozen(self.twin(torch.tanh(self.tied(rows))))
        with torch.no_grad():
            self.never(rows)
        return rows.expand(2, *rows.shape)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_layers_used_in_odd_ways_get_torchs_update(microbatches: int) -> None:
    parts = [torch.randn(4, 32, generator=torch.Generator().manual_seed(index)) for index in range(microbatches)]
    model, reference = Mixed(), Mixed()
    stepper = build(model)
    for index, rows in enumerate(parts):
        with stepper.microbatch(index == microbatches - 1):
            model(rows).square().sum().backward()
        reference(rows).square().sum().backward()
    stats = stepper.finish()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for (name, got), start in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected = start if start.grad is None else start - start.grad
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=1e-4, msg=name)
    assert not any(layer.entry.name.startswith(("tied", "twin", "frozen")) for layer in stepper._stash._layers)


def test_shared_inputs_are_held_once_and_their_layers_decide_together() -> None:
    model = SmallModel(blocks=1)
    stepper = build(model)
    with stepper.microbatch(True):
        loss_sum(model, torch.arange(6)[None]).backward()
        q, k, v = (layer_of(stepper, f"blocks.0.{name}.weight").factors for name in "qkv")
        assert q.shares_inputs(k) and q.shares_inputs(v)
        assert not q.shares_inputs(layer_of(stepper, "blocks.0.o.weight").factors)
        assert q.inputs[0].data_ptr() == k.inputs[0].data_ptr() == v.inputs[0].data_ptr()
    stepper.finish()


def test_factors_turn_into_gradients_when_microbatches_add_up() -> None:
    model = SmallModel(blocks=1)
    stepper = build(model)
    down = layer_of(stepper, "blocks.0.down.weight")
    outcomes = []
    for index in range(4):  # 5 tokens each; inputs 40 and outputs 16 wide: even at 11.4
        with stepper.microbatch(index == 3):
            loss_sum(model, torch.arange(6)[None]).backward()
            outcomes.append((down.factors.rows, model.blocks[0].down.weight.grad is not None))
    stepper.finish()
    assert outcomes == [(5, False), (10, False), (0, True), (0, True)]


def test_adapters_and_layers_of_many_tokens_keep_their_gradient() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    model = Adapted()
    stepper = build(model)
    with stepper.microbatch(True):
        model.up(model.down(torch.randn(12, 64))).square().sum().backward()
        assert model.up.weight.grad is not None and model.down.weight.grad is not None
    stepper.finish()


def test_more_than_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="one process, and there are 2: the norm of a sum"):
        build(SmallModel())


def test_compiled_blocks_are_refused() -> None:
    model = SmallModel()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="a compiled block does not call"):
        build(model)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)


@pytest.mark.parametrize(
    ("tokens", "processes", "policy"),
    [(64, 1, "factored"), (250, 1, "hold"), (5000, 1, "hold"), (None, 1, "hold"), (64, 2, "hold")],
)
def test_auto_takes_factors_for_few_tokens_in_one_process(
    tokens: int | None, processes: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    line = build(Wide(), stash="auto", expected_tokens=tokens).describe()
    assert f"({policy}: " in line
    assert "MiB" in line


def test_auto_takes_alias_with_masters_and_hold_for_compiled_blocks() -> None:
    model = Wide().to(torch.bfloat16)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 1.0}, master_weights="fp32"
    )
    stepper = optim.build_stepper(model, optimizer, when="in_backward", max_grad_norm=1.0, expected_tokens=64)
    assert "(alias: fp32 masters" in stepper.describe()
    model = Wide()
    model.first.compile(backend="eager")
    assert "(hold: " in build(model, stash="auto", expected_tokens=64).describe()


def test_copies_of_the_model_do_not_carry_the_stash() -> None:
    import copy

    model = SmallModel()
    stepper = build(model)
    twin = copy.deepcopy(model)
    with stepper.microbatch(True):
        loss_sum(model, torch.arange(6)[None]).backward()
    stepper.finish()
    assert all("forward" not in vars(module) for module in [*model.modules(), *twin.modules()])


def test_padding_rows_of_an_embedding_stay() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(VOCABULARY, 8, padding_idx=2)

    model, reference = Embeds(), Embeds()
    tokens = torch.tensor([[1, 2, 5, 1, 2]])
    stepper = build(model)
    with stepper.microbatch(True):
        model.table(tokens).square().sum().backward()
        assert model.table.weight.grad is None
    stats = stepper.finish()
    reference.table(tokens).square().sum().backward()
    gradient = reference.table.weight.grad
    assert gradient is not None
    assert stats.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-6)
    torch.testing.assert_close(model.table.weight.detach(), reference.table.weight.detach() - gradient)
