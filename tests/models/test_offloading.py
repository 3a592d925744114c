"""Offloaded activations, on a stand-in device whose copies happen as late as they may: what is not waited for is NaN.

`scripts/check_gpu.py` runs the same on CUDA, with its streams.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optune import lora, models
from optune.errors import ConfigError
from optune.models.offloading import Offloading
from tests import fixtures
from tests.late_copies import LateCopies

TOKENS_BT = torch.tensor([[0, 7, 8, 30, 31, 44], [0, 9, 60, 61, 62, 5]])


def load(folder: Path, copies: LateCopies | None, *, kind: Any = "none", adapters: bool = False) -> Any:
    if not (folder / "config.json").exists():
        fixtures.write_model(folder, num_hidden_layers=5)
    model = models.load(folder, dtype=torch.bfloat16 if adapters else torch.float32)
    if adapters:
        torch.manual_seed(0)
        lora.apply(model, rank=4, alpha=8, dropout=0.3, targets="all-linear", quantize_base="nf4")
    model.activation_checkpointing = kind
    if copies is not None:
        model.offloading = Offloading(copies, smallest_bytes=1)
    return model


def backward(model: Any, *, times: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model.train()(TOKENS_BT).square().mean()
    for index in range(times):
        loss.backward(retain_graph=index + 1 < times)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("kind", "times"), [("none", 1), ("none", 2), ("selective", 1), ("block", 2)])
def test_gradients_are_those_of_activations_that_stay_bit_for_bit(
    tmp_path: Path, kind: str, adapters: bool, times: int
) -> None:
    """Also where a graph is gone through twice, which torch's selective checkpointing does not allow."""
    copies = LateCopies()
    plain, offloaded = (load(tmp_path, each, kind=kind, adapters=adapters) for each in (None, copies))
    for _ in range(2):
        wanted, found = backward(plain, times=times), backward(offloaded, times=times)
        assert found.keys() == wanted.keys() != set()
        assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert {"out", "in"} <= {kind for kind, _ in copies.log}


def test_a_block_is_fetched_while_the_one_above_is_at_work(tmp_path: Path) -> None:
    """Four blocks leave, the last one stays; no wait for a block's tensors before the next block's are under way."""
    copies = LateCopies()
    model = load(tmp_path, copies)
    loss = model(TOKENS_BT).square().mean()
    count = sum(kind == "out" for kind, _ in copies.log)
    assert count % 4 == 0, "equal blocks save alike"
    first = len(copies.log)
    loss.backward()
    log = copies.log[first:]
    fetched = waits = 0
    for kind, _ in log:
        if kind == "in":
            fetched += 1
        elif kind == "wait":
            # With the tensors of k whole blocks waited for, those of k + 2 are on their way.
            assert fetched >= min(waits // most_uses(copies, log) + 2, 4) * count // 4 or fetched == count
            waits += 1
    assert fetched == count, "each tensor comes back once"
    # Two blocks' worth at a time, not the model's.
    assert copies.most_on_device <= 2.1 / 4 * sum(copies.hosts[host].nbytes for kind, host in log if kind == "in")


def most_uses(copies: LateCopies, log: list[tuple[str, int]]) -> int:
    """Waits of one block."""
    return sum(kind == "wait" for kind, _ in log) // 4


def test_the_device_memory_of_a_block_is_free_when_the_next_one_has_run(tmp_path: Path) -> None:
    copies = LateCopies()
    model = load(tmp_path, copies)
    seen = []
    kept = model.offloading._copies.to_host

    def watch(tensor: Tensor) -> tuple[Tensor, int]:
        seen.append(weakref.ref(tensor.untyped_storage()))
        return kept(tensor)

    copies.to_host = watch  # type: ignore[method-assign]
    logits_BTV = model(TOKENS_BT)
    assert seen and not any(storage() is not None for storage in seen)
    logits_BTV.sum().backward()


def test_host_memory_is_used_again_in_every_step(tmp_path: Path) -> None:
    copies = LateCopies()
    model = load(tmp_path, copies)
    backward(model)
    buffers = len(copies.hosts)
    for _ in range(3):
        backward(model)
    assert len(copies.hosts) == buffers == len(copies.free)


def test_a_forward_without_a_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    copies = LateCopies()
    model = load(tmp_path, copies)
    kept = model(TOKENS_BT)
    model(TOKENS_BT)
    del kept
    backward(model)
    assert len(copies.free) == len(copies.hosts)
    with torch.no_grad():
        before = len(copies.log)
        model(TOKENS_BT)
    assert len(copies.log) == before


def test_weights_and_small_tensors_stay(tmp_path: Path) -> None:
    model = load(tmp_path, None)
    copies = LateCopies()
    model.offloading = Offloading(copies, smallest_bytes=12 * 64 * 4)
    backward(model)
    shapes = {tuple(host.shape) for host in copies.hosts.values()}
    assert shapes and all(shape[-1] == 64 and len(shape) > 1 and shape[0] in (2, 12) for shape in shapes)


def test_what_cannot_be_offloaded_is_refused_with_the_reason() -> None:
    for device, accumulation, reason in (
        ("cpu", "depth_first", "is there already"),
        ("mps", "depth_first", "copies beside the computation"),
        ("cuda", "breadth_first", "no block keeps anything"),
    ):
        with pytest.raises(ConfigError, match=f"activation_offloading: .*{reason}"):
            models.check_offloading(torch.device(device), accumulation)
    models.check_offloading(torch.device("cuda"), "depth_first")
