"""Cases A19, A28, A46 and A50 in what `optune data` shows: batches, pairs, and ranks without a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optune import train
from optune.types import Microbatch
from tests import fixtures
from tests.cases.place import Place, alpaca, columns, encode, expected, reference_loss, turns
from tests.cases.test_conversations import NO_BOS_TEMPLATE

ROWS = fixtures.numbered_rows(4)


def test_padding_is_shown_by_its_place_where_it_is_the_end_token(place: Place) -> None:
    """A19."""
    fixtures.write_tokenizer(place.folder / "m0", pad_token="<end>")
    rows = [turns("ua", "w1", "w2"), turns("ua", "w3 w4 w5", "w6 w7 w8 w9")]
    place.write(rows)
    document = place.preview("--step", "1", "batch_size=2")
    short, long = document["units"]
    assert document["tokenizer"]["pad"] == document["tokenizer"]["eos"] == {"id": encode("<end>")[0], "text": "<end>"}
    assert [columns(unit) for unit in (short, long)] == [expected(row) for row in rows]
    missing = len(long["ids"]) - len(expected(rows[0])[0])
    assert short["padding"] == [False] * (len(long["ids"]) - missing) + [True] * missing
    assert not any(long["padding"])
    assert not any(short["trained"][-missing:])
    assert short["ids"][-missing:] == encode("<end>") * missing
    assert document["batches"]["padding"] == pytest.approx(missing / (2 * len(long["ids"])))


@pytest.mark.parametrize(
    ("rows", "overrides"),
    [(3, ("batch_size=2", "gradient_accumulation_steps=8")), (1, ("batch_size=4",)), (3, ("batch_size=4",))],
)
def test_fewer_rows_than_a_step_takes_make_one_step_of_what_is_there(
    place: Place, rows: int, overrides: tuple[str, ...]
) -> None:
    """A28."""
    place.write(ROWS[:rows])
    document = place.preview("--step", "1", *overrides)
    assert document["batches"]["steps_per_epoch"] == 1
    assert [columns(unit) for unit in document["units"]] == [expected(row) for row in ROWS[:rows]]


@pytest.mark.parametrize(("processes", "rows"), [(2, 1), (2, 3), (3, 4), (4, 1)])
def test_ranks_without_a_row_are_fed_padding_and_no_row_is_lost_or_doubled(
    place: Place, processes: int, rows: int
) -> None:
    """A50: every rank has as many microbatches as the others in every step, so none waits for ever."""
    place.write(ROWS[:rows])
    document = place.preview("--processes", str(processes))
    steps = document["batches"]["steps_per_epoch"]
    assert steps == -(-rows // processes)
    fed = []
    for step in range(1, steps + 1):
        units = place.preview("--step", str(step), "--processes", str(processes))["units"]
        assert [(unit["rank"], unit["microbatch"]) for unit in units] == [(rank, 1) for rank in range(processes)]
        for unit in units:
            if not unit["rows"]:
                assert (unit["padding"], unit["labels"]) == ([True], [None])
        fed += [columns(unit) for unit in units if unit["rows"]]
    assert fed == [expected(row) for row in ROWS[:rows]]


PROMPT = [{"role": "user", "content": "w1 w2"}]
ANSWERS = [[{"role": "assistant", "content": words}] for words in ("w3 w4", "w5")]
WHOLE = [{"messages": [*PROMPT, *answer]} for answer in ANSWERS]


def copy_for_pairs(place: Place) -> str:
    """A copy of the shipped recipe whose rows are pairs, as docs/data.md says to make one."""
    assert place.call("cp", "full_finetune", "pairs.py").code == 0
    path = place.folder / "pairs.py"
    text = path.read_text(encoding="utf-8")
    for old, new in (
        ("data.load_rows,", "data.load_pairs,"),
        ("        train_on=cfg.data.train_on,\n", ""),
        ("            streaming=cfg.data.streaming,\n", ""),
        ("            shuffle_window=cfg.data.shuffle_window,\n", ""),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return "./pairs.py"


@pytest.mark.parametrize(("adds_bos", "template"), [(True, NO_BOS_TEMPLATE), (False, fixtures.CHAT_TEMPLATE)])
def test_a_pair_is_shown_checked_and_fed_as_two_whole_chats(place: Place, adds_bos: bool, template: str) -> None:
    """A46: prompt and answer rendered as one, with one beginning and one end each; what is logged is what transformers
    gives for both answers."""
    fixtures.write_tokenizer(place.folder / "m0", chat_template=template, adds_bos=adds_bos)
    recipe = copy_for_pairs(place)
    place.write([{"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}])
    document = place.preview("batch_size=2", recipe=recipe)
    assert [unit["halves"] for unit in document["units"]] == [["chosen"], ["rejected"]]
    assert [columns(unit) for unit in document["units"]] == [expected(row) for row in WHOLE]
    assert document["rows"]["kept"] == 1
    both = place.preview("--row", "train.jsonl:1", "batch_size=2", recipe=recipe)["units"]
    assert [columns(unit) for unit in both] == [expected(row) for row in WHOLE]
    shown = place.call("data", recipe, "--config", "config.yaml", "batch_size=2").out
    assert [line[3:].split(",")[:2] for line in shown.splitlines() if line.startswith("── ")] == [
        ["train.jsonl:1", " chosen"],
        ["train.jsonl:1", " rejected"],
    ]
    validated = place.call("validate", recipe, "--config", "config.yaml", "batch_size=2")
    assert validated.code == 0, validated.err
    assert "1 of 1 rows (preference)" in " ".join(validated.err.split())
    run = place.train("optimizer.lr=0", "batch_size=2", recipe=recipe)
    assert run.losses == [pytest.approx(reference_loss(place.folder / "m0", map(expected, WHOLE)), rel=1e-6)]
    for words, message in (
        (("batch_size=1",), "batch_size: counts rows, and 1 of them would part a pair"),
        (("batch_size=2", "data.packing=true"), "data.packing: would part the pairs"),
    ):
        assert place.refuse(*words, recipe=recipe).errors[0].startswith(message)


def test_a_recipe_of_single_answers_refuses_pairs_and_names_both_ways_out(place: Place, no_weights: None) -> None:
    place.write([{"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}])
    for words, where in (((), f"{place.folder}/train.jsonl:1"), (("data.format=preference",), "data.format")):
        refused = place.refuse(*words)
        assert refused.errors == [
            f"{where}: rows of chosen and rejected answers (format preference) cannot be trained by this recipe"
        ]
        assert "data.load_pairs" in refused.err
        assert place.call("data", "full_finetune", "--config", "config.yaml", *words).errors == refused.errors
    way_out = "data.format={_target_: optune.data.formats.read_chosen}"
    assert way_out in refused.err
    document = place.preview(way_out)
    assert [columns(unit) for unit in document["units"]] == [expected(WHOLE[0])]


@pytest.mark.parametrize("command", ["validate", "run"])
def test_validate_and_run_say_in_short_what_the_preview_counts(place: Place, command: str) -> None:
    """A13, A17, A32: files, skipped and cut rows, lengths in one line, how full packs are."""
    long = turns("ua", " ".join(["w1"] * 100), "w2")
    place.write([*ROWS, turns("ua", "w1", ""), long])
    place.write([alpaca("w1", "w2")], "more.jsonl")
    overrides = ("data.train=[train.jsonl,more.jsonl]", "data.max_length=64", "data.packing=true")
    overrides += ("data.validation=train.jsonl",)
    shown = place.preview(*overrides)
    result = place.call(command, "full_finetune", "--config", "config.yaml", *overrides)
    assert result.code == 0, result.err
    said = " ".join(result.err.split())
    first, second = (str(place.folder / name) for name in ("train.jsonl", "more.jsonl"))
    rows, lengths = shown["rows"], shown["lengths"]
    for words in (
        f"data {first}: 4 of 6 rows; {second}: 1 of 1 rows",
        f"rows 5 of 7 rows (messages, alpaca), {rows['targets']} targets in {rows['tokens']} tokens",
        f"1 an empty answer ({first}:5)",
        f"1 longer than max_length=64 ({first}:6)",
        f"too long 1 row of more than 64 tokens (up to {shown['too_long']['longest']})",
        f"lengths {lengths['shortest']} to {lengths['longest']} tokens, median {lengths['median']} ",
        f"packs {shown['batches']['units']} of 64 tokens, {shown['batches']['fill']:.1%} full",
        f"padding {shown['batches']['padding']:.1%} of the positions",
        "validation 4 of 6 rows (messages), ",
        f"note: files of data.validation that are trained too: 1 ({first})",
    ):
        assert words in said, said


RECIPES = sorted(path.stem for path in (Path(__file__).resolve().parent.parent.parent / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("packing", ["true", "false"])
def test_what_is_shown_of_a_step_is_what_the_recipe_trains_in_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, recipe: str, packing: str
) -> None:
    fed: list[list[Microbatch]] = []
    step_of_training = train.train_step

    def listen(model: Any, loss: Any, stepper: Any, microbatches: list[Microbatch], **options: Any) -> Any:
        fed.append(microbatches)
        return step_of_training(model, loss, stepper, microbatches, **options)

    monkeypatch.setattr("optune.train.train_step", listen)
    half = turns("uaua", "w1", "w2", "w3", "w4")
    half["messages"][1]["weight"] = 0.5
    place.write([*fixtures.numbered_rows(9), half, turns("ua", "w1", " ".join(["w2"] * 60))])
    overrides = (
        f"data.packing={packing}", "data.shuffle=true", "data.max_length=48", "data.truncation=truncate_right",
        "batch_size=2", "gradient_accumulation_steps=2", "epochs=2", "seed=5",
    )  # fmt: skip
    place.train(*overrides, recipe=recipe)
    for step, microbatches in enumerate(fed, start=1):
        units = place.preview("--step", str(step), *overrides, recipe=recipe)["units"]
        told = [
            (number, microbatch, place)
            for number, microbatch in enumerate(microbatches, start=1)
            for place in range(len(microbatch.tokens_BT))
        ]
        assert len(units) == len(told)
        for unit, (number, microbatch, row) in zip(units, told, strict=True):
            assert (unit["step"], unit["microbatch"], unit["place"]) == (step, number, row + 1)
            assert unit["ids"] == microbatch.tokens_BT[row].tolist()
            assert [-100 if label is None else label for label in unit["labels"]] == microbatch.labels_BT[row].tolist()
            assert unit["positions"] == microbatch.positions_BT[row].tolist()
            for name, tensor in (("documents", microbatch.documents_BT), ("weights", microbatch.weights_BT)):
                assert unit[name] == (None if tensor is None else tensor[row].tolist())
    assert len(fed) >= 4
