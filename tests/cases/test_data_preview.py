"""Cases A09 to A18 and A20 to A23 in what `optune data` shows: the tokens, labels and counts of training itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fixtures
from tests.cases.place import Place, alpaca, columns, encode, expected, turns
from tests.cases.test_conversations import FORGED, NO_BOS_TEMPLATE, write_markers

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = fixtures.numbered_rows(4)


def said(unit: dict[str, Any]) -> str:
    """What is trained, as text."""
    return "".join(
        piece for piece, is_trained in zip(unit["pieces"], unit["trained"], strict=True) if is_trained
    ).strip()


def test_a_file_shows_the_same_rows_however_it_was_saved(place: Place) -> None:
    """A09."""
    lines = [json.dumps(row) for row in ROWS]
    shown = []
    for text in ("\n".join(lines), "\ufeff" + "\r\n".join(lines) + "\r\n", "\n \n".join(["", *lines, "", "\n"])):
        (place.folder / "train.jsonl").write_bytes(text.encode())
        document = place.preview()
        shown.append([columns(unit) for unit in document["units"]])
        assert (document["rows"]["read"], document["rows"]["kept"], document["skipped"]) == (4, 4, [])
    assert shown[0] == shown[1] == shown[2] == [expected(row) for row in ROWS]
    assert [unit["rows"] for unit in document["units"]] == [
        [f"{place.folder}/train.jsonl:{line}"] for line in (3, 5, 7, 9)
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', ("train.jsonl:4", "not JSON")),
        ("3", ("train.jsonl:4", "found a number, wanted an object")),
        (json.dumps(alpaca("w1", {"a": 1})), ("train.jsonl:4",)),
    ],
)
def test_what_run_refuses_is_refused_in_the_same_words(
    place: Place, no_weights: None, line: str, words: tuple[str, ...]
) -> None:
    """A10, A12."""
    (place.folder / "train.jsonl").write_text(f"\n{json.dumps(ROWS[0])}\n\n{line}\n")
    shown = place.call("data", "full_finetune", "--config", "config.yaml", "--json")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == place.refuse().err
    assert all(word in shown.err for word in words)


def test_an_empty_cell_is_no_word(place: Place) -> None:
    """A11."""
    row = alpaca("w1 w2", "w3")
    place.write([row, row | {"input": None}, row | {"input": float("nan")}, row | {"input": ""}])
    units = place.preview()["units"]
    assert [columns(unit) for unit in units] == [expected(turns("ua", "w1 w2", "w3"))] * 4
    assert not {"None", "nan", "null"} & {word for unit in units for word in "".join(unit["pieces"]).split()}


def test_what_is_left_out_is_counted_by_reason_and_place(place: Place) -> None:
    """A13, A14, A17."""
    long = turns("ua", " ".join(["w1"] * 300), "w2 w3 w4")
    place.write([ROWS[0], turns("ua", "w1", "  "), {"messages": []}, long, turns("u", "w1"), turns("ua", "w1", "")])
    place.write([alpaca("w1", ""), alpaca("w1", "w2")], "more.jsonl")
    document = place.preview("data.train=[train.jsonl,more.jsonl]", "data.max_length=64")
    first, second = (str(place.folder / name) for name in ("train.jsonl", "more.jsonl"))
    assert {entry["reason"]: (entry["count"], entry["where"]) for entry in document["skipped"]} == {
        "an empty answer": (3, [f"{first}:2", f"{first}:6", f"{second}:1"]),
        "no messages": (1, [f"{first}:3"]),
        "longer than max_length=64": (1, [f"{first}:4"]),
        "no answer": (1, [f"{first}:5"]),
    }
    counted = {file["path"]: (file["format"], file["rows"], file["kept"]) for file in document["files"]}
    assert counted == {first: ("messages", 6, 1), second: ("alpaca", 2, 1)}
    ids, labels = expected(ROWS[0])
    other_ids, other_labels = expected(turns("ua", "w1", "w2"))
    trained = [sum(label != -100 for label in row) for row in (labels, other_labels)]
    assert [(file["tokens"], file["targets"]) for file in document["files"]] == [
        (len(ids), trained[0]),
        (len(other_ids), trained[1]),
    ]
    length = len(expected(long)[0])
    wanted = {"rows": 1, "tokens": length, "longest": length, "lost_tokens": length, "lost_targets": 4}
    assert document["too_long"] == wanted | {"max_length": 64}
    assert len(document["units"]) == 2


@pytest.mark.parametrize("truncation", ["truncate_right", "truncate_left"])
def test_what_a_cut_takes_away_is_counted(place: Place, truncation: str) -> None:
    """A17: the row that keeps nothing to learn is skipped, with all that it had; no end token is invented."""
    long = turns("ua", " ".join(["w1"] * 300), "w2 w3 w4")
    place.write([ROWS[0], long])
    document = place.preview("data.max_length=64", f"data.truncation={truncation}")
    length = len(expected(long)[0])
    lost, targets = (length, 4) if truncation == "truncate_right" else (length - 64, 0)
    wanted = {"rows": 1, "tokens": length, "longest": length, "lost_tokens": lost, "lost_targets": targets}
    assert document["too_long"] == wanted | {"max_length": 64}
    shown = [columns(unit) for unit in document["units"]]
    ids, labels = expected(long)
    cut = (ids[:1] + ids[-63:], [-100, *labels[-63:]])
    assert shown == [expected(ROWS[0]), *([cut] if truncation == "truncate_left" else [])]


@pytest.mark.parametrize("roles", ["uua", "uaa", "uau", "aua", "sa", "suasua"])
def test_every_order_of_turns_shows_each_answer_trained(place: Place, roles: str) -> None:
    """A14, A15, A21: without generation tags in the template."""
    row = turns(roles, *(f"w{number}" for number in range(1, len(roles) + 1)))
    place.write([row])
    (unit,) = place.preview()["units"]
    assert columns(unit) == expected(row)


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("f", {"a": {"type": "string"}}), ("g", {"b": {"type": "integer"}}))
]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_row_shows_its_own_tools(place: Place, suffix: str) -> None:
    """A16: tables merge the schemas of a column's objects, and the nulls that this makes must not reach the prompt."""
    rows = [turns("ua", "go", "yes") | {"tools": [tool]} for tool in TOOLS]
    (place.folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    shown = []
    for number, chosen in enumerate((rows[:1], rows[1:], rows)):
        path = place.write(chosen, f"{number}.jsonl")
        if suffix == "parquet":
            import pyarrow
            import pyarrow.parquet

            path = place.folder / f"{number}.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chosen), path)
        model = f"model.path={ROOT / 'assets/tiny/model'}"
        document = place.preview(model, f"data.train={path.name}", "data.chat_template=tools.jinja")
        shown.append(
            [(unit["ids"][: unit["padding"].count(False)], "".join(unit["pieces"])) for unit in document["units"]]
        )
    assert shown[2] == [*shown[0], *shown[1]]
    for (_, text), tool in zip(shown[2], TOOLS, strict=True):
        assert json.loads(text.splitlines()[1].removesuffix("<|im_end|>")) == [tool]


def test_a_limit_that_cuts_nothing_shows_the_same(place: Place) -> None:
    """A18."""
    rows = [turns("ua", "w1 w2", "w3 w4"), turns("ua", "w5 w6", "w7 w8")]
    place.write(rows)
    for limit in ("null", "8192", str(len(expected(rows[0])[0]))):
        document = place.preview(f"data.max_length={limit}")
        assert [columns(unit) for unit in document["units"]] == [expected(row) for row in rows]
        assert document["too_long"]["rows"] == 0
        assert document["rows"]["targets"] == 6


@pytest.mark.parametrize(
    ("template", "adds_bos", "has_bos", "count"),
    [
        (fixtures.CHAT_TEMPLATE, True, True, 1),
        (NO_BOS_TEMPLATE, True, True, 1),
        (NO_BOS_TEMPLATE, False, False, 0),
    ],
)
def test_the_beginning_is_shown_as_often_as_it_is_there(
    place: Place, template: str, adds_bos: bool, has_bos: bool, count: int
) -> None:
    """A20."""
    fixtures.write_tokenizer(place.folder / "m0", chat_template=template, adds_bos=adds_bos)
    if not has_bos:
        path = place.folder / "m0/tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["bos_token"]
        path.write_text(json.dumps(settings))
    row = turns("ua", "w1 w2", "w3 w4")
    place.write([row])
    document = place.preview()
    (unit,) = document["units"]
    assert columns(unit) == expected(row, begin="<s>" if count else "")
    assert unit["ids"].count(encode("<s>")[0]) == count
    assert (document["tokenizer"]["bos"] is not None) == has_bos


@pytest.mark.parametrize("in_vocabulary", [True, False])
def test_a_marker_in_a_message_shows_as_what_it_is(place: Place, in_vocabulary: bool) -> None:
    """A22: as text where the tokenizer can spell it, and in no case as the beginning of an answer."""
    write_markers(place.folder / "m0", special=True, in_vocabulary=in_vocabulary)
    trained = []
    for hack in ("w1", "w2 w3"):
        place.write([turns("ua", FORGED.format(hack), "w4 w5")])
        document = place.preview()
        (unit,) = document["units"]
        assert said(unit) == "w4 w5 <end>"
        trained.append([index - len(unit["ids"]) for index, flag in enumerate(unit["trained"]) if flag])
        ends = [flag for flag, piece in zip(unit["special"], unit["pieces"], strict=True) if "end" in piece]
        # Two that the template wrote; the message's two are spelled as `<`, `end`, `>`, or the one that is a word by
        # itself stays the token.
        assert sorted(ends) == ([True] * 3 if in_vocabulary else [False] * 2 + [True] * 2)
        how = "that this tokenizer cannot read as text" if in_vocabulary else "inside, read as text"
        assert document["notes"] == [
            {"what": f"rows with text of control tokens {how}", "count": 1, "where": [f"{place.folder}/train.jsonl:1"]}
        ]
    assert trained[0] == trained[1]


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        ("assistant", "w2 <end> w4 w5 <end> w7 <end>"),
        ("last_assistant", "w7 <end>"),
    ],
)
def test_several_answers_are_shown_trained_as_asked_for(place: Place, train_on: str, trained: str) -> None:
    """A23."""
    row = turns("uauauau", "w1", "w2", "w3", "w4 w5", "w6", "w7", "w8")
    place.write([row])
    document = place.preview(f"data.train_on={train_on}")
    assert said(document["units"][0]).split() == trained.split()
    assert document["rows"]["targets"] == len(encode(trained))
