"""Cases A30, A31, A33: gradients that are not finite, updates that bf16 cannot hold, stepping in the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import fixtures
from tests.cases.place import Place, assert_equal, largest, moved, targets, turns
from tests.recipes.running import Finished, read_tensors

BOOM = fixtures.VOCABULARY.index("boom")
EMBEDDING = "model.embed_tokens.weight"
STEPPERS = {
    "after_backward": ("max_grad_norm=1",),
    "after_backward without clipping": ("max_grad_norm=null",),
    "in_backward hold": ("max_grad_norm=1", "optimizer_step=in_backward", "gradient_stash=hold"),
    "in_backward factored": ("max_grad_norm=1", "optimizer_step=in_backward", "gradient_stash=factored"),
    "in_backward two_pass": ("max_grad_norm=1", "optimizer_step=in_backward", "gradient_stash=two_pass"),
}


@pytest.fixture
def poisoned(place: Place) -> Place:
    """M0 whose word "boom" is no number, and 12 rows of which the sixth uses it."""
    path = place.folder / "m0/model.safetensors"
    tensors = load_file(path)
    tensors[EMBEDDING][BOOM] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    rows = fixtures.numbered_rows(12)
    rows[5] = turns("ua", "w1 boom", "w2")
    place.write(rows)
    return place


def assert_finite(folder: Path) -> None:
    """No weight of a checkpoint is NaN but the row that was from the beginning."""
    for file in folder.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if EMBEDDING in name and tensor.dim() == 2:
                tensor = torch.cat([tensor[:BOOM], tensor[BOOM + 1 :]])
            assert torch.isfinite(tensor).all(), f"{file}: {name}"


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "torch.optim.AdamW"])
@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_a_gradient_that_is_not_finite_reaches_no_weight(
    poisoned: Place, recipe: str, stepper: str, optimizer: str
) -> None:
    """A30."""
    words = (f"optimizer._target_={optimizer}", "optimizer.lr=1e-2", *STEPPERS[stepper])
    saving = ("checkpoint.save_every_steps=2", "checkpoint.keep_last=2")
    run = poisoned.train(*words, *saving, recipe=recipe)
    assert "step 6 skipped" in poisoned.said
    assert [path.name for path in run.checkpoints] == ["step-000010", "step-000012"]
    for checkpoint in run.checkpoints:
        assert_finite(checkpoint)
    lines = run.metrics
    assert [line["step"] for line in lines if line.get("skipped")] == [6]
    assert all(line["loss"] is not None for line in lines if line["step"] != 6)
    rows = [row for index, row in enumerate(fixtures.numbered_rows(12)) if index != 5]
    poisoned.write(rows)
    without = poisoned.train(*words, recipe=recipe)
    assert_equal(without_boom(run), without_boom(without), 1e-6)


def without_boom(run: Finished) -> dict[str, torch.Tensor]:
    return {name: torch.nan_to_num(tensor) for name, tensor in run.weights.items()}


def test_too_many_such_steps_in_a_row_end_the_run_and_the_last_checkpoint_is_good(poisoned: Place) -> None:
    """A30."""
    poisoned.write([*fixtures.numbered_rows(4), *[turns("ua", "boom", "w1")] * 4])
    words = ("max_skipped_steps=3", "checkpoint.save_every_steps=2", "checkpoint.keep_last=2", "max_grad_norm=1")
    result = poisoned.run(*words)
    assert result.code == 1
    assert len(result.errors) == 1
    assert "not finite" in result.errors[0]
    for checkpoint in Finished(poisoned.folder / "out").checkpoints:
        assert_finite(checkpoint)
    assert not (poisoned.folder / "out/model").exists()


@pytest.mark.parametrize("mode", ["in_backward", "immediate"])
def test_a_mode_that_cannot_take_an_update_back_stops_before_it_is_saved(poisoned: Place, mode: str) -> None:
    """A30: without clipping, nothing waits for the norm."""
    saving = ("checkpoint.save_every_steps=2", "checkpoint.keep_last=2")
    result = poisoned.run(f"optimizer_step={mode}", *saving)
    assert result.code == 1
    assert len(result.errors) == 1
    assert "norm" in result.errors[0]
    assert "nan" in result.errors[0]
    assert "optimizer_step" in result.errors[0]
    kept = Finished(poisoned.folder / "out").checkpoints
    assert [path.name for path in kept] == ["step-000002", "step-000004"]
    for checkpoint in kept:
        assert_finite(checkpoint)


def changed(run: Finished, base: Path) -> float:
    """The share of weights that are other than the base's."""
    before = read_tensors(base)
    pairs = [(tensor.float(), before[name].float()) for name, tensor in run.weights.items()]
    return sum(int((one != other).sum()) for one, other in pairs) / sum(one.numel() for one, _ in pairs)


@pytest.fixture
def wide(place: Place) -> Place:
    """M0 in bf16 with weights near 1."""
    path = place.folder / "m0/model.safetensors"
    tensors = {name: 1 + tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    place.write(fixtures.numbered_rows(10))
    return place


ADAM = ("optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-4", "epochs=5", "max_steps=50")


def test_updates_that_bf16_loses_are_told_and_fp32_masters_keep_them(wide: Place) -> None:
    """A31."""
    base = wide.folder / "m0"
    lost = changed(wide.train(*ADAM, "model.dtype=bf16"), base)
    assert "rounds away" in wide.said
    assert "model.master_weights=fp32" in wide.said
    kept = changed(wide.train(*ADAM, "model.dtype=bf16", "model.master_weights=fp32"), base)
    assert "rounds away" not in wide.said
    full = wide.train(*ADAM, "model.dtype=fp32")
    assert "rounds away" not in wide.said
    # What an fp32 run changes by more than bf16's spacing is what masters show in the end.
    rounded = changed_after_rounding(full, base)
    assert rounded > 0.3
    assert lost < 0.5 * rounded
    assert kept == pytest.approx(rounded, rel=0.1)


def changed_after_rounding(run: Finished, base: Path) -> float:
    before = read_tensors(base)
    pairs = [(tensor.bfloat16(), before[name]) for name, tensor in run.weights.items()]
    return sum(int((one != other).sum()) for one, other in pairs) / sum(one.numel() for one, _ in pairs)


@pytest.mark.parametrize("clip", ["null", "0.2"])
@pytest.mark.parametrize("stash", ["auto", "hold", "factored", "two_pass", "cpu"])
def test_stepping_in_backward_is_the_update_after_it(place: Place, stash: str, clip: str) -> None:
    """A33: with accumulation, and with clipping."""
    place.write(fixtures.numbered_rows(6))
    words = ("gradient_accumulation_steps=2", f"max_grad_norm={clip}", "optimizer._target_=torch.optim.AdamW")
    words = (*words, "optimizer.lr=1e-2")
    after = place.train(*words)
    inside = place.train(*words, "optimizer_step=in_backward", f"gradient_stash={stash}")
    assert len(inside.metrics) == 3
    assert targets(inside) == targets(after)
    assert inside.losses == pytest.approx(after.losses, rel=1e-6)
    assert [line["grad_norm"] for line in inside.metrics] == pytest.approx(
        [line["grad_norm"] for line in after.metrics], rel=1e-5
    )
    # AdamW makes a step of 1e-2 of any gradient, so one that is almost 0 hands on the rounding of its sum (factored).
    assert_equal(inside.weights, after.weights, 4e-6)
    assert largest(moved(after, place.folder / "m0")) > 1e-3


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("optimizer_step=immediate", "gradient_accumulation_steps=2"), "gradient_accumulation_steps"),
        (("optimizer_step=immediate", "max_grad_norm=1"), "max_grad_norm"),
        (("optimizer_step=immediate", "accumulation=breadth_first"), "accumulation"),
        (("optimizer_step=in_backward", "gradient_stash=alias", "max_grad_norm=1"), "gradient_stash"),
        (("gradient_stash=keep",), "gradient_stash"),
        (("optimizer_step=inside",), "optimizer_step"),
    ],
)
def test_a_combination_that_cannot_be_right_is_refused_at_once(place: Place, words: tuple[str, ...], key: str) -> None:
    """A33."""
    place.write(fixtures.numbered_rows(4))
    assert key in place.refuse(*words).err


@pytest.mark.parametrize("clip", ["null", "0.2"])
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_a_run_that_steps_in_backward_goes_on_as_if_never_stopped(place: Place, recipe: str, clip: str) -> None:
    """A33."""
    place.write(fixtures.numbered_rows(12))
    words = ("gradient_accumulation_steps=2", f"max_grad_norm={clip}", "optimizer._target_=torch.optim.AdamW")
    words = (*words, "optimizer.lr=1e-2", "optimizer_step=in_backward")
    straight = place.train(*words, recipe=recipe)
    place.stop_at(3, *words, recipe=recipe)
    resumed = place.resume()
    assert len(resumed.metrics) == 6
    assert resumed.losses == straight.losses
    assert_equal(resumed.weights, straight.weights)
