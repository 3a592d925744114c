"""Two ranks, started once: a base in NF4 and selective checkpointing over shards, against one process with all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optune import distributed, lora, models, optim, shards, train
from optune.distributed import Processes
from optune.loss import next_token_loss
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.distributed_ranks import join, run_ranks

CASES: dict[str, dict[str, Any]] = {
    "nf4, after": {"quantize": "nf4", "kind": "none", "when": "after_backward", "max_grad_norm": 0.05},
    "nf4, selective, in backward": {
        "quantize": "nf4",
        "kind": "selective",
        "when": "in_backward",
        "max_grad_norm": 0.05,
    },
    "selective, in backward": {"quantize": None, "kind": "selective", "when": "in_backward", "max_grad_norm": 0.05},
}


def make_microbatch(step: int, rank: int, size: int) -> Microbatch:
    tokens_BT = torch.randint(6, 60, (4, 12), generator=torch.Generator().manual_seed(step))
    labels_BT = tokens_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE
    mine = slice(rank * 4 // size, (rank + 1) * 4 // size)
    return Microbatch(tokens_BT[mine], labels_BT[mine], torch.arange(12).expand(4, 12)[mine], num_tokens=48 // size)


def train_steps(folder: Path, processes: Processes, case: str) -> dict[str, Any]:
    settings = dict(CASES[case])
    quantize, kind = settings.pop("quantize"), settings.pop("kind")
    model = models.outline(models.check(folder))
    model.activation_checkpointing = kind
    if quantize:
        lora.apply(model, rank=4, alpha=8, targets=["q_proj", "down_proj"], quantize_base=quantize)
    distributed.spread(model, processes)
    models.fill(model, folder, device="cpu")
    torch.manual_seed(0)
    lora.start(model)
    optimizer = optim.build_optimizer(model.named_parameters(), factory=torch.optim.SGD, settings={"lr": 0.5})
    stepper = optim.build_stepper(model, optimizer, **settings)
    found: dict[str, Any] = {"losses": []}
    for step in range(3):
        microbatch = make_microbatch(step, processes.data_rank, processes.data_size)
        result = train.train_step(
            model, next_token_loss, stepper, [microbatch], seed=0, step=step, rank=processes.data_rank,
            sum_over_ranks=processes.sum,
        )  # fmt: skip
        found["losses"].append(result.loss)
    named = dict(model.named_parameters())
    found["weights"] = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in named.items()}
    found["codes"] = sum(shards.local_values(p).nbytes for name, p in named.items() if name.endswith(".codes"))
    return found


def work(folder: Path) -> dict[str, Any]:
    join()
    with distributed.start("cpu") as processes:
        return {case: train_steps(folder, processes, case) for case in CASES}


@pytest.mark.slow
def test_shards_of_a_quantized_base_train_as_one_process_does(tmp_path: Path) -> None:
    folder = fixtures.write_model(tmp_path)
    first, second = run_ranks(work, 2, folder)
    with distributed.start("cpu") as alone:
        for case in CASES:
            wanted = train_steps(folder, alone, case)
            for found in (first[case], second[case]):
                assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5), case
                assert found["weights"].keys() == wanted["weights"].keys()
                for name, tensor in wanted["weights"].items():
                    if tensor.is_floating_point():
                        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=1e-6)
                    else:
                        assert torch.equal(found["weights"][name], tensor), name
            assert first[case]["codes"] + second[case]["codes"] == wanted["codes"]
            assert wanted["codes"] == 0 or 0.4 < first[case]["codes"] / wanted["codes"] < 0.6
