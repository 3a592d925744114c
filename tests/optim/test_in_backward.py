"""What the in-backward stepper does with hooks, with odd gradients, and with what it must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optune import optim
from optune.errors import ConfigError, TrainingError
from tests.optim.small import SmallModel, assert_same, loss_sum, make_rows, run, snapshot

CLIPPED = ("hold", "cpu", "two_pass", "factored")
TOKENS = torch.arange(6)[None]


def build(
    model: nn.Module, *, factory: Any = torch.optim.SGD, lr: float = 0.1, masters: str = "none", **settings: Any
) -> tuple[Any, Any]:
    keywords = {key: settings.pop(key) for key in ("momentum", "weight_decay") if key in settings}
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=factory, settings={"lr": lr} | keywords, master_weights=masters
    )
    return optimizer, optim.build_stepper(model, optimizer, when=settings.pop("when", "in_backward"), **settings)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def test_weights_change_inside_backward_block_by_block_from_the_top() -> None:
    model = SmallModel(blocks=2)
    _, stepper = build(model)
    before = weights(model)
    seen: list[set[str]] = []
    with stepper.microbatch(True):
        hidden = model.embed(TOKENS)
        hidden.register_hook(lambda _: seen.append(changed(model, before)))
        middle = model.blocks[0](hidden)
        middle.register_hook(lambda _: seen.append(changed(model, before)))
        model.head(model.norm(model.blocks[1](middle))).sum().backward()
    top = {name for name in before if name.startswith(("blocks.1", "norm", "head"))}
    assert seen == [top, top | {name for name in before if name.startswith("blocks.0")}]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_weight_changes_before_the_last_microbatch() -> None:
    # The classic: in-backward optimizers that step in each microbatch.
    model = SmallModel()
    _, stepper = build(model)
    before = weights(model)
    for _ in range(3):
        with stepper.microbatch(False):
            loss_sum(model, TOKENS).backward()
    assert changed(model, before) == set()
    with stepper.microbatch(True):
        loss_sum(model, TOKENS).backward()
    assert changed(model, before) == set(before) - {"long_rows"}


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_the_rate_set_for_a_step_is_the_rate_of_that_step(mode: str) -> None:
    # The classics: the schedule does not reach the inner step; the first step runs at the full rate.
    model = SmallModel()
    optimizer, stepper = build(model, when=mode, lr=0.5)
    schedule = optim.build_schedule(name="linear", total_steps=4, warmup_steps=2)
    for step, factor in enumerate([0.5, 1.0, 1.0, 0.5]):
        reference, before = SmallModel(), weights(model)
        reference.load_state_dict(model.state_dict())
        loss_sum(reference, TOKENS).backward()
        optim.set_learning_rate(optimizer, schedule, step)
        run(model, stepper, [[TOKENS]], loss=lambda model, tokens: loss_sum(model, tokens) * (tokens.numel() - 1))
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected = before[name] - 0.5 * factor * parameter.grad
                torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected)


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_a_parameter_without_a_gradient_is_left_alone_by_decay_and_momentum(mode: str, clip: float | None) -> None:
    model = SmallModel()
    optimizer, stepper = build(model, when=mode, max_grad_norm=clip, momentum=0.9, weight_decay=0.5)
    before = model.long_rows.detach().clone()
    run(model, stepper, [[TOKENS], [TOKENS]])
    assert torch.equal(model.long_rows, before)
    assert model.long_rows not in optimizer.state
    long = torch.arange(9)[None]
    run(model, stepper, [[long]])
    after_one = model.long_rows.detach().clone()
    assert not torch.equal(after_one, before)
    run(model, stepper, [[TOKENS]])
    assert torch.equal(model.long_rows, after_one)


@pytest.mark.parametrize("stash", ["hold", "factored", "two_pass"])
def test_a_parameter_used_in_an_earlier_microbatch_only_is_updated_in_finish(stash: str) -> None:
    model, reference = SmallModel(), SmallModel()
    rows = [[torch.arange(9)[None], TOKENS]]
    run(model, build(model, stash=stash, max_grad_norm=1e-2)[1], rows)
    run(reference, build(reference, when="after_backward", max_grad_norm=1e-2)[1], rows)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-6, atol=1e-7)
    assert "long_rows" in changed(model, weights(SmallModel()))


def test_close_leaves_an_ordinary_model() -> None:
    model = SmallModel()
    _, stepper = build(model, stash="factored", max_grad_norm=1.0)
    stepper.close()
    before = weights(model)
    loss_sum(model, TOKENS).backward()
    assert changed(model, before) == set()
    assert model.head.weight.grad is not None
    assert all("forward" not in vars(module) for module in model.modules())


def test_evaluation_between_steps_is_not_watched() -> None:
    model = SmallModel()
    _, stepper = build(model, stash="factored", max_grad_norm=1.0)
    run(model, stepper, [[TOKENS]])
    before = weights(model)
    loss_sum(model, TOKENS).backward()  # a user's own backward, outside of any microbatch
    assert changed(model, before) == set()


@pytest.mark.parametrize("stash", ["hold", "factored", "cpu"])
def test_an_error_in_a_microbatch_leaves_nothing_behind(stash: str) -> None:
    rows = make_rows(2, [2])
    model, reference = SmallModel(), SmallModel()
    _, stepper = build(model, stash=stash, max_grad_norm=1e-2)
    with pytest.raises(ZeroDivisionError), stepper.microbatch(True):
        loss_sum(model, torch.arange(9)[None]).backward()  # with a parameter that the steps below do not use
        raise ZeroDivisionError
    assert all(parameter.grad is None for parameter in model.parameters())
    _, stats = run(model, stepper, rows)
    _, expected = run(reference, build(reference, stash=stash, max_grad_norm=1e-2)[1], rows)
    assert stats == expected
    assert_same(weights(reference), weights(model))


def test_an_error_in_backward_gives_aliased_weights_back() -> None:
    model = SmallModel().to(torch.bfloat16)
    _, stepper = build(model, masters="fp32", stash="alias", max_grad_norm=1.0)
    before = weights(model)

    def fail(_: Tensor) -> None:
        assert changed(model, before)  # gradients lie in the weights of the blocks above
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stepper.microbatch(True):
        hidden = model.embed(TOKENS)
        hidden.register_hook(fail)
        for block in model.blocks:
            hidden = block(hidden)
        model.head(model.norm(hidden)).float().sum().backward()
    assert changed(model, before) == set()


class Reentrant(SmallModel):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.head(self.norm(hidden))


def test_reentrant_checkpointing_is_refused_before_a_weight_of_it_changes() -> None:
    model = Reentrant()
    _, stepper = build(model)
    before = weights(model)
    with pytest.raises(ConfigError, match="not reentrant"), stepper.microbatch(True):
        loss_sum(model, TOKENS).backward()
    assert not any(name.startswith("blocks") for name in changed(model, before))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_second_backward_in_the_last_microbatch_is_refused(clip: float | None) -> None:
    model = SmallModel()
    _, stepper = build(model, max_grad_norm=clip)
    with pytest.raises(TrainingError, match="arrived after its bucket"), stepper.microbatch(True):
        loss_sum(model, TOKENS).backward()
        loss_sum(model, TOKENS).backward()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_refused_in_every_mode(one_process: None) -> None:
    model = nn.parallel.DistributedDataParallel(SmallModel())
    for when in ("after_backward", "in_backward", "immediate"):
        with pytest.raises(ConfigError, match="DistributedDataParallel averages"):
            build(model, when=when, max_grad_norm=None)


def poison(model: SmallModel, bad: float = float("nan")) -> None:
    with torch.no_grad():
        model.embed.weight[40] = bad


POISONED = torch.tensor([[1, 2, 40, 3, 4, 5]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "settings",
    [{"when": "after_backward"}, {"when": "after_backward", "max_grad_norm": 1.0}]
    + [{"stash": stash, "max_grad_norm": 1.0} for stash in CLIPPED],
    ids=str,
)
def test_a_step_whose_gradient_is_not_finite_changes_nothing(settings: dict[str, Any], bad: float) -> None:
    model = SmallModel()
    poison(model, bad)
    optimizer, stepper = build(model, factory=torch.optim.AdamW, **settings)
    run(model, stepper, [[TOKENS]])
    before = snapshot(model, optimizer)
    _, stats = run(model, stepper, [[TOKENS, POISONED], [POISONED]])
    assert all(entry.skipped and not torch.isfinite(torch.tensor(entry.grad_norm)) for entry in stats)
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value.nan_to_num(), after[key].nan_to_num()), key
    assert all(parameter.grad is None for parameter in model.parameters())
    _, stats = run(model, stepper, [[TOKENS]])
    assert not stats[0].skipped


def test_a_skipped_step_gives_aliased_weights_back() -> None:
    model = SmallModel().to(torch.bfloat16)
    poison(model)
    optimizer, stepper = build(model, masters="fp32", stash="alias", max_grad_norm=1.0)
    before = {key: value.nan_to_num() for key, value in snapshot(model, optimizer).items()}
    _, stats = run(model, stepper, [[POISONED]])
    assert stats[0].skipped
    assert_same(before, {key: value.nan_to_num() for key, value in snapshot(model, optimizer).items()})


@pytest.mark.parametrize(
    "settings",
    [{"when": "after_backward"}] + [{"stash": stash, "max_grad_norm": 1.0} for stash in CLIPPED],
    ids=str,
)
def test_skips_in_a_row_end_the_run_and_a_good_step_starts_the_count_again(settings: dict[str, Any]) -> None:
    model = SmallModel()
    poison(model)
    _, stepper = build(model, max_skipped_steps=3, **settings)
    run(model, stepper, [[POISONED], [POISONED], [TOKENS], [POISONED], [POISONED]])
    before = weights(model)
    with pytest.raises(TrainingError, match=r"max_skipped_steps: .* 3 steps in a row") as caught:
        run(model, stepper, [[POISONED]])
    assert "what was saved before is intact" in (caught.value.hint or "")
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in model.named_parameters())


def test_without_clipping_a_gradient_that_is_not_finite_ends_the_run() -> None:
    model = SmallModel()
    poison(model)
    _, stepper = build(model)
    with pytest.raises(TrainingError, match="the weights were updated with it") as caught:
        run(model, stepper, [[POISONED]])
    assert "what was saved before is intact" in (caught.value.hint or "")


def test_two_pass_notices_a_second_pass_that_does_not_repeat_the_first() -> None:
    model = SmallModel(dropout=0.5)
    _, stepper = build(model, stash="two_pass", max_grad_norm=1.0)
    with pytest.raises(TrainingError, match="did not repeat the first"):
        for pass_index in range(2):
            with stepper.microbatch(True, pass_index):
                torch.manual_seed(pass_index)
                loss_sum(model, TOKENS).backward()
        stepper.finish()


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_two_pass_may_run_backward_twice_over_one_graph(checkpointing: str) -> None:
    rows = make_rows(3, [1])
    model, reference = SmallModel(dropout=0.1), SmallModel(dropout=0.1)
    model.activation_checkpointing = reference.activation_checkpointing = checkpointing
    _, stepper = build(model, stash="two_pass", max_grad_norm=1e-2)
    stats = []
    for step, (tokens,) in enumerate(rows):
        torch.manual_seed(1000 * step)
        loss = None
        for pass_index in range(2):
            with stepper.microbatch(True, pass_index):
                if loss is None:
                    loss = loss_sum(model, tokens) / tokens[:, 1:].numel()
                loss.backward(retain_graph=pass_index == 0)
        stats.append(stepper.finish())
    _, expected = run(reference, build(reference, when="after_backward", max_grad_norm=1e-2)[1], rows)
    assert stats == expected
    assert_same(weights(reference), weights(model))


def test_two_pass_without_its_second_pass_is_an_error() -> None:
    model = SmallModel()
    _, stepper = build(model, stash="two_pass", max_grad_norm=1.0)
    assert stepper.passes == 2
    with stepper.microbatch(True, 0):
        loss_sum(model, TOKENS).backward()
    with pytest.raises(TrainingError, match="second pass"):
        stepper.finish()


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_the_norm_is_that_of_the_whole_gradient_without_clipping_too(mode: str) -> None:
    model, reference = SmallModel(), SmallModel()
    _, stepper = build(model, when=mode)
    _, stats = run(model, stepper, [[TOKENS]])
    (loss_sum(reference, TOKENS) / (TOKENS.numel() - 1)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert stats[0].grad_norm == pytest.approx(float(expected), rel=1e-6)


def test_describe_names_mode_policy_and_reason() -> None:
    model = SmallModel()
    assert "after backward" in build(model, when="after_backward")[1].describe()
    assert "no clipping" in build(model)[1].describe()
    for stash in CLIPPED:
        line = build(model, stash=stash, max_grad_norm=1.0)[1].describe()
        assert f"({stash}: as asked" in line and "\n" not in line
