"""The table of bytes a parameter in docs/optimizer_step.md is what the tracker counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optune import optim
from tests.optim.memory_tracker import GradientTracker, gradient_bytes, storage_key

WIDTH, BLOCKS = 256, 8
NORM_BYTES = 2**20
"""Of the buffer in which norms are taken, whatever the size of the model."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizer_step.md"
CHOICES: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16, as it is": {},
    "bf16, fp32 masters": {"master_weights": "fp32"},
    "bf16, stochastic rounding": {"update_rounding": "stochastic"},
}


def read_table() -> list[list[str]]:
    """Rows of the table: weights, optimizer, and bytes of weights and masters, gradient, state, all."""
    lines = DOCUMENT.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| weights | optimizer |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def build(weights: str, name: str, when: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Stack().to(torch.float32 if weights == "fp32" else torch.bfloat16)
    package: Any = torch.optim if name == "AdamW" else pytest.importorskip("torchao.optim")
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=getattr(package, name), settings={"lr": 1e-3}, **CHOICES[weights]
    )
    clipping = 1.0 if when == "after_backward" else None
    return model, optimizer, optim.build_stepper(model, optimizer, when=when, max_grad_norm=clipping)


def step(model: nn.Module, stepper: Any) -> None:
    with stepper.microbatch(True):
        model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    stepper.finish()


def stored_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages; of tensors made of others, theirs."""
    inner: list[Tensor] = []
    for tensor in tensors:
        is_wrapper = hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (Tensor, nn.Parameter)
        inner += [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]] if is_wrapper else [tensor]
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in inner}.values())


@pytest.mark.parametrize("row", read_table(), ids=lambda row: " ".join(row[:2]))
def test_the_documented_bytes_are_counted(row: list[str]) -> None:
    weights, name, *documented = row
    expected = [float(number) for number in documented]
    model, optimizer, stepper = build(weights, name, "after_backward")
    count = sum(parameter.numel() for parameter in model.parameters())
    with torch.compiler.set_stance("force_eager"):
        step(model, stepper)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = stored_bytes([*model.parameters(), *held])
        state = stored_bytes([v for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor)])
        with GradientTracker(model) as tracker, stepper.microbatch(True):
            model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
            gradients = tracker.live_bytes()
    counted = [kept / count, gradients / count, state / count, (kept + gradients + state) / count]
    # Beside codes and scales there are tables of 1 KiB, and counters.
    assert counted == pytest.approx(expected, abs=0.05)
    assert expected[3] == pytest.approx(sum(expected[:3]))


def test_every_choice_stands_in_the_table() -> None:
    rows = read_table()
    assert {row[0] for row in rows} == set(CHOICES)
    assert {row[1] for row in rows} == {"AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"}


@pytest.mark.parametrize("when", ["after_backward", "in_backward"])
@pytest.mark.parametrize(("weights", "each"), [("bf16, fp32 masters", 4), ("bf16, stochastic rounding", 8)])
def test_fp32_copies_of_one_block_live_at_a_time(when: str, weights: str, each: int) -> None:
    model, _, stepper = build(weights, "AdamW", when)
    step(model, stepper)
    with GradientTracker(model) as tracker:
        step(model, stepper)
    block = WIDTH * WIDTH
    gradients = gradient_bytes(model.parameters()) if when == "after_backward" else 2 * block
    assert tracker.live_bytes() == 0
    assert each * block <= tracker.peak_bytes <= gradients + NORM_BYTES + 1.1 * each * block
    if when == "after_backward":
        assert gradients + NORM_BYTES + 1.1 * each * block < gradients + each * BLOCKS * block


class Lopsided(Stack):
    """With a table as large as all blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH * BLOCKS, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.table.weight.sum(0)


@pytest.mark.parametrize(
    "options", [{"when": "after_backward"}, {"when": "in_backward", "max_grad_norm": 1.0, "stash": "hold"}], ids=str
)
def test_fp32_gradients_of_the_largest_part_are_made_when_all_others_are_gone(options: dict[str, Any]) -> None:
    model = Lopsided().to(torch.bfloat16)
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-3}, master_weights="fp32"
    )
    stepper = optim.build_stepper(model, optimizer, **options)
    step(model, stepper)  # makes the optimizer's state
    with stepper.microbatch(True):
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
    with GradientTracker(model, lambda: [p.grad for p in model.parameters() if p.grad is not None]) as tracker:
        stepper.finish()
    gradients = gradient_bytes(model.parameters())
    # With the largest first it would be 2: all in bf16, and in fp32 the largest, a half of them of twice the size.
    assert gradients < tracker.peak_bytes < 1.6 * gradients
