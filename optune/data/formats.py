"""Data formats: pure functions from a row to what it says.

A format takes one JSON object and returns a `Chat` (goes through the chat template), `Segments` (plain text, some of it
trained) or `Tokens` (ids as they are). It raises `RowError` for a row that is broken and `SkippedRow` for one that has
nothing to teach. To add a format: one function here, one entry in `FORMATS` with the keys that give it away, and a
fixture of two rows in tests/data/test_formats.py.

An empty cell is a key that is absent, null, NaN or (where it is optional) white space alone; all four mean the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optune.data.sources import describe
from optune.errors import DataError

Row = Mapping[str, Any]

EMPTY_ANSWER = "an empty answer"
NO_ANSWER = "no answer"
NO_MESSAGES = "no messages"


class RowError(Exception):
    """A row that is not what its format says; the text names field, found and wanted."""


class SkippedRow(Exception):  # noqa: N818
    """A well-formed row with nothing to learn from; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Chat:
    """A conversation as chat templates take it, and the tools that it may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Segments:
    """Text in pieces, (text, trained), joined without anything between and closed by the end token."""

    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Tokens:
    """Token ids, and which of them are trained."""

    tokens: list[int]
    trained: list[bool]


Example = Chat | Segments | Tokens


def read_messages(row: Row) -> Chat:
    """OpenAI's form: `{"messages": [{"role", "content", "tool_calls"?, "weight"?, …}], "tools"?: […]}`."""
    return _check_chat(_take_list(row, "messages"), row)


_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip


def read_sharegpt(row: Row) -> Chat:
    """`{"conversations": [{"from": "human" | "gpt" | …, "value": …}], "system"?: …, "tools"?: …}`."""
    messages: list[Any] = []
    if system := _take_text(row, "system", "system", is_optional=True):
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(_take_list(row, "conversations")):
        field = f"conversations[{index}]"
        _want(turn, dict, field, "an object")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
        if role is None:
            raise RowError(
                f"field '{field}.from': found {turn.get('from')!s:.40}, wanted one of {', '.join(_SHAREGPT_ROLES)}"
            )
        if role == "function_call":
            messages.append(
                {"role": "assistant", "tool_calls": [{"type": "function", "function": _read_call(turn, field)}]}
            )
            continue
        message = {"role": role, "content": turn.get("value")}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return _check_chat(messages, row)


def _read_call(turn: Row, field: str) -> dict[str, Any]:
    value = _parse_json(turn.get("value"))
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise RowError(f"field '{field}.value': found {describe(value)}, wanted an object with name and arguments")
    return {"name": value["name"], "arguments": _parse_json(value.get("arguments", {}))}


def read_alpaca(row: Row) -> Chat:
    """`{"instruction", "input"?, "output", "system"?, "history"?: [[question, answer], …]}`.

    The question is the instruction, and below it, after an empty line, the input where there is one.
    """
    messages: list[Any] = []
    if system := _take_text(row, "system", "system", is_optional=True):
        messages.append({"role": "system", "content": system})
    for index, pair in enumerate([] if _is_null(row.get("history")) else _take_list(row, "history")):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"field 'history[{index}]': found {describe(pair)}, wanted a list of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction = _take_text(row, "instruction", "instruction")
    given = _take_text(row, "input", "input", is_optional=True)
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": _take_answer(row, "output")})
    return _check_chat(messages, row)


def read_completion(row: Row) -> Segments:
    """`{"prompt": text, "completion": text}`; the completion and the end token are trained."""
    prompt, completion = _take_text(row, "prompt", "prompt"), _take_answer(row, "completion")
    if not completion.strip():
        raise SkippedRow(EMPTY_ANSWER)
    return Segments(((prompt, False), (completion, True)))


def read_text(row: Row) -> Segments:
    """`{"text": text}`; all of it and the end token are trained."""
    text = _take_text(row, "text", "text", is_optional="text" in row)
    if not text:
        raise SkippedRow("an empty text")
    return Segments(((text, True),))


def read_tokens(row: Row) -> Tokens:
    """`{"tokens" or "input_ids": [id, …], "labels"?: [id or -100, …]}`; labels are not shifted, -100 is not trained."""
    key = "tokens" if "tokens" in row else "input_ids"
    tokens = _take_list(row, key)
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < 2**31)
        raise RowError(f"field '{key}': found {describe(wrong)} among the ids, wanted whole numbers from 0")
    if row.get("labels") is None:
        return Tokens(tokens, [True] * len(tokens))
    labels = _take_list(row, "labels")
    if len(labels) != len(tokens):
        raise RowError(f"field 'labels': found {len(labels)} labels for {len(tokens)} ids, wanted as many")
    for index, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (token, -100):
            raise RowError(f"field 'labels[{index}]': wanted the id at the same place or -100")
    return Tokens(tokens, [label != -100 for label in labels])


def read_preference(row: Row) -> Example:
    raise RowError("rows of chosen and rejected answers (format preference) cannot be trained yet")


FORMATS: dict[str, tuple[Callable[[Row], Example], tuple[tuple[str, ...], ...]]] = {
    "messages": (read_messages, (("messages",),)),
    "sharegpt": (read_sharegpt, (("conversations",),)),
    "preference": (read_preference, (("chosen", "rejected"),)),
    "alpaca": (read_alpaca, (("instruction", "output"),)),
    "completion": (read_completion, (("prompt", "completion"),)),
    "tokens": (read_tokens, (("tokens",), ("input_ids",))),
    "text": (read_text, (("text",),)),
}
"""Format → its function and the sets of keys by which `auto` knows it. The first that fits is taken."""


def detect_format(row: Row) -> str:
    """The format whose keys the row has. Raises RowError, naming the keys found and wanted."""
    if fitting := _fitting_formats(row):
        return fitting[0]
    known = "; ".join(f"{name}: {' + '.join(sets[0])}" for name, (_, sets) in FORMATS.items() if name != "preference")
    raise RowError(f"no known format has the keys {', '.join(sorted(map(repr, row)))[:200]} ({known})")


def may_be_misread(row: Row, detected: str | None) -> bool:
    """Whether a row that `auto` takes for `detected` (None: that of its own keys) may be meant as another format."""
    fitting = _fitting_formats(row)
    return len(fitting) > 1 or (detected is not None and detected not in fitting)


def _fitting_formats(row: Row) -> list[str]:
    return [name for name, (_, sets) in FORMATS.items() if any(all(key in row for key in keys) for keys in sets)]


def get_format(name: str) -> Callable[[Row], Example]:
    if name not in FORMATS:
        raise DataError(f"{name!r} is none of auto, {', '.join(FORMATS)}", where="data.format")
    return FORMATS[name][0]


def _check_chat(messages: list[Any], row: Row) -> Chat:
    if not messages:
        raise SkippedRow(NO_MESSAGES)
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for message in checked:
        content = message.get("content")
        is_empty = content is None or (isinstance(content, str) and not content.strip())
        if message["role"] == "assistant" and is_empty and not message.get("tool_calls"):
            raise SkippedRow(EMPTY_ANSWER)
    tools = _parse_json(None if _is_null(row.get("tools")) else row.get("tools"))
    if tools is not None:
        _want(tools, list, "tools", "a list of tool descriptions")
    return Chat(checked, tools or None)


_ROLE = re.compile(r"[\w.-]+")


def _check_message(message: Any, field: str) -> dict[str, Any]:
    _want(message, dict, field, "an object")
    role, content = message.get("role"), message.get("content")
    # Templates build control tokens out of the role, so it holds no marks of its own.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RowError(f"field '{field}.role': found {describe(role)}, wanted a word such as user or assistant")
    checked = {key: value for key, value in message.items() if not _is_null(value) and key != "content"}
    if isinstance(content, list):
        checked["content"] = "".join(_take_part(part, f"{field}.content[{i}]") for i, part in enumerate(content))
    elif isinstance(content, str) or (isinstance(content, dict) and role in ("tool", "ipython")):
        checked["content"] = content
    elif role != "assistant" or not _is_null(content):
        raise RowError(f"field '{field}.content': found {describe(content)}, wanted text")
    if "tool_calls" in checked:
        _want(checked["tool_calls"], list, f"{field}.tool_calls", "a list")
        checked["tool_calls"] = [
            _check_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(checked["tool_calls"])
        ]
    weight = checked.get("weight", 1)
    if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
        raise RowError(f"field '{field}.weight': found {describe(weight)}, wanted a number from 0")
    return checked


def _check_call(call: Any, field: str) -> dict[str, Any]:
    """Arguments come as JSON text from OpenAI's API; templates want the object."""
    _want(call, dict, field, "an object")
    function = call.get("function", call)
    _want(function, dict, f"{field}.function", "an object")
    if not isinstance(function.get("name"), str):
        raise RowError(f"field '{field}.function.name': found {describe(function.get('name'))}, wanted text")
    if "function" not in call:
        return dict(call) | {"arguments": _parse_json(call.get("arguments"))}
    return dict(call) | {"function": dict(function) | {"arguments": _parse_json(function.get("arguments"))}}


def _take_part(part: Any, field: str) -> str:
    _want(part, dict, field, "an object")
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise RowError(f"field '{field}': found a part of type {part.get('type')!s:.40}, wanted text")
    return part["text"]


def _take_text(row: Row, key: str, field: str, *, is_optional: bool = False) -> str:
    value = row.get(key)
    if isinstance(value, str):
        return value if value.strip() or not is_optional else ""
    if is_optional and _is_null(value):
        return ""
    found = "nothing" if key not in row else describe(value)
    raise RowError(f"field '{field}': found {found}, wanted text")


def _take_answer(row: Row, key: str) -> str:
    """The answer; null counts as empty, a missing key is an error."""
    return "" if key in row and _is_null(row[key]) else _take_text(row, key, key)


def _take_list(row: Row, key: str) -> list[Any]:
    value = row.get(key)
    found = "nothing" if key not in row else describe(value)
    if not isinstance(value, list):
        raise RowError(f"field '{key}': found {found}, wanted a list")
    return value


def _want(value: Any, kind: type, field: str, wanted: str) -> None:
    if not isinstance(value, kind):
        raise RowError(f"field '{field}': found {describe(value)}, wanted {wanted}")


def _is_null(value: Any) -> bool:
    return value is None or value != value


def _parse_json(value: Any) -> Any:
    """JSON text as the value that it stands for; anything else, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
