"""The column "processes" of the equality table: a run over several processes is the run of one.

One launch of several processes runs many cells through the command line. Each cell is compared with one process that
feeds the same rows a step; and, bitwise, with the cell of the same layout that steps after backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fixtures
from tests.distributed_ranks import join, run_ranks
from tests.recipes.running import RECIPES, Finished, run, write_inputs
from tune_cli.main import main

pytestmark = pytest.mark.slow

IN_BACKWARD = ["optimizer_step=in_backward"]
SHARED = {
    "clipped": ["max_grad_norm=0.5", "gradient_accumulation_steps=2"],
    "unclipped": ["max_grad_norm=null", "gradient_accumulation_steps=2"],
    "immediate": ["max_grad_norm=null", "optimizer_step=immediate"],
    "exact": ["max_grad_norm=null", "optimizer_step=immediate", "immediate_variant=exact"],
    "masters": ["model.dtype=bf16", "model.master_weights=fp32", "gradient_accumulation_steps=2"],
}
"""What a cell has in common with the run of one process that it is compared with."""
STEPPERS = {
    "after": ("clipped", []),
    "after breadth": ("clipped", ["accumulation=breadth_first"]),
    "at once": ("unclipped", IN_BACKWARD),
    "at once after": ("unclipped", []),
    "hold": ("clipped", [*IN_BACKWARD, "gradient_stash=hold", "activation_checkpointing=block"]),
    "cpu": ("clipped", [*IN_BACKWARD, "gradient_stash=cpu"]),
    "two_pass": ("clipped", [*IN_BACKWARD, "gradient_stash=two_pass"]),
    "auto": ("clipped", IN_BACKWARD),
    "hold breadth": ("clipped", [*IN_BACKWARD, "gradient_stash=hold", "accumulation=breadth_first"]),
    "immediate": ("immediate", []),
    "exact": ("exact", []),
    "masters": ("masters", []),
    "alias": ("masters", [*IN_BACKWARD, "gradient_stash=alias"]),
}
BITWISE = {
    "at once": "at once after", "hold": "after", "cpu": "after", "two_pass": "after", "auto": "after",
    "hold breadth": "after breadth", "alias": "masters",
}  # fmt: skip
ROUGH = {
    "masters": 2e-2,  # bf16 gradients are rounded for each microbatch, and rank, before they are added up
    "exact": 1e-5,  # each gradient sees the rounding of all updates above it
}
LAYOUTS = {"shard": [], "replicate": ["parallel.replicate=2"], "tensor": ["parallel.tensor=2"]}


@dataclass(frozen=True)
class Cell:
    recipe: str
    stepper: str
    layout: str = "shard"

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.stepper} {self.layout}".replace(" ", "-")


TWO = [
    *(Cell("full_finetune", stepper) for stepper in STEPPERS),
    *(Cell(recipe, stepper) for recipe in RECIPES[1:] for stepper in ("after", "hold", "immediate")),
    *(Cell(RECIPES[0], stepper, "replicate") for stepper in ("after", "hold")),
    *(Cell(recipe, "hold", "tensor") for recipe in RECIPES),
]
FOUR = {
    "replicate x shard": ["parallel.replicate=2"],
    "shard x tensor": ["parallel.tensor=2"],
    "replicate x tensor": ["parallel.replicate=2", "parallel.tensor=2"],
}


def overrides(cell: Cell, batch_size: int, layout: list[str]) -> list[str]:
    shared, own = STEPPERS[cell.stepper]
    return [*SHARED[shared], *own, f"batch_size={batch_size}", *layout]


def run_commands(commands: list[list[str]]) -> None:
    """One after the other in this process; the group is joined once for all of them."""
    join()
    for words in commands:
        assert main(words) == 0, words


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGD with momentum: Adam divides the first gradients by their own size, and so shows the rounding of those that
    are nearly zero; with 13 rows the last step of the epoch is smaller."""
    path = write_inputs(tmp_path_factory.mktemp("inputs"), rows=13)
    text = path.read_text().replace("torch.optim.AdamW, lr: 1.0e-2, weight_decay: 0.1", "torch.optim.SGD, lr: 0.2")
    validation = fixtures.write_rows(path.parent / "validation.jsonl", fixtures.numbered_rows(5))
    text = text.replace("max_length: 64", f"max_length: 64, validation: {validation}")
    path.write_text(text.replace("epochs: 2", "epochs: 1") + "log_every_steps: 1\nvalidation_every_steps: 2\n")
    return path


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[tuple[str, str], Finished] = {}

    def make(cell: Cell) -> Finished:
        key = (cell.recipe, STEPPERS[cell.stepper][0])
        if key not in done:
            done[key] = run(
                cell.recipe, config, tmp_path_factory.mktemp("alone") / "run", "batch_size=4", *SHARED[key[1]]
            )
        return done[key]

    return make


def differ(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor; 0 for an optimizer without state."""
    assert ours.keys() == theirs.keys()
    return max(
        (
            (tensor.double() - theirs[name].double()).abs().max().item()
            / (theirs[name].double().abs().max().item() or 1)
            for name, tensor in ours.items()
        ),
        default=0.0,
    )


def assert_same_run(several: Finished, one: Finished, name: str, weights: float = 1e-6) -> None:
    assert differ(several.weights, one.weights) <= weights, name
    assert several.validation_losses == pytest.approx(one.validation_losses, rel=max(1e-6, weights)), name
    assert one.validation_losses, name
    assert len(several.metrics) == len(one.metrics), name
    for ours, theirs in zip(several.metrics, one.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=max(1e-6, weights)), name
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=max(2e-6, weights)), name
        assert [ours[key] for key in ("step", "epoch", "lr", "targets", "tokens")] == [
            theirs[key] for key in ("step", "epoch", "lr", "targets", "tokens")
        ], name


GOING_ON = ["full_finetune", *SHARED["clipped"], *STEPPERS["hold"][1], "epochs=2", "max_steps=2"]
ROWS = {"one-row": 1, "three-rows": 3, "five-rows": 5}


def write_ragged(folder: Path) -> dict[str, Path]:
    """Answers of 1, 4, 7, … words."""
    for name, count in ROWS.items():
        rows = fixtures.numbered_rows(count)
        for index, row in enumerate(rows):
            row["messages"][-1]["content"] = " ".join(["yes", *["w1", "w2", "w3"] * index])
        fixtures.write_rows(folder / f"{name}.jsonl", rows)
    return {name: folder / f"{name}.jsonl" for name in ROWS}


def command(recipe: str, config: Path, folder: Path, *words: str) -> list[str]:
    return ["run", recipe, "--config", str(config), f"output_dir={folder}", *words]


def ragged(path: Path, data: dict[str, Path]) -> list[str]:
    validation = [f"data.validation={data['one-row']}", "validation_every_steps=1"]
    steps = ["gradient_accumulation_steps=2", "max_grad_norm=0.5", "schedule.warmup_steps=0"]
    return [f"data.train={path}", *validation, *steps]


@pytest.fixture(scope="module")
def two(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that two processes are asked for here, in one launch: a folder of run folders."""
    folder = tmp_path_factory.mktemp("two")
    commands = []
    for cell in TWO:
        words = overrides(cell, 4 if cell.layout == "tensor" else 2, LAYOUTS[cell.layout])
        commands.append(command(cell.recipe, config, folder / cell.name, *words))
    recipe, *words = GOING_ON
    run(recipe, config, folder / "going-on", *words, "batch_size=4")
    resume = ["resume", str(folder / "going-on"), "batch_size=2"]
    commands.append([*resume, "max_steps=3", "parallel.replicate=2"])
    commands.append([*resume, "max_steps=null", "parallel.replicate=1"])
    data = write_ragged(folder)
    for name, path in data.items():
        commands.append(command("full_finetune", config, folder / name, *ragged(path, data), "batch_size=1"))
    run_ranks(run_commands, 2, commands, timeout_s=1200)
    return folder


def test_two_processes_give_the_run_of_one(alone: Any, two: Path) -> None:
    for cell in TWO:
        several = Finished(two / cell.name)
        assert_same_run(several, alone(cell), cell.name, weights=ROUGH.get(STEPPERS[cell.stepper][0], 1e-6))
    log = (two / Cell("full_finetune", "immediate").name / "log.txt").read_text()
    summary = " ".join(line[20:].strip() for line in log.splitlines())
    assert "2: 2 replicas, because optimizer_step=immediate updates" in summary


def test_in_backward_is_bitwise_after_backward_on_the_same_layout(two: Path) -> None:
    compared = 0
    for cell in TWO:
        after = Cell(cell.recipe, BITWISE.get(cell.stepper, cell.stepper), cell.layout)
        if after == cell or after not in TWO:
            continue
        compared += 1
        ours, theirs = Finished(two / cell.name), Finished(two / after.name)
        assert differ(ours.weights, theirs.weights) == 0, cell.name
        assert differ(ours.optimizer_state, theirs.optimizer_state) == 0, cell.name
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in ours.metrics] == [line[key] for line in theirs.metrics], cell.name
    assert compared >= len(BITWISE) + 2


def test_a_run_goes_on_with_another_number_of_processes(config: Path, two: Path, tmp_path: Path) -> None:
    """A33 and A35: clipped in backward with accumulation, begun on one process, resumed on two in two layouts."""
    recipe, *words = GOING_ON
    one = run(recipe, config, tmp_path / "one", *words, "batch_size=4")
    for max_steps in ("3", "null"):
        assert main(["resume", str(one.folder), f"max_steps={max_steps}"]) == 0
    assert_same_run(Finished(two / "going-on"), one, "resumed")
    assert "the same rows a step, divided otherwise" in (two / "going-on" / "log.txt").read_text()


def test_ragged_steps_fewer_rows_than_ranks_and_small_validation_sets_count_right(
    config: Path, two: Path, tmp_path: Path
) -> None:
    """A25, A50 and the part of A24 with two processes: 1, 3 and 5 rows with answers of unequal length, and one row to
    validate."""
    data = {name: two / f"{name}.jsonl" for name in ROWS}
    for name, path in data.items():
        one = run("full_finetune", config, tmp_path / name, *ragged(path, data), "batch_size=2")
        several = Finished(two / name)
        assert_same_run(several, one, name)
        assert several.validation_losses == pytest.approx(one.validation_losses, rel=1e-6), name
        assert len(one.validation_losses) == len(one.metrics), name


def test_four_processes_give_the_run_of_one(config: Path, alone: Any, tmp_path: Path) -> None:
    cells = [Cell(recipe, "hold", layout) for recipe, layout in zip([*RECIPES, *RECIPES], FOUR, strict=False)]
    commands = []
    for cell in cells:
        words = overrides(cell, 1 if cell.layout == "replicate x shard" else 2, FOUR[cell.layout])
        commands.append(command(cell.recipe, config, tmp_path / cell.name, *words))
    run_ranks(run_commands, 4, commands, timeout_s=1200)
    for cell in cells:
        assert_same_run(Finished(tmp_path / cell.name), alone(cell), cell.name)
