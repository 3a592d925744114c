"""Checking conversations: OpenAI's form of messages, with tool calls, tool results, parts and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from optune.data.examples import EMPTY_ANSWER, NO_MESSAGES, Chat, RowError, SkippedRow
from optune.data.fields import is_null, parse_json, read_arguments, want
from optune.data.sources import describe

MOST_WEIGHT = 10_000
"""Of a message: its targets count so many times as others."""

_ROLE = re.compile(r"[\w.-]+")


def check_chat(messages: list[Any], row: Mapping[str, Any], name: str = "messages") -> Chat:
    """The conversation, checked, and the row's `tools`; `name` is what the field is called in errors.

    Raises SkippedRow for no messages and for an assistant message that says nothing: its end token alone would be
    taught. Raises RowError for everything that is no message.
    """
    if not messages:
        raise SkippedRow(NO_MESSAGES)
    checked = check_messages(messages, name)
    if any(message["role"] == "assistant" and says_nothing(message) for message in checked):
        raise SkippedRow(EMPTY_ANSWER)
    return Chat(checked, take_tools(row))


def check_messages(messages: list[Any], name: str) -> list[dict[str, Any]]:
    """The messages as chat templates take them: empty keys dropped, arguments of calls as objects."""
    return [_check_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether a message has neither words nor tool calls."""
    content = message.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return not message.get("tool_calls") and not any(not isinstance(text, str) or text.strip() for text in texts)


def take_tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's `tools`, or the `functions` of OpenAI's older form as tools; None where there are none."""
    tools = parse_json(None if is_null(row.get("tools")) else row.get("tools"))
    if tools is not None:
        want(tools, list, "tools", "a list of tool descriptions")
        return tools or None
    functions = parse_json(None if is_null(row.get("functions")) else row.get("functions"))
    if functions is None:
        return None
    want(functions, list, "functions", "a list of function descriptions")
    return [{"type": "function", "function": function} for function in functions] or None


def _check_message(message: Any, field: str) -> dict[str, Any]:
    want(message, dict, field, "an object")
    role, content = message.get("role"), message.get("content")
    # Templates build control tokens out of the role, so it holds no marks of its own.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RowError(f"field '{field}.role': found {describe(role)}, wanted a word such as user or assistant")
    weight = message.get("weight")
    if weight is not None and not (type(weight) in (int, float) and 0 <= weight <= MOST_WEIGHT):
        is_number = type(weight) in (int, float) and weight == weight
        found = weight if is_number else describe(weight)
        raise RowError(f"field '{field}.weight': found {found!s:.40}, wanted a number from 0 to {MOST_WEIGHT:,}")
    checked = {key: value for key, value in message.items() if not is_null(value) and key != "content"}
    if role == "function":  # OpenAI's older name for the result of a tool
        checked["role"] = role = "tool"
    if isinstance(content, list):
        checked["content"] = [_check_part(part, f"{field}.content[{i}]") for i, part in enumerate(content)]
    elif isinstance(content, str) or (isinstance(content, dict) and role in ("tool", "ipython")):
        checked["content"] = content
    elif role != "assistant" or not is_null(content):
        raise RowError(f"field '{field}.content': found {describe(content)}, wanted text")
    _check_calls(checked, field)
    return checked


def _check_calls(message: dict[str, Any], field: str) -> None:
    """Checks `tool_calls` in place; a `function_call` of OpenAI's older form becomes the only one of them."""
    if "function_call" in message and not message.get("tool_calls"):
        want(message["function_call"], dict, f"{field}.function_call", "an object")
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if "tool_calls" not in message:
        return
    message["tool_calls"] = calls = parse_json(message["tool_calls"])
    want(calls, list, f"{field}.tool_calls", "a list")
    message["tool_calls"] = [_check_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _check_call(call: Any, field: str) -> dict[str, Any]:
    """Arguments come as JSON text from OpenAI's API; templates want the object."""
    want(call, dict, field, "an object")
    function = call.get("function", call)
    want(function, dict, f"{field}.function", "an object")
    if not isinstance(function.get("name"), str):
        raise RowError(f"field '{field}.function.name': found {describe(function.get('name'))}, wanted text")
    if "function" not in call:
        return dict(call) | {"arguments": read_arguments(call.get("arguments"), field)}
    arguments = read_arguments(function.get("arguments"), f"{field}.function")
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _check_part(part: Any, field: str) -> dict[str, Any]:
    want(part, dict, field, "an object")
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise RowError(f"field '{field}': found a part of type {part.get('type')!s:.40}, wanted text")
    return {"type": "text", "text": part["text"]}
