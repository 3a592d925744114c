"""Any conversation, in any format, through any template: ids, targets and weights are those of a slow reference."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune.data.encoder import TRAIN_ON, RowEncoder
from optune.data.encoding import TrainOn
from tests.data.chat_templates import FAMILIES, load_ours
from tests.data.slow_reference import HIDE_CONTENT, MARKER, encode, reference
from tests.data.test_template import TOOLS

MARKERS = ["<|im_end|>", "<|im_start|>", "</s>", "[INST]", "<|eot_id|>\n", "<|User|>", "<end_of_turn>", "<|end|>"]
_PIECE = st.text(alphabet='ab ,.<|>"\\{}\n\té日🙂\u2028', max_size=6) | st.sampled_from(MARKERS)
_WORDS = st.lists(_PIECE, max_size=4).map("".join)
_SPACE = st.sampled_from(["", "", " ", "\n", "\n\n", " \n"])
_SAID = st.tuples(_SPACE, st.sampled_from("qQ7é"), _WORDS, st.sampled_from("xX9日"), _SPACE).map("".join)
"""What an assistant says: never blank."""
_VALUES = st.text(alphabet='ab é日"\\<>', max_size=5) | st.integers(-3, 99) | st.booleans() | st.none()
_ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "days", "é"]), _VALUES | st.lists(_VALUES, max_size=2), max_size=2
)
_WEIGHTS = st.sampled_from([None, None, None, 0, 1, 0.5, 0.25])


def _call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[dict[str, Any]]:
    """Turns as the family takes them: a system, questions (some empty), answers, rounds of tools, parts, weights."""
    family = FAMILIES[name]
    messages: list[dict[str, Any]] = []
    if family.takes_system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(_SAID)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(_WORDS)})
        if family.takes_tools and draw(st.booleans()):
            count = 1 if name in ("llama31", "harmony") else draw(st.integers(1, 2))
            calls = [_call(draw(_ARGUMENTS)) for _ in range(count)]
            # Beside a call, words are shown by some families only; what they hide is no part of an answer.
            said = "" if name in HIDE_CONTENT else draw(st.just("") | _SAID)
            messages.append(_weigh(draw, {"role": "assistant", "content": said, "tool_calls": calls}))
            messages += [{"role": "tool", "content": draw(_SAID), "tool_call_id": "abcdefghi"} for _ in calls]
        messages.append(_weigh(draw, {"role": "assistant", "content": draw(_SAID)}))
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(_WORDS)})
    return messages


def _weigh(draw: st.DrawFn, message: dict[str, Any]) -> dict[str, Any]:
    weight = draw(_WEIGHTS)
    return message if weight is None else message | {"weight": weight}


def check(name: str, row: dict[str, Any], expected: list[Any], train_on: TrainOn = "assistant", **how: Any) -> None:
    """`expected`: (ids, weights) of each row that comes out."""
    chunk = RowEncoder(load_ours(name), train_on=train_on, pairs=len(expected) > 1).encode([("rows:1", row)], **how)
    assert not chunk.errors, chunk.errors
    if not all(any(weights) for _, weights in expected):
        assert chunk.rows == []
        assert list(chunk.report.skipped) == ["no target"]
        return
    assert len(chunk.rows) == len(expected)
    for made, (ids, weights) in zip(chunk.rows, expected, strict=True):
        assert made.tokens.tolist() == ids
        assert made.trained.tolist() == [weight > 0 for weight in weights]
        scale = np.ones(len(ids)) if made.weights is None else made.weights
        assert (scale * made.trained).tolist() == weights


@pytest.mark.parametrize("name", FAMILIES)
@given(pick=st.data())
@settings(max_examples=14, deadline=None, derandomize=True)
def test_messages_become_what_the_slow_reference_says(name: str, pick: st.DataObject) -> None:
    messages = pick.draw(conversations(name))
    tools = TOOLS if FAMILIES[name].takes_tools and pick.draw(st.booleans()) else None
    train_on: TrainOn = pick.draw(st.sampled_from(TRAIN_ON))
    if train_on == "last_assistant":
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    if pick.draw(st.booleans()):
        messages = [_cut_in_parts(pick.draw, message) for message in messages]
    expected = reference(name, messages, tools, train_on=train_on)
    as_text = pick.draw(st.booleans())  # arguments as JSON text, as OpenAI's API gives them
    row = {"messages": [_with_text(message) if as_text else message for message in messages]}
    check(name, row | ({"tools": tools} if tools else {}), [expected], train_on)


def _cut_in_parts(draw: Any, message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] not in ("user", "assistant") or len(content) < 2 or message.get("tool_calls"):
        return message
    place = draw(st.integers(1, len(content) - 1))
    if any(match.start() < place < match.end() for match in MARKER.finditer(content)):
        return message  # the reference looks for markers in each part alone
    return message | {"content": [{"type": "text", "text": text} for text in (content[:place], content[place:])]}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def read_talk(row: dict[str, Any]) -> dict[str, Any]:
    """A user's own format."""
    return {"messages": row["talk"]}


@pytest.mark.parametrize("name", FAMILIES)
@given(pick=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_every_other_form_of_a_conversation_becomes_the_same(name: str, pick: st.DataObject) -> None:
    messages = pick.draw(conversations(name))
    expected = reference(name, messages)
    check(name, {"talk": messages}, [expected], format=read_talk)
    if not any(message.get("tool_calls") for message in messages):
        turns = [
            {"from": SHAREGPT[message["role"]], "value": message["content"]}
            | ({"weight": message["weight"]} if "weight" in message else {})
            for message in messages
        ]
        check(name, {"conversations": turns}, [expected])
    asked = messages if messages[-1]["role"] == "assistant" else messages[:-1]
    bare = [{key: value for key, value in message.items() if key != "weight"} for message in asked]
    prompt, answer = bare[:-1], bare[-1]
    silent = [message | ({"weight": 0} if message["role"] == "assistant" else {}) for message in prompt]
    chosen = reference(name, [*silent, answer])
    check(name, {"prompt": prompt, "completion": [answer]}, [chosen])
    other = answer | {"content": pick.draw(_SAID)}
    if other != answer:
        pair = [chosen, reference(name, [*silent, other])]
        row = {"prompt": prompt, "chosen": [answer], "rejected": [other], "score_chosen": 0.5}
        check(name, row, pair, format="preference")
        whole = {"chosen": [*prompt, answer], "rejected": [*prompt, other]}
        check(name, whole, pair, format="preference")
    turns = bare if bare[0]["role"] == "user" else bare[1:]
    if all(message["role"] == ("user", "assistant")[place % 2] for place, message in enumerate(turns)):
        said = [message["content"] for message in turns]
        history = [list(said[place : place + 2]) for place in range(0, len(said) - 2, 2)]
        row = {"instruction": said[-2], "output": said[-1], "history": history}
        row |= {"system": bare[0]["content"]} if bare[0]["role"] == "system" else {}
        check(name, row, [reference(name, bare)])


@given(pieces=st.tuples(_WORDS, _SAID), is_text=st.booleans(), train_all=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_texts_and_completions_become_what_the_slow_reference_says(
    pieces: tuple[str, str], is_text: bool, train_all: bool
) -> None:
    """Markers in them are text; the end token behind them is the only control token, and is trained."""
    text = "".join(pieces)
    ids, offsets = encode(text, MARKER.sub(lambda match: "\ue0ff" + match[0][1:], text))
    start = 0 if is_text or train_all else len(pieces[0])
    weights = [float(end > start) for _, end in offsets]
    row = {"text": text} if is_text else {"prompt": pieces[0], "completion": pieces[1]}
    end = load_ours("smollm2").token_to_id("<|im_end|>")
    expected = ([*ids, end], [0.0, *weights[1:], 1.0])
    check("smollm2", row, [expected], "all" if train_all else "assistant")
