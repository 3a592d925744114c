"""The policy `cpu`: what moves, when it comes back, and that moving changes no bit. The device is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optune import optim
from optune.optim.buckets import Entry
from optune.optim.stash import host
from tests.optim.small import SmallModel, assert_same, make_rows, run, snapshot


class SimulatedDevice:
    """Reports the memory that the test says, and writes down what is done."""

    def __init__(self, memory: Sequence[int]) -> None:
        self._memory = list(memory)
        self._on_host: dict[int, Tensor] = {}
        self.log: list[str] = []

    def memory_in_use(self) -> int:
        return self._memory.pop(0) if len(self._memory) > 1 else self._memory[0]

    def to_host(self, entry: Entry) -> None:
        assert entry.weight.grad is not None
        self._on_host[entry.index] = entry.weight.grad.clone()
        entry.weight.grad = None
        self._note(f"out {entry.bucket.name}")

    def to_device(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.weight.grad = self._on_host.pop(entry.index)
        self._note(f"back {entries[0].bucket.name}")

    def wait(self) -> None:
        self._note("wait")

    def _note(self, line: str) -> None:
        if not self.log or self.log[-1] != line or line == "wait":
            self.log.append(line)


def build(model: SmallModel, device: SimulatedDevice | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    if device is not None:
        monkeypatch.setattr("optune.optim.stash.choose.make_mover", lambda _: device)
    optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 0.01})
    when = "in_backward" if device is not None else "after_backward"
    return optimizer, optim.build_stepper(model, optimizer, when=when, stash="cpu", max_grad_norm=0.01)


@pytest.mark.parametrize(
    ("memory", "moved"),
    [
        ([100, 90, 80, 70, 60, 50], []),
        ([100, 101, 102, 103, 104, 105], ["head", "norm", "block 1", "block 0", "embed"]),
        ([100, 90, 100, 101, 99, 130], ["block 1", "embed"]),
    ],
)
def test_only_what_is_ready_above_the_watermark_moves(
    memory: list[int], moved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, rows = SimulatedDevice(memory), make_rows(1, [2])
    model, reference = SmallModel(blocks=2), SmallModel(blocks=2)
    optimizer, stepper = build(model, device, monkeypatch)
    _, stats = run(model, stepper, rows)
    assert [line.removeprefix("out ") for line in device.log if line.startswith("out")] == moved
    assert not device._on_host
    standard, reference_stepper = build(reference, None, monkeypatch)
    assert run(reference, reference_stepper, rows)[1] == stats
    assert_same(snapshot(reference, standard), snapshot(model, optimizer))


def test_the_next_part_is_fetched_before_the_part_at_hand_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = SimulatedDevice(range(100)), SmallModel(blocks=2)
    _, stepper = build(model, device, monkeypatch)
    run(model, stepper, make_rows(1, [1]))
    # A bucket has no gradient, so nothing of it moved; each wait stands before a step, the smallest first.
    assert device.log[device.log.index("out embed") + 1 :] == [
        "wait", "back norm",
        "wait", "back embed",
        "wait", "back head",
        "wait", "back block 0",
        "wait", "back block 1",
        "wait",
    ]  # fmt: skip


def test_a_skipped_step_leaves_nothing_on_the_host_that_a_later_step_could_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, model = SimulatedDevice(range(1000)), SmallModel(blocks=2)
    with torch.no_grad():
        model.embed.weight[40] = float("nan")
    _, stepper = build(model, device, monkeypatch)
    poisoned, good = torch.tensor([[40, 1, 2, 3]]), torch.tensor([[5, 1, 2, 3]])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _, stats = run(model, stepper, [[poisoned]])
    assert stats[0].skipped
    _, stats = run(model, stepper, [[good]])
    assert not stats[0].skipped
    assert all(bool(p[:40].isfinite().all()) for p in model.parameters())
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_on_a_host_device_the_summary_says_that_moving_gains_nothing() -> None:
    assert isinstance(host.make_mover(torch.device("cpu")), host.PlainMover)
    model = SmallModel()
    optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.01})
    stepper = optim.build_stepper(model, optimizer, when="in_backward", stash="cpu", max_grad_norm=1.0)
    assert "hold does the same" in stepper.describe()
