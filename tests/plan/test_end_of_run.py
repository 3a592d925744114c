"""The line that ends a run of several processes: what is measured by whom, and the forecast made in another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from optune import config, distributed
from optune.distributed import Processes
from optune.distributed.pretending import pretend
from optune.errors import ConfigError
from optune.plan import Forecast, forecast, predict
from optune.session import memory
from optune.train import StepResult
from optune.types import MicrobatchShape
from tests.plan.real_steps import ROOT, Case, load_recipe, make_config, make_task


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_process_of_its_own_predicts_what_the_plan_of_so_many_does() -> None:
    recipe, case = load_recipe("full_finetune"), Case("deep", "activation_checkpointing=block")
    words = [f"batch_size={case.rows}", f"data.max_length={case.length}", *case.overrides.split()]
    cfg = config.load(recipe.Config, ROOT / "configs" / "tiny" / "full.yaml", words)
    layout = distributed.divide(2, shard=2, replicate=1, tensor=1)
    predict_here = partial(
        predict, case.shape, 1, False,
        outline=partial(recipe.outline, cfg),
        build=partial(recipe.build, cfg),
        loss=recipe.loss_sum,
        config=make_config("deep"),
        accumulation="depth_first",
        validates=False,
    )  # fmt: skip
    processes = Processes(torch.device("cpu"), 0, 2, layout, mesh=cast(Any, object()))
    found = predict_here(processes=processes)
    with pretend(2), distributed.start("cpu", shard=2) as pretended:
        task = replace(make_task(case), processes=pretended)
        assert found.moments == forecast(task).moments
    with pytest.raises(ConfigError, match="cannot be pickled"):
        predict_here(processes=processes, build=lambda *_: None)


@dataclass
class Rank:
    """One of two processes that are threads here."""

    rank: int
    said: list[list[int]]
    barrier: threading.Barrier

    world_size = 2
    device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree(self, flags: Sequence[int]) -> list[int]:
        self.said[self.rank] = list(flags)
        self.barrier.wait(10)
        largest = [max(both) for both in zip(*self.said, strict=True)]
        self.barrier.wait(10)
        return largest


def test_process_with_the_most_is_measured_and_the_widest_microbatch_of_all_is_predicted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "TOY_BYTES", 0)
    model, said, barrier = nn.Linear(3, 3), [[0], [0]], threading.Barrier(2)
    asked: list[tuple[MicrobatchShape, int, bool]] = []

    def predict_it(*question: Any) -> Any:
        asked.append(question)
        return Forecast({"forward": {"weights": 2**20}})

    def end(rank: int) -> str | None:
        processes = cast(Any, Rank(rank, said, barrier))
        check = memory.MemoryCheck(predict_it, model, torch.optim.SGD(model.parameters()), processes)
        check._before = (2 - rank) * 2**20  # so rank 1 has more beyond that
        shape = MicrobatchShape(2 + rank, 8, 9, packed=True)
        check.saw(StepResult(1.0, 2, 9, 16, None, 1.0, False, microbatches=3, widest=shape))
        return check.compare(saves_ahead=False)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(end, (0, 1))
    assert asked == [(MicrobatchShape(3, 8, 9, packed=True), 3, False)]
    assert second is None
    assert first is not None
    assert first.startswith("1.00 MiB (in forward), measured ")
    assert first.endswith("(on rank 1, resident, beyond 1.00 MiB before the model)")
