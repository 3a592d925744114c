"""Case A32: rows in a pack do not see each other, and rows that are too long are counted."""

from __future__ import annotations

import pytest

from tests.cases.place import Place, assert_equal, expected, reference_loss, targets, turns

FIRST, OTHER, SECOND = (
    turns("ua", "w1 w2", "w3 w4 w5"),
    turns("ua", "w7 w2", "w8 w4 w9"),
    turns("ua", "w10", "w11 w12"),
)
LONG = turns("ua", " ".join(["w1"] * 150), "w2")
LENGTH = 32
PACKED = ("data.packing=true", f"data.max_length={LENGTH}")


@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_packed_rows_train_as_padded_ones(place: Place, recipe: str) -> None:
    place.write([FIRST, SECOND])
    packed = place.train(*PACKED, "optimizer.lr=1", recipe=recipe)
    padded = place.train("batch_size=2", "optimizer.lr=1", recipe=recipe)
    assert targets(packed) == targets(padded) == [4 + 3]
    assert packed.losses == pytest.approx(padded.losses, rel=1e-6)
    assert_equal(packed.weights, padded.weights, 1e-5)
    reference = reference_loss(place.folder / "m0", [expected(FIRST), expected(SECOND)])
    assert packed.losses[0] == pytest.approx(reference, rel=1e-6)


def test_a_changed_row_changes_the_loss_of_its_pack_by_its_own_alone(place: Place) -> None:
    sums = []
    for first in (FIRST, OTHER):
        place.write([first, SECOND])
        run = place.train(*PACKED, "optimizer.lr=0")
        sums.append(run.losses[0] * targets(run)[0])
    alone = [reference_loss(place.folder / "m0", [expected(row)]) * 4 for row in (FIRST, OTHER)]
    assert sums[1] - sums[0] == pytest.approx(alone[1] - alone[0], rel=1e-4)
    assert abs(alone[1] - alone[0]) > 1e-2


def test_a_pack_is_shown_with_its_seams_and_over_long_rows_with_their_count(place: Place) -> None:
    place.write([FIRST, LONG, SECOND])
    document = place.preview(*PACKED)
    (pack,) = document["units"]
    ids, labels = zip(*(expected(row) for row in (FIRST, SECOND)), strict=True)
    length = [len(row) for row in ids]
    padding = len(pack["ids"]) - sum(length)
    assert pack["rows"] == [f"{place.folder}/train.jsonl:{line}" for line in (1, 3)]
    assert pack["ids"][: sum(length)] == [*ids[0], *ids[1]]
    assert pack["positions"] == [*range(length[0]), *range(length[1]), *range(padding)]
    assert pack["documents"] == [0] * length[0] + [1] * length[1] + [2] * padding
    shifted = [None if label == -100 else label for row in labels for label in (*row[1:], -100)]
    assert pack["labels"] == [*shifted, *[None] * padding]
    assert pack["labels"][length[0] - 1] is None
    assert document["batches"]["fill"] == pytest.approx(sum(length) / LENGTH)
    assert document["too_long"]["rows"] == 1
    assert document["too_long"]["tokens"] == len(expected(LONG)[0]) > 2 * LENGTH
    assert [entry["count"] for entry in document["skipped"]] == [1]
    place.train(*PACKED, "optimizer.lr=0")
    assert "2 of 3 rows" in place.said
    assert f"1 longer than max_length={LENGTH}" in place.said

    shown = place.call("data", "full_finetune", "--config", "config.yaml", *PACKED).out
    seams = [line for line in shown.splitlines() if line.startswith("── train.jsonl")]
    assert [line.split(",")[:2] for line in seams] == [
        ["── train.jsonl:1", f" positions 0 to {length[0] - 1}"],
        ["── train.jsonl:3", f" positions 0 to {length[1] - 1}"],
    ]


@pytest.mark.parametrize("truncation", ["truncate_right", "truncate_left"])
def test_an_over_long_row_is_cut_to_a_pack(place: Place, truncation: str) -> None:
    place.write([FIRST, turns("ua", "w1 w2", " ".join(["w3"] * 100))])
    run = place.train(*PACKED, f"data.truncation={truncation}", "optimizer.lr=0", "batch_size=2")
    ids, labels = expected(turns("ua", "w1 w2", " ".join(["w3"] * 100)))
    kept = slice(LENGTH) if truncation == "truncate_right" else slice(len(ids) - LENGTH + 1, None)
    cut = (
        ids[:1] * (truncation == "truncate_left") + ids[kept],
        [-100] * (truncation == "truncate_left") + labels[kept],
    )
    assert len(cut[0]) == LENGTH
    assert run.losses[0] == pytest.approx(reference_loss(place.folder / "m0", [expected(FIRST), cut]), rel=1e-6)
