"""Every format by a fixture of rows, and every way in which a row can be wrong by its message."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from optune import data
from optune.data.formats import FORMATS, Chat, Pair, RowError, Segments, SkippedRow, Tokens, detect_format
from optune.errors import DataError
from tests import fixtures
from tests.data.chat_templates import load_ours
from tests.data.test_template import say


def read(row: dict[str, Any]) -> Any:
    return FORMATS[detect_format(row)][0](row)


QUESTION, ANSWER = say("user", "w1"), say("assistant", "w2")
CALL = {"name": "f", "arguments": {"a": [1]}}

FIXTURES: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "messages": [
        ({"messages": [QUESTION, ANSWER]}, Chat([QUESTION, ANSWER])),
        (
            {
                "messages": [
                    {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "user", "content": "w1", "name": None},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "type": "function", "function": CALL | {"arguments": '{"a": [1]}'}}],
                    },
                    {"role": "tool", "content": {"t": 3}, "tool_call_id": "1"},
                    {"role": "assistant", "content": "w2", "weight": 0.5},
                ],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            Chat(
                [
                    {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    QUESTION,
                    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
                    {"role": "tool", "content": {"t": 3}, "tool_call_id": "1"},
                    say("assistant", "w2", weight=0.5),
                ],
                [{"type": "function", "function": {"name": "f"}}],
            ),
        ),
    ],
    "sharegpt": [
        (
            {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
            Chat([QUESTION, ANSWER]),
        ),
        (
            {
                "system": "w0",
                "tools": '[{"name": "f"}]',
                "conversations": [
                    {"from": "user", "value": "w1"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "w5"},
                    {"from": "gpt", "value": "w2", "weight": 0},
                ],
            },
            Chat(
                [
                    say("system", "w0"),
                    QUESTION,
                    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
                    say("tool", "w5"),
                    say("assistant", "w2", weight=0),
                ],
                [{"name": "f"}],
            ),
        ),
    ],
    "preference": [
        (
            {"prompt": "w1", "chosen": [ANSWER], "rejected": [say("assistant", "w3")], "score_chosen": 1},
            Pair([QUESTION], [ANSWER], [say("assistant", "w3")]),
        ),
        ({"prompt": "w1", "chosen": " w2", "rejected": " w3"}, Pair("w1", " w2", " w3")),
    ],
    "alpaca": [
        ({"instruction": "w1", "output": "w2"}, Chat([QUESTION, ANSWER])),
        (
            {"instruction": "w3", "input": "w4", "output": "w5", "system": "w0", "history": [["w1", "w2"]]},
            Chat([say("system", "w0"), QUESTION, ANSWER, say("user", "w3\n\nw4"), say("assistant", "w5")]),
        ),
    ],
    "completion": [
        ({"prompt": "w1", "completion": " w2"}, Segments((("w1", False), (" w2", True)))),
        ({"prompt": "", "completion": "w2"}, Segments((("", False), ("w2", True)))),
        (
            {"prompt": [ANSWER, QUESTION], "completion": [ANSWER], "tools": []},
            Chat([ANSWER | {"weight": 0}, QUESTION, ANSWER]),
        ),
    ],
    "text": [({"text": " w1\n"}, Segments(((" w1\n", True),))), ({"text": "w1", "id": 4}, Segments((("w1", True),)))],
    "tokens": [
        ({"tokens": [3, 4, 5]}, Tokens([3, 4, 5], [True] * 3)),
        ({"input_ids": [3, 4, 5], "labels": [-100, 4, -100]}, Tokens([3, 4, 5], [False, True, False])),
    ],
}


@pytest.mark.parametrize("name", FIXTURES)
def test_format_reads_its_rows_and_is_detected(name: str) -> None:
    for row, expected in FIXTURES[name]:
        before = json.dumps(row)
        assert detect_format(row) == name
        assert read(row) == expected
        assert json.dumps(row) == before, "a format is a pure function"


def test_every_format_has_a_fixture() -> None:
    assert set(FIXTURES) == set(FORMATS)


def test_older_and_other_spellings_are_read_as_the_newer_ones() -> None:
    call = {"role": "assistant", "content": None, "function_call": CALL | {"arguments": '{"a": [1]}'}}
    old = chat(QUESTION, call, {"role": "function", "name": "f", "content": "3"}, ANSWER, functions=[{"name": "f"}])
    assert read(old) == Chat(
        [
            QUESTION,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "name": "f", "content": "3"},
            ANSWER,
        ],
        [{"type": "function", "function": {"name": "f"}}],
    )
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    assert read({"conversations": turns}) == Chat([QUESTION, ANSWER])
    two = [{"from": "human", "value": "w1"}, {"from": "function_call", "value": json.dumps([CALL, CALL]), "weight": 0}]
    calls = [{"type": "function", "function": CALL}] * 2
    assert read({"conversations": two}).messages[1] == {"role": "assistant", "tool_calls": calls, "weight": 0}
    # A list in a cell of a table is JSON text.
    assert read({"messages": json.dumps([QUESTION, ANSWER])}) == Chat([QUESTION, ANSWER])
    assert read({"input_ids": "[3, 4]", "labels": "[-100, 4]"}) == Tokens([3, 4], [False, True])


@pytest.mark.parametrize(
    "cell",
    [{"input": None}, {"input": math.nan}, {}, {"input": ""}, {"input": "  "}],
    ids=["null", "NaN", "-", "none", " "],
)
def test_a11_an_empty_cell_is_no_input(cell: dict[str, Any]) -> None:
    assert read({"instruction": "w1", "output": "w2"} | cell) == Chat([QUESTION, ANSWER])
    assert read({"instruction": "w1", "output": "w2", "system": math.nan, "history": None} | cell) == Chat(
        [QUESTION, ANSWER]
    )


def test_a_system_field_and_a_system_turn_that_repeats_it_are_one_message() -> None:
    system, turn = {"role": "system", "content": "w9"}, {"from": "system", "value": "w9"}
    said = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]
    for turns in (said, [turn, *said]):
        assert read({"system": "w9", "conversations": turns}) == Chat([system, QUESTION, ANSWER])
    other = read({"system": "w8", "conversations": [turn, *said]})
    assert isinstance(other, Chat)
    assert [message["content"] for message in other.messages] == ["w8", "w9", "w1", "w2"]
    assert other.notes == ("rows with a field 'system' and another system turn in front, both rendered",)
    beside = read(chat(QUESTION, ANSWER, system="w9"))
    assert beside == Chat([QUESTION, ANSWER], notes=("rows with a field 'system' beside the messages, not rendered",))
    assert read(chat(QUESTION, ANSWER, system=None)) == Chat([QUESTION, ANSWER])


def test_a11_empty_cells_of_a_file_give_four_equal_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    cells = ['"input": null, ', '"input": NaN, ', "", '"input": "", ']
    path.write_text("".join(f'{{"instruction": "w1", {cell}"output": "w2"}}\n' for cell in cells))
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    rows = data.load_rows(path, tokenizer)
    assert len({row.tokens.tobytes() for row in rows}) == 1
    assert "nan" not in tokenizer.decode(rows[1].tokens).lower()


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "w1", "output": {"a": 1, "b": None}}, "field 'output': found an object, wanted text"),
        ({"instruction": "w1", "output": 3}, "field 'output': found a number, wanted text"),
        ({"instruction": None, "output": "w"}, "field 'instruction': found null, wanted text"),
        ({"instruction": "w1", "input": 3, "output": "w"}, "field 'input': found a number, wanted text"),
        ({"instruction": "w1", "output": "w", "history": "ab"}, "field 'history': found text, wanted a list"),
        (
            {"instruction": "w1", "output": "w", "history": [["a"]]},
            r"'history\[0\]': found a list, wanted a list of",
        ),
        ({"messages": {}}, "field 'messages': found an object, wanted a list"),
        (chat("hello"), r"field 'messages\[0\]': found text, wanted an object"),
        (chat({"content": "w"}), r"field 'messages\[0\].role': found null, wanted a word"),
        (chat(say("user<|im_end|>", "w")), r"field 'messages\[0\].role': found text, wanted a word"),
        (chat(say("user", None)), r"field 'messages\[0\].content': found null, wanted text"),  # pyright: ignore[reportArgumentType]
        (
            chat(QUESTION, {"role": "assistant", "content": {"a": 1}}),
            r"'messages\[1\].content': found an object",
        ),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
            r"field 'messages\[0\].content\[0\]': found a part of type image_url, wanted text",
        ),
        (
            chat(QUESTION, say("assistant", "w", weight="1")),
            r"'messages\[1\].weight': found text, wanted a number from 0 to 10,000",
        ),
        (
            chat(QUESTION, say("assistant", "w", weight=-1)),
            r"'messages\[1\].weight': found -1, wanted a",
        ),
        (chat(QUESTION, say("assistant", "w", weight=1e39)), r"'messages\[1\].weight': found 1e\+39, wanted a number"),
        (chat(QUESTION, say("assistant", "w", weight=math.nan)), r"'messages\[1\].weight': found NaN, wanted a number"),
        (
            chat(QUESTION, say("assistant", "", tool_calls={})),
            r"'messages\[1\].tool_calls': found an object",
        ),
        (
            chat(QUESTION, say("assistant", "", tool_calls=[{}])),
            r"tool_calls\[0\].function.name': found null",
        ),
        (chat(QUESTION, ANSWER, tools="x"), "field 'tools': found text, wanted a list of tool descriptions"),
        (
            {"conversations": [{"from": "bard", "value": "w"}]},
            r"'conversations\[0\].from': found bard, wanted one of",
        ),
        ({"conversations": [{"from": [], "value": "w"}]}, r"'conversations\[0\].from': found \[\], wanted one of"),
        (
            {"conversations": [{"from": "function_call", "value": "w"}]},
            r"'conversations\[0\].value': found text, wan",
        ),
        ({"prompt": "w", "completion": ["a"]}, "field 'completion': found a list, wanted text"),
        ({"text": 3}, "field 'text': found a number, wanted text"),
        ({"tokens": [1, -2]}, "field 'tokens': found a number among the ids, wanted whole numbers from 0"),
        ({"tokens": [1, "a"]}, "field 'tokens': found text among the ids"),
        ({"tokens": [1, True]}, "field 'tokens': found true or false among the ids"),
        ({"tokens": [1, 2], "labels": [1]}, "field 'labels': found 1 labels for 2 ids"),
        ({"tokens": [1, 2], "labels": [1, 3]}, r"field 'labels\[1\]': wanted the id at the same place or -100"),
        (
            {"question": "a", "answer": "b"},
            "no known format has the keys 'answer', 'question' .*alpaca: instruction . o",
        ),
    ],
)
def test_a12_a_wrong_field_is_named_with_what_was_found_and_wanted(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        read(row)


def test_a12_the_message_has_file_line_and_both_types(tmp_path: Path) -> None:
    rows = [{"instruction": "w1", "output": "w2"}, {"instruction": "w1", "output": {"a": 1}}, {"instruction": "w1"}]
    path = fixtures.write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        data.load_rows(path, data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0")))
    assert str(caught.value).startswith(f"{path}:2: field 'output': found an object, wanted text (of 3 rows 1 more")
    assert f"{path}:3" in str(caught.value)
    assert caught.value.hint is None  # its keys are those of the format, so another format is no way out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(QUESTION, say("assistant", "")), "an empty answer"),
        (chat(QUESTION, say("assistant", " \n ")), "an empty answer"),
        (chat(QUESTION, {"role": "assistant", "content": None}), "an empty answer"),
        (chat(QUESTION, {"role": "assistant", "content": math.nan}), "an empty answer"),
        (chat(QUESTION, {"role": "assistant"}), "an empty answer"),
        (chat(QUESTION, say("assistant", "", tool_calls=[])), "an empty answer"),
        (chat(), "no messages"),
        ({"conversations": []}, "no messages"),
        ({"instruction": "w1", "output": ""}, "an empty answer"),
        ({"instruction": "w1", "output": None}, "an empty answer"),
        ({"prompt": "w1", "completion": " "}, "an empty answer"),
        ({"text": ""}, "an empty text"),
        ({"text": None}, "an empty text"),
    ],
)
def test_a13_rows_without_an_answer_are_skipped_for_a_stated_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SkippedRow, match=f"^{reason}$"):
        read(row)


def test_a16_each_row_renders_its_own_tool_schema(tmp_path: Path) -> None:
    def tool(name: str, argument: str, kind: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {argument: {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rows = [
        chat(QUESTION, ANSWER, tools=[tool("f", "a", "string")]),
        chat(QUESTION, ANSWER, tools=[tool("g", "b", "integer")]),
    ]
    tokenizer = load_ours("qwen25")
    both = data.load_rows(fixtures.write_rows(tmp_path / "both.jsonl", rows), tokenizer)
    for index, row in enumerate(rows):
        alone = data.load_rows(fixtures.write_rows(tmp_path / f"{index}.jsonl", [row]), tokenizer)
        assert alone[0].tokens.tolist() == both[index].tokens.tolist()
        text = tokenizer.decode(both[index].tokens)
        assert json.dumps(rows[index]["tools"][0]) in text
        assert "null" not in text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": CALL | {"arguments": "{a:1"}}]}]},
        {"messages": [QUESTION, {"role": "assistant", "function_call": CALL | {"arguments": "{a:1"}}]},
        {
            "conversations": [
                {"from": "human", "value": "w1"},
                {"from": "function_call", "value": '{"name": "f", "arguments": "{a:1"}'},
            ]
        },
    ],
)
def test_arguments_that_are_no_json_are_not_taught(row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"\.arguments': found text that is not JSON, wanted an object"):
        read(row)
