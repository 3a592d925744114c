"""The equality table: every recipe, whenever the optimizer steps, gives the run that after_backward gives.

The product of axes is thinned to rows in which every pair of values of two axes still occurs;
`test_the_thinned_table_covers_every_pair` holds that. Each row asserts on final weights, optimizer state and losses.
Interruption and processes have tables of their own (test_resume.py, test_processes.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.recipes.pairwise import Row, all_pairs, pairs_of, thin
from tests.recipes.running import RECIPES, Finished, assert_equal_runs, run, write_inputs

OPTIMIZERS = {
    "sgd": ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1"],
    "momentum": ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "+optimizer.momentum=0.9"],
    "adamw_loop": ["+optimizer.foreach=false", "+optimizer.fused=false"],
    "adamw_foreach": ["+optimizer.foreach=true"],
    "adamw_fused": ["+optimizer.fused=true"],
}
AXES = {
    "recipe": RECIPES,
    "stash": ["hold", "cpu", "alias", "factored", "two_pass", "auto"],
    "optimizer": list(OPTIMIZERS),
    "clipping": ["null", "1000.0", "0.01"],
    "accumulation": ["1", "4", "ragged"],
    "order": ["depth_first", "breadth_first"],
    "schedule": ["cosine", "linear", "wsd"],
    "rows": ["padded", "packed"],
    "checkpointing": ["none", "block"],
    "tied": [False, True],
}
EXACT_STASHES = ("hold", "cpu", "alias", "two_pass")


def allowed(row: Row) -> bool:
    """alias needs fp32 masters over bf16 weights; adapters are fp32 and have none."""
    return not (row["stash"] == "alias" and row["recipe"] == "lora_finetune")


def settings(row: Row) -> list[str]:
    """The overrides that row and reference share."""
    accumulation = {"1": 1, "4": 4, "ragged": 5}[row["accumulation"]]
    shared = [
        f"gradient_accumulation_steps={accumulation}",
        f"max_grad_norm={row['clipping']}",
        f"accumulation={row['order']}",
        f"schedule.name={row['schedule']}",
        f"data.packing={str(row['rows'] == 'packed').lower()}",
        f"activation_checkpointing={row['checkpointing']}",
        *OPTIMIZERS[row["optimizer"]],
    ]
    if row["rows"] == "packed":
        shared.append("data.max_length=40")  # two rows a pack
    if row["stash"] == "alias":
        shared += ["model.dtype=bf16", "model.master_weights=fp32"]
    return shared


TABLE = thin(AXES, allowed)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return {tied: write_inputs(folder / str(tied), rows=22, tie_word_embeddings=tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(recipe: str, tied: bool, shared: tuple[str, ...]) -> Finished:
        return run(recipe, inputs[tied], tmp_path_factory.mktemp("reference") / "run", *shared)

    return make


def test_the_thinned_table_covers_every_pair():
    covered = set().union(*(pairs_of(row) for row in TABLE))
    assert covered == all_pairs(AXES, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=["-".join(map(str, row.values())) for row in TABLE])
def test_in_backward_gives_the_run_of_after_backward(row: Row, inputs, reference, tmp_path: Path):
    shared = settings(row)
    expected = reference(row["recipe"], row["tied"], tuple(shared))
    stash = f"gradient_stash={row['stash']}"
    actual = run(row["recipe"], inputs[row["tied"]], tmp_path / "run", *shared, "optimizer_step=in_backward", stash)
    exact = row["stash"] in EXACT_STASHES or row["clipping"] == "null"
    assert_equal_runs(actual, expected, relative=0.0 if exact else 1e-6)
    assert [line["lr"] for line in actual.metrics] == [line["lr"] for line in expected.metrics]
    for ours, theirs in zip(actual.metrics, expected.metrics, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.0 if exact else 1e-6)
