"""The optimizer comes back bit for bit, by name, without pickle, and keeps its own way of computing."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from optune import checkpoint
from optune.checkpoint import values
from optune.errors import CheckpointError
from tests.checkpoint import runs

OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW loop": partial(torch.optim.AdamW, lr=0.01, foreach=False, amsgrad=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW lr tensor": partial(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False, betas=(0.8, 0.9)),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01, t0=1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
}


def check_round_trip(folder: Path, make: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    model = runs.Net(dtype=dtype)
    optimizer = make(model.parameters())
    runs.train(model, optimizer, range(1, 4))
    saved = runs.save(folder, 3, model, optimizer)
    fresh = runs.Net(seed=99, dtype=dtype)
    fresh.load_state_dict(load_file(saved / "model.safetensors"))
    loaded = make(fresh.parameters())
    checkpoint.load_optimizer(loaded, fresh.named_parameters(), saved)
    runs.assert_same_bits((model, optimizer), (fresh, loaded))
    runs.train(model, optimizer, range(4, 7))
    runs.train(fresh, loaded, range(4, 7))
    runs.assert_same_bits((model, optimizer), (fresh, loaded))
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    check_round_trip(tmp_path, OPTIMIZERS[name], dtype)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_state_comes_back_bit_for_bit(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torchao_optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    loaded = check_round_trip(tmp_path, partial(getattr(torchao_optim, name), lr=0.01), torch.float32)
    kinds = {type(value).__name__ for state in loaded.state.values() for value in state.values()}
    assert any(kind.startswith("OptimState") for kind in kinds)


def test_state_stands_under_parameter_names_in_safetensors(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1)
    tensors = load_file(tmp_path / "checkpoints/step-000001/optune/optimizer.safetensors")
    assert {name for name in tensors if "proj.weight" in name} == {
        "state.first.proj.weight.step",
        "state.first.proj.weight.exp_avg",
        "state.first.proj.weight.exp_avg_sq",
    }


def test_fp32_state_of_bf16_parameters_is_not_rounded(tmp_path: Path) -> None:
    model = runs.Net(dtype=torch.bfloat16)
    optimizer = runs.adamw(model)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(parameter, 1 / 3).float()}
    saved = runs.save(tmp_path, 1, model, optimizer)
    fresh = runs.adamw(runs.Net(dtype=torch.bfloat16))
    parameters = dict(zip((name for name, _ in model.named_parameters()), fresh.param_groups[0]["params"], strict=True))
    checkpoint.load_optimizer(fresh, parameters, saved)
    assert all(state["exp_avg"].dtype == torch.float32 for state in fresh.state.values())


def test_the_way_of_computing_is_the_fresh_optimizers_own(tmp_path: Path) -> None:
    saved = runs.save(tmp_path, 1, *_trained(fused=True, foreach=None))
    _, optimizer = runs.load(saved, foreach=True)
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == (True, None)
    assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())


def _trained(**settings: Any) -> tuple[runs.Net, torch.optim.Optimizer]:
    model = runs.Net()
    optimizer = runs.adamw(model, **settings)
    runs.train(model, optimizer, range(1, 3))
    return model, optimizer


def test_settings_come_back_unless_their_change_was_allowed(tmp_path: Path) -> None:
    model, optimizer = _trained(lr=0.5, betas=(0.7, 0.8))
    optimizer.param_groups[0]["initial_lr"] = 0.6
    saved = runs.save(tmp_path, 1, model, optimizer)
    _, restored = runs.load(saved)
    assert restored.param_groups[0]["lr"] == 0.5
    assert restored.param_groups[0]["betas"] == (0.7, 0.8)
    assert restored.param_groups[0]["initial_lr"] == 0.6
    fresh = runs.Net()
    changed = runs.adamw(fresh, lr=0.25)
    checkpoint.load_optimizer(changed, fresh.named_parameters(), saved, keep=("lr", "initial_lr"))
    assert changed.param_groups[0]["lr"] == 0.25
    assert "initial_lr" not in changed.param_groups[0]
    assert changed.param_groups[0]["betas"] == (0.7, 0.8)


def test_a_rate_tensor_is_filled_in_place(tmp_path: Path) -> None:
    saved = runs.save(tmp_path, 1, *_trained(lr=torch.tensor(0.5)))
    model = runs.Net()
    rate = torch.tensor(0.1)
    optimizer = runs.adamw(model, lr=rate)
    checkpoint.load_optimizer(optimizer, model.named_parameters(), saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_groups_keep_their_own_settings(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        weight, *others = model.parameters()
        return torch.optim.SGD([{"params": others, "lr": 0.5}, {"params": [weight], "weight_decay": 0.1}], lr=0.1)

    model = runs.Net()
    saved = runs.save(tmp_path, 1, model, make(model))
    _, restored = runs.load(saved, make)
    assert [group["lr"] for group in restored.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in restored.param_groups] == [0, 0.1]
    with pytest.raises(CheckpointError, match=r"groups are others: 2 \+ 1 parameters, the run has 3 parameters"):
        runs.load(saved, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def make_with_masters(model: nn.Module) -> torch.optim.Optimizer:
    """As `optim.build_optimizer` lays it out: fp32 parameters of its own under the names of the model's."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
    return torch.optim.AdamW(list(zip(names, masters, strict=True)), lr=0.01)


def test_masters_are_found_saved_and_filled_in_place(tmp_path: Path) -> None:
    model = runs.Net(dtype=torch.bfloat16)
    optimizer = make_with_masters(model)
    masters = optimizer.param_groups[0]["params"]
    for master in masters:
        master.grad = torch.ones_like(master)
        master.data += 1e-4
    optimizer.step()
    saved = runs.save(tmp_path, 1, model, optimizer)
    tensors = load_file(saved / "optune/optimizer.safetensors")
    assert torch.equal(tensors["state.first.proj.weight.master"], masters[1].detach())
    fresh_model = runs.Net(dtype=torch.bfloat16)
    fresh = make_with_masters(fresh_model)
    own = list(fresh.param_groups[0]["params"])
    checkpoint.load_optimizer(fresh, fresh_model.named_parameters(), saved)
    for master, copy in zip(masters, own, strict=True):
        assert torch.equal(master, copy)
        assert torch.equal(optimizer.state[master]["exp_avg"], fresh.state[copy]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"unexpected: state\.scale\.master\n"):
        runs.load(saved)


def test_every_name_that_does_not_fit_is_listed_at_once_and_nothing_changes(tmp_path: Path) -> None:
    saved = runs.save(tmp_path, 1, *_trained())
    parameters = {
        "scale": nn.Parameter(torch.zeros(65)),
        "first.proj.weight": nn.Parameter(torch.zeros(64, 64)),
        "new.weight": nn.Parameter(torch.zeros(2)),
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.3)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_optimizer(optimizer, parameters, saved)
    for part in ("missing: new.weight", "unexpected: first.proj.bias", "misshapen: scale is [64], the run has [65]"):
        assert part in str(caught.value)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_another_class_of_optimizer_is_refused(tmp_path: Path) -> None:
    saved = runs.save(tmp_path, 1, *_trained())
    with pytest.raises(CheckpointError, match=r"of torch\.optim\.adamw\.AdamW, the run has torch\.optim\.sgd\.SGD"):
        runs.load(saved, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def test_state_without_a_form_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = _trained()
    optimizer.state[model.scale]["helper"] = object()
    optimizer.state[model.scale]["sparse"] = torch.eye(2).to_sparse()
    with pytest.raises(CheckpointError) as caught:
        runs.save(tmp_path, 1, model, optimizer)
    assert "state.scale.helper is a builtins.object" in str(caught.value)
    assert "state.scale.sparse is a tensor of layout" in str(caught.value)
    assert checkpoint.list_checkpoints(tmp_path) == []


def test_a_parameter_without_a_name_is_refused(tmp_path: Path) -> None:
    model = runs.Net()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[7\] in group 0 has no name"):
        runs.save(tmp_path, 1, model, optimizer)


def test_views_and_shared_storage_are_written_whole(tmp_path: Path) -> None:
    model, optimizer = _trained()
    base = torch.arange(128.0)
    optimizer.state[model.scale] = {
        "even": base[::2],
        "low": base[:64],
        "high": base[64:],
        "turned": base.view(2, 64).T,
    }
    saved = runs.save(tmp_path, 1, model, optimizer)
    restored, loaded = runs.load(saved)
    state = loaded.state[restored.scale]
    for name, tensor in optimizer.state[model.scale].items():
        assert torch.equal(state[name], tensor), name
    state["low"].zero_()
    assert state["high"].sum() > 0


def test_neither_saving_nor_loading_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for module, name in [(pickle, "dumps"), (pickle, "loads"), (pickle, "Pickler"), (pickle, "Unpickler")]:
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    runs.load(runs.save(tmp_path, 1, *_trained()))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        "text",
        0.1,
        float("inf"),
        float("-inf"),
        [1, (2.5, None)],
        {"a": {"b": (1,)}},
        torch.bfloat16,
        torch.Size([2, 3]),
    ],
    ids=str,
)
def test_values_that_are_not_tensors_survive_json(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(values.encode(value, "name", tensors), allow_nan=False)
    back = values.decode(json.loads(text), lambda *_: torch.zeros(()))
    assert back == value
    assert type(back) is type(value)
    assert not tensors


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,)], ids=str)
def test_tensors_of_any_type_come_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, optimizer = _trained()
    optimizer.state[model.scale]["odd"] = torch.ones(shape).to(dtype)
    restored, loaded = runs.load(runs.save(tmp_path, 1, model, optimizer))
    back = loaded.state[restored.scale]["odd"]
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back.to(torch.complex64), torch.ones(shape).to(torch.complex64))


def test_a_checkpoint_cannot_choose_what_is_imported() -> None:
    stranger = {"wrapper": "os:system", "parts": {}, "context": None, "size": [], "stride": []}
    with pytest.raises(CheckpointError, match="os:system is not read"):
        values.decode(stranger, lambda *_: torch.zeros(()))
    not_a_tensor = stranger | {"wrapper": "torchao.utils:torch_version_at_least"}
    with pytest.raises(CheckpointError, match=r"is not a kind of tensor|needs torchao"):
        values.decode(not_a_tensor, lambda *_: torch.zeros(()))
    with pytest.raises(CheckpointError, match="unknown kind: pickle"):
        values.decode({"pickle": "x"}, lambda *_: torch.zeros(()))
