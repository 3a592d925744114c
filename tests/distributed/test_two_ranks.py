"""What two ranks do together, started once for all tests: offload to host memory, blocks that are split and compiled,
dropout that differs by rank.

Offload must change no bit on a CPU, in any mode; what moves on GPUs is for `scripts/check_gpu.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from optune import distributed, models, optim, shards, train
from optune.distributed import Layout, Processes
from optune.distributed.processes import make_mesh
from optune.errors import ConfigError
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.distributed_ranks import join, run_ranks
from tests.recipes.running import Finished, assert_equal_runs, run, write_inputs
from tune_cli.main import main

CLIPPED: dict[str, Any] = {"when": "in_backward", "max_grad_norm": 0.05}
MODES: dict[str, dict[str, Any]] = {
    "after": CLIPPED | {"when": "after_backward"},
    "at once": CLIPPED | {"max_grad_norm": None},
    "hold": CLIPPED | {"stash": "hold"},
    "cpu": CLIPPED | {"stash": "cpu"},
    "two_pass": CLIPPED | {"stash": "two_pass"},
    "auto": CLIPPED,
    "alias": CLIPPED | {"stash": "alias"},
    "breadth": CLIPPED | {"stash": "hold"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicate": 2}, "parts": {"tensor": 2}, "shards": {},
}  # fmt: skip


def make_microbatch(seed: int) -> Microbatch:
    tokens_BT = torch.randint(6, 60, (2, 12), generator=torch.Generator().manual_seed(seed))
    labels_BT = tokens_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE
    return Microbatch(tokens_BT, labels_BT, torch.arange(12).expand(2, 12), num_tokens=24)


def train_steps(folder: Path, processes: Processes, mode: str) -> dict[str, Any]:
    """Three steps of two microbatches: what was measured, and this rank's parts of weights and state."""
    settings = dict(MODES[mode])
    is_low = mode == "alias"
    model = models.outline(models.check(folder)).to(torch.bfloat16 if is_low else torch.float32)
    distributed.spread(model, processes)
    models.fill(model, folder, device=processes.parameter_device)
    model.activation_checkpointing = "block" if mode == "hold" else "none"
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-2},
        master_weights="fp32" if is_low else "none",
    )  # fmt: skip
    stepper = optim.build_stepper(model, optimizer, **settings)
    found: dict[str, Any] = {}
    for step in range(3):
        seeds = [100 * step + 10 * part + processes.data_rank for part in range(2)]
        found[f"step {step}"] = train.train_step(
            model, next_token_loss, stepper, [make_microbatch(seed) for seed in seeds], seed=0, step=step,
            rank=processes.data_rank, sum_over_ranks=processes.sum,
            accumulation="breadth_first" if mode == "breadth" else "depth_first",
        )  # fmt: skip
    for name, held in optim.named_optimizer_parameters(optimizer).items():
        found[f"weight {name}"] = shards.local_values(held)
        found |= {f"{key} of {name}": shards.local_values(value) for key, value in optimizer.state[held].items()}
    return found


def list_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    assert first.keys() == second.keys()
    return [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name])
    ]


def compare_compiled(folder: Path, processes: Processes) -> float:
    """How far compiled blocks are from plain ones, both split: of losses and gradients, relative. Torch may keep one
    piece of code a block here: where blocks shared a store, the second one would find it full."""
    ends: list[dict[str, torch.Tensor]] = []
    for compiles in (False, True):
        model = models.outline(models.check(folder))
        distributed.spread(model, processes)
        models.fill(model, folder, device="cpu")
        if compiles:
            model.compile_blocks(backend="aot_eager")
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            microbatch = make_microbatch(0)
            hidden_BTD = model.hidden(microbatch.tokens_BT, microbatch.positions_BT)
            loss = next_token_loss(model, hidden_BTD, microbatch)
            loss.backward()
        gradients = {
            name: shards.local_values(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        ends.append({"loss": loss.detach(), **gradients})
    plain, compiled = ends
    return max(float((compiled[name] - plain[name]).norm() / plain[name].norm()) for name in plain)


def work(folder: Path, commands: list[list[str]]) -> dict[str, Any]:
    rank = join()
    found: dict[str, Any] = {"differences": {}}
    with distributed.start("cpu", tensor=2) as processes:
        found["compiled"] = compare_compiled(folder, processes)
    cases = [("shards", mode) for mode in MODES] + [("replicas", "hold"), ("parts", "hold")]
    for layout, mode in cases:
        ends = []
        for offload in (False, True):
            with distributed.start("cpu", offload=offload, **LAYOUTS[layout]) as processes:
                ends.append(train_steps(folder, processes, mode))
        found["differences"][f"{layout}, {mode}"] = list_differences(*ends)
    for words in commands:
        assert main(words) == 0, (rank, words)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M0, rows of which all are the same, and a folder for each run of `RUNS`."""
    folder = tmp_path_factory.mktemp("two")
    write_inputs(folder)
    fixtures.write_rows(folder / "same.jsonl", [fixtures.numbered_rows(1)[0]] * 4)
    return folder


FULL = ["full_finetune", "batch_size=1", "optimizer_step=in_backward", "epochs=1"]
SAVES = ["checkpoint={save_every_steps: 2, keep_last: null}", "parallel.offload=true"]
SAME = ["lora_finetune", "batch_size=1", "data.train={place}/same.jsonl", "epochs=1", "schedule.warmup_steps=0"]
RUNS = {
    "plain": FULL,
    "offloaded": [*FULL, *SAVES],
    "later": [*FULL, *SAVES, "resume={place}/offloaded/checkpoints/step-000002"],
    "dropout": [*SAME, "lora.dropout=0.5"],
    "no-dropout": SAME,
}


def command(place: Path, name: str, *more: str) -> list[str]:
    recipe, *words = (word.replace("{place}", str(place)) for word in RUNS[name])
    return ["run", recipe, "--config", f"{place}/config.yaml", f"output_dir={place / name}", *words, *more]


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[dict[str, Any]]:
    return run_ranks(work, 2, place / "m0", [command(place, name) for name in RUNS])


@pytest.mark.slow
def test_offload_changes_no_bit_in_any_mode_and_goes_on_after_a_save(place: Path, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["differences"]) == len(MODES) + 2
        assert not any(found["differences"].values()), found["differences"]
    plain, offloaded, later = (Finished(place / name) for name in ("plain", "offloaded", "later"))
    assert_equal_runs(offloaded, plain)
    assert list_differences(later.weights, plain.weights) == []
    assert list_differences(later.optimizer_state, plain.optimizer_state) == []
    lines = (offloaded.folder / "log.txt").read_text().splitlines()
    said = " ".join(line[20:].strip() for line in lines)
    assert "2: 2 shards; weights, gradients and optimizer state in host memory, where a CPU has them anyway" in said


@pytest.mark.slow
def test_blocks_that_are_split_compile_each_with_code_of_its_own(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["compiled"] < 1e-6


@pytest.mark.slow
def test_dropout_differs_by_rank(place: Path, ranks: list[dict[str, Any]]) -> None:
    """Both ranks see the same row. If they dropped the same, two of them would be one: as they are without dropout."""
    assert ranks
    for name, is_same in (("no-dropout", True), ("dropout", False)):
        alone = run(
            "lora_finetune", place / "config.yaml", place / f"alone-{name}", *command(place, name, "max_steps=2")[5:]
        )
        two, one = Finished(place / name).losses, alone.losses
        assert two[0] == pytest.approx(one[0], rel=1e-6)  # adapters start with no effect
        assert (abs(two[1] - one[1]) <= 1e-6 * one[1]) == is_same, (name, two, one)


def test_one_process_offloads_too(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path / "m0")
    with distributed.start("cpu") as alone:
        expected = train_steps(folder, alone, "hold")
    with distributed.start("cpu", offload=True) as processes:
        assert processes.sum([2.0]) == [2.0] and processes.broadcast("x") == "x"
        for name, value in train_steps(folder, processes, "hold").items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)
            else:
                assert value.loss == pytest.approx(expected[name].loss, rel=1e-6)
    assert not torch.distributed.is_initialized()


def test_on_a_mesh_of_cuda_devices_all_that_is_offloaded_stays_in_host_memory(tmp_path: Path) -> None:
    """torch's fake process group knows such a mesh where no such device is: parts, gradients, masters, optimizer state,
    and what is read back are looked at, where `DTensor.from_local` would ask for the device."""
    with distributed.pretend(2):
        mesh = make_mesh(torch.device("cuda"), Layout(shard=2, offload=True))["shard"]
        values = torch.randn(4, 3, dtype=torch.bfloat16)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(shards.make_dtensor(values.clone(), mesh, [Shard(0)], (8, 3)))
        assert shards.is_offloaded(model.weight) and shards.input_device(model.weight).type == "cuda"
        adamw: dict[str, Any] = {"factory": torch.optim.AdamW, "settings": {"lr": 0.1}, "master_weights": "fp32"}
        optim.try_optimizer(model, **adamw, device="cpu", mesh=mesh)
        optimizer = optim.build_optimizer(model.named_parameters(), **adamw)
        stepper = optim.build_stepper(model, optimizer, when="in_backward", max_grad_norm=1.0, stash="cpu")
        assert "gradients come to host memory anyway" in stepper.describe()
        model.weight.grad = torch.ones_like(model.weight)
        stepper.finish()
        (held,) = optimizer.param_groups[0]["params"]
        shards.write_file(tmp_path / "state", {"exp_avg": optimizer.state[held]["exp_avg"]}, rank=0)
        stored = shards.read_header(tmp_path / "state")["exp_avg"]
        read = shards.read_like(stored, held)
        assert torch.equal(shards.local_values(read), shards.local_values(optimizer.state[held]["exp_avg"]))
        for tensor in (model.weight, held, read, *optimizer.state[held].values()):
            assert shards.local_values(tensor).device.type == "cpu"
        assert not torch.equal(shards.local_values(model.weight), values)


def test_offload_is_refused_where_weights_stay_whole() -> None:
    with pytest.raises(ConfigError, match=r"parallel.offload: is true, but optimizer_step=immediate updates"):
        distributed.divide(2, offload=True, keep_whole=optim.why_whole("immediate"))
