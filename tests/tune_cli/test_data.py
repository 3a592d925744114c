"""`optune data`: what it prints for people and for programs, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fixtures
from tests.cases.place import Place, encode, expected, turns
from tests.tune_cli.conftest import ROWS

ROOT = Path(__file__).resolve().parent.parent.parent


def show(place: Place, *words: str, recipe: str = "full_finetune") -> str:
    result = place.call("data", recipe, "--config", "config.yaml", *words)
    assert (result.code, result.err) == (0, "")
    return result.out


def test_brackets_stand_around_what_is_trained_where_there_is_no_colour(place: Place) -> None:
    shown = show(place)
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line != line.rstrip() or len(line) > 80]
    first, second = shown.split("── train.jsonl:")[1:3]
    assert first.splitlines()[0] == f"1, 3 of {len(expected(ROWS[0])[0])} tokens trained"
    assert first.count("⟦") == first.count("⟧") == 1
    assert "⟦·w3 w4‹·<end>›⟧" in first  # T0's decoder puts a space between all words
    assert re.findall(r"⟦(0\.5x)?", second) == ["0.5x", ""]
    assert "weights 0.5 and 1" in second.splitlines()[0]
    assert "an empty answer (train.jsonl:3)" in shown
    assert re.search(r"train\.jsonl +messages +7 +6 ", shown)


def test_colours_follow_the_terminal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = show(place)
    assert "⟦" not in coloured
    lines = [line for line in coloured.splitlines() if "w3" in line and "w4" in line]
    grounds = re.findall(r"\x1b\[[0-9;]*48;2;(\d+;\d+;\d+)m[^\x1b]*(w\d|<end>)", lines[0])
    assert [word for _, word in grounds] == ["w3", "w4", "<end>"]
    assert grounds[0][0] != grounds[1][0]  # neighbours in two shades
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦" in show(place)


def test_a_row_is_a_table_with_a_line_for_each_token(place: Place) -> None:
    by_number, by_place = show(place, "--row", "2"), show(place, "--row", "train.jsonl:2")
    assert by_number == by_place
    head, *lines = [line for line in by_number.splitlines() if re.match(r" *(position|\d+) ", line)]
    assert head.split() == ["position", "id", "token", "label", "weight"]
    (unit,) = place.preview("--row", "2")["units"]
    assert (
        [int(line.split()[1]) for line in lines]
        == unit["ids"]
        == encode(
            "<s> <turn> user \n w1 <end> \n <turn> assistant \n w2 <end> \n <turn> user \n w3 <end> \n"
            " <turn> assistant \n w4 <end> \n"
        )
    )
    assert ["●" in line for line in lines] == unit["trained"]
    trained = [line.split() for line in lines if "●" in line]
    assert [words[2].strip("·‹›") for words in trained] == ["w2", "<end>", "w4", "<end>"]
    labelled = [line.split()[-2:] for line in lines if re.search(r" (0\.5|1)$", line)]
    assert labelled == [
        [str(token), weight]
        for token, weight in zip(encode("w2 <end> w4 <end>"), ["0.5", "0.5", "1", "1"], strict=True)
    ]


def test_a_step_shows_what_it_trains_and_the_validation_rows_are_shown_alike(place: Place) -> None:
    place.write(ROWS[3:5], "other.jsonl")
    document = place.preview("--step", "2", "batch_size=2", "gradient_accumulation_steps=2")
    assert [(unit["step"], unit["microbatch"], unit["numbers"]) for unit in document["units"]] == [
        (2, 1, [5]),
        (2, 1, [6]),
    ]
    validation = place.preview("--split", "validation", "data.validation=other.jsonl", "batch_size=2")
    assert (validation["split"], validation["rows"]["kept"]) == ("validation", 2)
    assert [unit["rows"] for unit in validation["units"]] == [[f"{place.folder}/other.jsonl:{line}"] for line in (1, 2)]


def test_a_changed_recipe_shows_its_own_rows(place: Place) -> None:
    source = (ROOT / "recipes/full_finetune.py").read_text(encoding="utf-8")
    before = "    return tokenizer, batches, validation\n"
    assert before in source
    changed = source.replace(
        before, f"    batches.rows.trained[:] = False\n    batches.rows.trained[-1] = True\n{before}"
    )
    (place.folder / "mine.py").write_text(changed, encoding="utf-8")
    units = place.preview(recipe="./mine.py")["units"]
    assert sum(sum(unit["trained"]) for unit in units) == 1
    (place.folder / "none.py").write_text(source.replace("make_batches", "other_name"), encoding="utf-8")
    (place.folder / "two.py").write_text(source.replace(before, "    return batches, validation\n"), encoding="utf-8")
    for name, words in (("none", "has no function make_batches"), ("two", "does not return (tokenizer, batches")):
        result = place.call("data", f"./{name}.py", "--config", "config.yaml")
        assert (result.code, result.out) == (2, "")
        assert result.errors[0].startswith(f"./{name}.py: ")
        assert words in result.errors[0]
        assert "optune cat full_finetune" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--row", "7"), "there is no row 7: 6 rows are kept"),
        (("--row", "0"), "there is no row 0"),
        (("--row", "train.jsonl:3"), "train.jsonl:3 is skipped: an empty answer"),
        (("--row", "other.jsonl:3"), "no row that is kept stands at 'other.jsonl:3'"),
        (("--row", "1", "--step", "1"), "exclude each other"),
        (("--step", "13", "epochs=2"), "there is no step 13 to show: there are 12"),
        (("--step", "4", "max_steps=3"), "there is no step 4 to show: there are 3"),
        (("data.train=[{path: train.jsonl, weight: 0.2}]", "--row", "1"), "row 1 is not in the first epoch"),
        (("--step", "0"), "'0' is not a whole number from 1 up"),
        (("--rows", "-1"), "--rows"),
        (("--split", "validation"), "data.validation: is null"),
        (("data.streaming=true",), "max_steps: is null, and how many steps an epoch has is not known"),
        (("data.streaming=true", "epochs=2", "max_steps=2"), "epochs: is 2, and how many steps an epoch has"),
        (("data.streaming=true", "max_steps=2", "--step", "3"), "there is no step 3 to show: there are 2"),
        (("data.trian=x",), "trian"),
        (("data.train=none.jsonl",), "none.jsonl: no such data file"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(place: Place, words: tuple[str, ...], message: str) -> None:
    result = place.call("data", "full_finetune", "--config", "config.yaml", "--json", *words)
    assert (result.code, result.out) == (2, "")
    assert len(result.errors) == 1
    assert message in result.errors[0]
    assert place.listing().count("out") == 0


def test_files_with_weights_say_how_many_rows_an_epoch_has(place: Place) -> None:
    shown = show(place, "data.train=[{path: train.jsonl, weight: 1.5}]", "--rows", "0")
    document = place.preview("data.train=[{path: train.jsonl, weight: 1.5}]")
    assert (document["rows"]["kept"], document["batches"]["units"], len(document["units"])) == (6, 9, 9)
    tokens = sum(unit["padding"].count(False) for unit in document["units"])
    assert re.search(rf"^epoch +9 rows, {tokens} tokens, by the weights of the files$", shown, flags=re.M)
    assert "by the weights" not in show(place, "--rows", "0")


def test_a_stream_shows_its_first_window(place: Place) -> None:
    place.write(fixtures.numbered_rows(9))
    stream = ("data.streaming=true", "data.shuffle=true", "data.shuffle_window=6", "max_steps=4", "batch_size=2")
    shown = place.preview(*stream)
    whole = {unit["rows"][0]: unit["ids"][: unit["padding"].count(False)] for unit in place.preview()["units"]}
    fed = {unit["rows"][0]: unit["ids"][: unit["padding"].count(False)] for unit in shown["units"]}
    assert len(fed) == len(shown["units"]) == 6
    assert fed == {where: whole[where] for where in list(whole)[:6]}
    assert list(fed) != list(whole)[:6]
    assert "the first window of a stream; what follows is not read" in [note["what"] for note in shown["notes"]]
    result = place.call("data", "full_finetune", "--config", "config.yaml", *stream, "--step", "4")
    assert (result.code, len(result.errors)) == (2, 1)
    assert "there is no step 4 to show" in result.err
    whole = place.preview(*stream, "data.shuffle_window=9")
    assert len(whole["units"]) == 9
    assert whole["notes"] == []


def test_data_that_would_steer_a_terminal_is_shown_as_numbers(place: Place) -> None:
    model = f"model.path={ROOT / 'assets/tiny/model'}"
    place.write([turns("ua", "a\x1b[31mb\u200bc\r\n\td", "e  f ")])
    shown = show(place, model)
    assert "\x1b" not in shown
    assert "a\\u{1b}[31mb\\u{200b}c\\u{d}↵\n  ⇥d" in shown
    assert "⟦e··f·‹<|im_end|>›⟧↵" in shown


def documented_keys() -> dict[str, str]:
    """Each key of the JSON document and its type, as docs/data.md has them."""
    section = (ROOT / "docs/data.md").read_text(encoding="utf-8").split("### The JSON document")[1]
    found: dict[str, str] = {}
    for keys, types in re.findall(r"^\| (`[^|]*`) \| (`[^|]*`) \|", section, flags=re.M):
        first, *others = re.findall(r"`([^`]+)`", keys)
        parent = first.rpartition(".")[0]
        kinds = re.findall(r"`([^`]+)`", types)
        names = [first, *(f"{parent}{name}" for name in others)]
        found |= dict(zip(names, kinds if len(kinds) > 1 else kinds * len(names), strict=True))
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and not path.endswith("skipped"):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for part in value:
            yield from leaves(part, f"{path}[]")
    else:
        yield path, value


def fits(value: Any, kind: str) -> bool:
    plain = {"int": int, "float": float, "text": str, "bool": bool}
    if kind.endswith("?"):
        return value is None or fits(value, kind[:-1])
    if kind.startswith("["):
        return isinstance(value, list) and all(fits(part, kind[1:-1]) for part in value)
    if kind == "{text: int}":
        return isinstance(value, dict) and all(fits(k, "text") and fits(v, "int") for k, v in value.items())
    return type(value) is plain[kind]


def test_the_json_document_is_the_documented_one(place: Place) -> None:
    documented = documented_keys()
    assert len(documented) > 50
    place.write([turns("ua", " ".join(["w1"] * 40), "w2"), *ROWS], "train.jsonl")
    fixtures.write_tokenizer(place.folder / "m0")
    seen: set[str] = set()
    kinds = dict.fromkeys(documented, False)
    for words in (
        ("data.max_length=32",),
        ("data.max_length=64", "data.packing=true", "data.truncation=truncate_left"),
        ("data.max_length=null", "--processes", "2", "--step", "4"),
    ):
        place.write(
            [{"messages": [{"role": "user", "content": "<end>"}, {"role": "assistant", "content": "w1"}]}], "b.jsonl"
        )
        document = place.preview("data.train=[train.jsonl,b.jsonl]", *words)
        for path, value in leaves(document):
            if value == [] and path in ("skipped", "notes"):
                continue
            assert path in documented, f"{path} is not in docs/data.md"
            assert fits(value, documented[path]), f"{path}: {value!r} is no {documented[path]}"
            seen.add(path)
            kinds[path] |= value is None
        assert json.loads(json.dumps(document)) == document
    assert seen == documented.keys()
    nullable = {path for path, kind in documented.items() if kind.endswith("?")}
    assert {path for path, was_null in kinds.items() if was_null} <= nullable
