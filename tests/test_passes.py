"""Breadth-first against depth-first and its live gradient memory; one forward for two passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optune import lora, models, optim, train
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch
from tests import fixtures


def make_microbatches(count: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(1)
    microbatches = []
    for index in range(count):
        length = 5 + index
        tokens_BT = torch.randint(0, len(fixtures.VOCABULARY), (2, length), generator=generator)
        labels_BT = tokens_BT.roll(-1, dims=1)
        labels_BT[:, -1] = IGNORE
        labels_BT[0, :index] = IGNORE
        microbatches.append(
            Microbatch(tokens_BT, labels_BT, torch.arange(length).expand(2, length), num_tokens=2 * length)
        )
    return microbatches


def load_model(folder: Path, dtype: torch.dtype, *, tied: bool, adapters: bool):
    fixtures.write_model(folder, tie_word_embeddings=tied, num_hidden_layers=3)
    model = models.load(folder, dtype=dtype)
    if adapters:
        torch.manual_seed(5)
        lora.apply(model, rank=2, alpha=4, dropout=0.3, targets=["q_proj", "down_proj"], dtype=dtype)
        for parameter in lora.trainable(model).values():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def run_steps(model, accumulation: str, *, steps: int = 3, count: int = 4, **stepper_options):
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.5, "momentum": 0.9}
    )
    stepper = optim.build_stepper(model, optimizer, **stepper_options)
    results = [
        train.train_step(
            model, next_token_loss, stepper, make_microbatches(count), seed=0, step=step, accumulation=accumulation
        )
        for step in range(steps)
    ]
    stepper.close()
    return results, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"when": "after_backward", "max_grad_norm": 0.1},
        {"when": "in_backward"},
        {"when": "in_backward", "max_grad_norm": 0.1, "stash": "hold"},
        {"when": "in_backward", "max_grad_norm": 0.1, "stash": "factored"},
        {"when": "in_backward", "max_grad_norm": 0.1, "stash": "two_pass"},
    ],
    ids=str,
)
def test_breadth_first_gives_the_weights_of_depth_first_also_with_dropout(tmp_path: Path, tied, adapters, options):
    depth = load_model(tmp_path / "m", torch.float64, tied=tied, adapters=adapters)
    breadth = load_model(tmp_path / "m", torch.float64, tied=tied, adapters=adapters)
    reference = {"when": "after_backward", "max_grad_norm": options.get("max_grad_norm")}
    expected, expected_weights = run_steps(depth, "depth_first", **reference)
    actual, weights = run_steps(breadth, "breadth_first", **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        assert (ours.targets, ours.tokens) == (theirs.targets, theirs.tokens)
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-7, atol=1e-9, msg=name)
    moved = [
        name
        for name, tensor in load_model(tmp_path / "m", torch.float64, tied=tied, adapters=False).named_parameters()
        if name in weights and not torch.equal(weights[name], tensor)
    ]
    assert bool(moved) != adapters


def test_breadth_first_keeps_one_block_of_gradients_alive(tmp_path: Path):
    fixtures.write_model(tmp_path, num_hidden_layers=6)
    model = models.load(tmp_path, dtype=torch.float32)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    rest = sum(p.numel() for p in model.parameters()) - sum(sizes)
    largest = 0

    def watch(_: torch.Tensor) -> None:
        nonlocal largest
        alive = sum(p.grad.numel() for block in model.blocks for p in block.parameters() if p.grad is not None)
        largest = max(largest, alive)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(watch)
    run_steps(model, "breadth_first", when="in_backward")
    assert largest <= max(sizes)
    largest = 0
    run_steps(model, "depth_first", when="in_backward")
    assert largest == sum(sizes), "the watcher must see what depth-first accumulation holds"
    assert rest > 0


def test_a_step_without_targets_names_its_rows(tmp_path: Path):
    model = load_model(tmp_path, torch.float32, tied=False, adapters=False)
    optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.5})
    stepper = optim.build_stepper(model, optimizer)
    tokens_BT = torch.zeros(1, 3, dtype=torch.long)
    empty = Microbatch(tokens_BT, torch.full_like(tokens_BT, IGNORE), torch.arange(3)[None], rows=("a.jsonl:7",))
    with pytest.raises(train.TrainingError, match=r"step 5 has no target: a\.jsonl:7"):
        train.train_step(model, next_token_loss, stepper, [empty], seed=0, step=4)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(("count", "forwards"), [(1, 1), (2, 4)])
def test_two_passes_over_a_single_microbatch_share_its_forward(
    tmp_path: Path, adapters, checkpointing, count, forwards
):
    once, twice = (load_model(tmp_path / "m", torch.float32, tied=True, adapters=adapters) for _ in range(2))
    for model in (once, twice):
        model.activation_checkpointing = checkpointing
    called = 0

    def watch(*_: object) -> None:
        nonlocal called
        called += 1

    twice.model.embed_tokens.register_forward_hook(watch)
    clipped = {"when": "in_backward", "max_grad_norm": 0.1}
    _, expected = run_steps(once, "depth_first", steps=3, count=count, stash="hold", **clipped)
    _, weights = run_steps(twice, "depth_first", steps=3, count=count, stash="two_pass", **clipped)
    assert called == 3 * forwards
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
