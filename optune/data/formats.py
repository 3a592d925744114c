"""Data formats: pure functions from a row to what it says.

A format takes one JSON object and returns an `Example`: a `Chat` (goes through the chat template), `Segments` (plain
text, some of it trained), `Tokens` (ids as they are) or a `Pair` (two answers). It raises `RowError` for a row that is
broken and `SkippedRow` for one that has nothing to teach. To add a format: one function here, one entry in `FORMATS`
with the keys that give it away, and a fixture of two rows in tests/data/test_formats.py. A user's own format is any
function from a row to an example, or to a row in one of the formats here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from optune.data.examples import (
    EMPTY_ANSWER,
    LEFT_OUT,
    NO_ANSWER,
    SYSTEM_OUTSIDE,
    TWO_SYSTEMS,
    Chat,
    Example,
    Pair,
    RowError,
    Segments,
    SkippedRow,
    Tokens,
    leave_out,
)
from optune.data.fields import Row, is_null, parse_json, read_arguments, take_answer, take_list, take_text, want
from optune.data.messages import check_chat, take_tools
from optune.data.preference import read_preference
from optune.data.sources import describe
from optune.errors import DataError

__all__ = [
    "FORMATS",
    "NO_ANSWER",
    "Chat",
    "Example",
    "Format",
    "Pair",
    "RowError",
    "Segments",
    "SkippedRow",
    "Tokens",
    "detect_format",
    "fitting_formats",
    "get_format",
    "may_be_misread",
    "name_format",
]

Format = str | Callable[[Row], Any]
"""The name of a format, or a function of a row."""


def read_messages(row: Row) -> Chat:
    """OpenAI's form: `{"messages": [{"role", "content", "tool_calls"?, "weight"?, …}], "tools"?: […]}`."""
    chat = check_chat(take_list(row, "messages"), row)
    has_system = isinstance(row.get("system"), str) and row["system"].strip()
    return replace(chat, notes=(SYSTEM_OUTSIDE,)) if has_system else chat


_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip


def read_sharegpt(row: Row) -> Chat:
    """`{"conversations": [{"from": "human" | "gpt" | …, "value": …}], "system"?: …, "tools"?: …}`.

    A turn may also be written `{"role", "content"}`. The value of a `function_call` is one call, or a list of them.
    A first turn that repeats `system` is that system message.
    """
    messages: list[Any] = []
    for index, turn in enumerate(take_list(row, "conversations")):
        field = f"conversations[{index}]"
        want(turn, dict, field, "an object")
        name = "role" if "role" in turn and "from" not in turn else "from"
        role = _SHAREGPT_ROLES.get(turn[name]) if isinstance(turn.get(name), str) else None
        if role is None:
            raise RowError(
                f"field '{field}.{name}': found {turn.get(name)!s:.40}, wanted one of {', '.join(_SHAREGPT_ROLES)}"
            )
        value = turn.get("content" if name == "role" else "value")
        said = {"role": role, "content": value}
        if role == "function_call":
            said = {"role": "assistant", "tool_calls": _read_calls(value, f"{field}.value")}
        messages.append(said | {key: turn[key] for key in ("weight", "tool_calls", "tool_call_id") if key in turn})
    chat = check_chat(messages, row, "conversations")
    system = take_text(row, "system", is_optional=True)
    if not system or chat.messages[0] == {"role": "system", "content": system}:
        return chat
    notes = (TWO_SYSTEMS,) if chat.messages[0]["role"] == "system" else ()
    return Chat([{"role": "system", "content": system}, *chat.messages], chat.tools, notes)


def _read_calls(value: Any, field: str) -> list[dict[str, Any]]:
    given = parse_json(value)
    calls = []
    for call in given if isinstance(given, list) and given else [given]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise RowError(f"field '{field}': found {describe(call)}, wanted an object with name and arguments")
        function = {"name": call["name"], "arguments": read_arguments(call.get("arguments", {}), field)}
        calls.append({"type": "function", "function": function})
    return calls


def read_alpaca(row: Row) -> Chat:
    """`{"instruction", "input"?, "output", "system"?, "history"?: [[question, answer], …]}`.

    The question is the instruction, and below it, after an empty line, the input where there is one.
    """
    messages: list[Any] = []
    if system := take_text(row, "system", is_optional=True):
        messages.append({"role": "system", "content": system})
    for index, pair in enumerate([] if is_null(row.get("history")) else take_list(row, "history")):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"field 'history[{index}]': found {describe(pair)}, wanted a list of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction = take_text(row, "instruction")
    given = take_text(row, "input", is_optional=True)
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": take_answer(row, "output")})
    return check_chat(messages, row)


def read_completion(row: Row) -> Chat | Segments:
    """`{"prompt": text, "completion": text}`; the completion and the end token are trained.

    Both may be lists of messages instead; they go through the chat template as one, and what the assistant says in the
    prompt is not trained.
    """
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        prompt, completion = (check_chat(row[key], {}, key).messages for key in ("prompt", "completion"))
        return Chat([*map(leave_out, prompt), *completion], take_tools(row))
    prompt, completion = take_text(row, "prompt"), take_answer(row, "completion")
    if not completion.strip():
        raise SkippedRow(EMPTY_ANSWER)
    return Segments(((prompt, False), (completion, True)))


def read_text(row: Row) -> Segments:
    """`{"text": text}`; all of it and the end token are trained."""
    text = take_text(row, "text", is_optional="text" in row)
    if not text:
        raise SkippedRow("an empty text")
    return Segments(((text, True),))


def read_tokens(row: Row) -> Tokens:
    """`{"tokens" or "input_ids": [id, …], "labels"?: [id or -100, …]}`; labels are not shifted, -100 is not trained."""
    key = "tokens" if "tokens" in row else "input_ids"
    tokens = take_list(row, key)
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < 2**31)
        raise RowError(f"field '{key}': found {describe(wrong)} among the ids, wanted whole numbers from 0")
    if row.get("labels") is None:
        return Tokens(tokens, [True] * len(tokens))
    labels = take_list(row, "labels")
    if len(labels) != len(tokens):
        raise RowError(f"field 'labels': found {len(labels)} labels for {len(tokens)} ids, wanted as many")
    for index, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (token, -100):
            raise RowError(f"field 'labels[{index}]': wanted the id at the same place or -100")
    return Tokens(tokens, [label != -100 for label in labels])


def read_chosen(row: Row) -> Chat | Segments:
    """The prompt and the chosen answer of a pair, for recipes that train single answers. `auto` never takes it; it is
    asked for by `data.format={_target_: optune.data.formats.read_chosen}`."""
    return read_preference(row).halves()[0]


FORMATS: dict[str, tuple[Callable[[Row], Example], tuple[tuple[str, ...], ...]]] = {
    "messages": (read_messages, (("messages",),)),
    "sharegpt": (read_sharegpt, (("conversations",),)),
    "preference": (read_preference, (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))),
    "alpaca": (read_alpaca, (("instruction", "output"),)),
    "completion": (read_completion, (("prompt", "completion"),)),
    "tokens": (read_tokens, (("tokens",), ("input_ids",))),
    "text": (read_text, (("text",),)),
}
"""Format → its function and the sets of keys by which `auto` knows it. The first that fits is taken."""


def detect_format(row: Row) -> str:
    """The format whose keys the row has. Raises RowError, naming the keys found and wanted."""
    if fitting := fitting_formats(row):
        return fitting[0]
    known = "; ".join(f"{name}: {' + '.join(sets[0])}" for name, (_, sets) in FORMATS.items())
    raise RowError(f"no known format has the keys {', '.join(sorted(map(repr, row)))[:200]} ({known})")


def may_be_misread(row: Row, detected: str | None) -> bool:
    """Whether a row that `auto` takes for `detected` (None: that of its own keys) may be meant as another format."""
    fitting = fitting_formats(row)
    return len(fitting) > 1 or (detected is not None and detected not in fitting)


def fitting_formats(row: Row) -> list[str]:
    """All formats whose keys the row has, the one that `auto` takes first; where some have all their keys filled, those
    alone."""
    return _find_fitting(frozenset(row), frozenset([key for key, value in row.items() if not is_null(value)]))


@functools.lru_cache(256)  # The rows of a file are much alike.
def _find_fitting(present: frozenset[str], filled: frozenset[str]) -> list[str]:
    for keys in (filled, present):
        fitting = [name for name, (_, sets) in FORMATS.items() if any(keys.issuperset(each) for each in sets)]
        if fitting:
            return fitting
    return []


def get_format(format: Format) -> Callable[[Row], Example]:
    """The function of a format. A user's own is called with the row as a dict; it may return an example, a row in one
    of the formats here, or None for a row to leave out, and what it raises becomes a RowError."""
    if callable(format):
        return functools.partial(_read_own, format)
    if format not in FORMATS:
        raise DataError(f"{format!r} is none of auto, {', '.join(FORMATS)}", where="data.format")
    return FORMATS[format][0]


def name_format(format: Format) -> str:
    """The format as reports call it: its name, or the dotted name of a function."""
    if isinstance(format, str):
        return format
    function = format.func if isinstance(format, functools.partial) else format
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _read_own(format: Callable[[Row], Any], row: Row) -> Example:
    try:
        made = format(dict(row))
    except (RowError, SkippedRow):
        raise
    except (Exception, SystemExit) as error:  # A user's code: anything may come out of it.
        said = f": {error}" if str(error) else ""
        raise RowError(f"{name_format(format)} raised {type(error).__name__}{said}") from error
    if made is None:
        raise SkippedRow(LEFT_OUT)
    if isinstance(made, Example):
        return made
    if not isinstance(made, Mapping):
        raise RowError(f"{name_format(format)} returned {describe(made)}, wanted a row, an example or None")
    try:
        return FORMATS[detect_format(made)][0](made)
    except RowError as error:
        raise RowError(f"in what {name_format(format)} returned: {error}") from error
