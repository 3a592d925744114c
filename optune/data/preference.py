"""The format `preference`: a chosen and a rejected answer to one prompt.

The answers are texts or lists of messages. Where they are messages, the prompt is what both begin with, or stands in
`prompt` (a text or messages), in front of the answers or repeated in them. Scores and other columns count for nothing.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from optune.data.examples import EMPTY_ANSWER, NO_ANSWER, NO_PROMPT, SAME_ANSWERS, Pair, RowError, SkippedRow
from optune.data.fields import Row, is_null, take_text, want
from optune.data.messages import check_messages, says_nothing, take_tools
from optune.data.sources import describe

_WHOLE_WORDS = re.compile(r".*\s|", re.DOTALL)


def read_preference(row: Row) -> Pair:
    """`{"prompt"?, "chosen", "rejected", "tools"?}`: all texts, or the answers as lists of messages and the prompt as
    either. OpenAI's names (`input`, `preferred_output`, `non_preferred_output`) are read too."""
    if "preferred_output" in row and "chosen" not in row:
        row = _rename(row)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    for key, value in (("chosen", chosen), ("rejected", rejected)):
        if key not in row or not (isinstance(value, str | list) or is_null(value)):
            found = describe(value) if key in row else "nothing"
            raise RowError(f"field '{key}': found {found}, wanted text or a list of messages")
    if is_null(chosen) or is_null(rejected):
        raise SkippedRow(EMPTY_ANSWER)
    if type(chosen) is not type(rejected):
        raise RowError(f"field 'rejected': found {describe(rejected)}, wanted {describe(chosen)} as in field 'chosen'")
    is_chat = isinstance(chosen, list) or isinstance(row.get("prompt"), list)
    pair = _read_chats(row) if is_chat else _read_texts(row)
    if pair.chosen == pair.rejected:
        raise SkippedRow(SAME_ANSWERS)
    return pair


def _rename(row: Row) -> Row:
    given = row.get("input") or {}
    want(given, dict, "input", "an object with messages")
    named = {"prompt": given.get("messages"), "tools": given.get("tools"), "chosen": row["preferred_output"]}
    return named | ({"rejected": row["non_preferred_output"]} if "non_preferred_output" in row else {})


def _read_texts(row: Row) -> Pair:
    chosen, rejected = row["chosen"], row["rejected"]
    if is_null(row.get("prompt")):
        # Whole texts: what they share is the prompt. No word is cut in two, and a space goes with the word behind it.
        shared = "".join(one for one, _ in takewhile(_is_same, zip(chosen, rejected, strict=False)))
        prompt = "" if chosen == rejected else _WHOLE_WORDS.match(shared)[0].rstrip(" ")  # pyright: ignore[reportOptionalSubscript]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = take_text(row, "prompt")
    if not (chosen.strip() and rejected.strip()):
        raise SkippedRow(EMPTY_ANSWER)
    return Pair(prompt, chosen, rejected)


def _read_chats(row: Row) -> Pair:
    chosen, rejected = (
        check_messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value, key)
        for key, value in (("chosen", row["chosen"]), ("rejected", row["rejected"]))
    )
    prompt = row.get("prompt")
    if not (isinstance(prompt, str | list) or is_null(prompt)):
        raise RowError(f"field 'prompt': found {describe(prompt)}, wanted text or a list of messages")
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt.strip() else prompt or []
    given = check_messages(given, "prompt") if isinstance(given, list) else []
    shared = chosen[: _count_shared(chosen, rejected)]
    pair = Pair(_join_prompt(given, shared), chosen[len(shared) :], rejected[len(shared) :], take_tools(row))
    if not pair.prompt:
        raise SkippedRow(NO_PROMPT)
    for answer in (chosen[len(shared) :], rejected[len(shared) :]):
        spoken = [message for message in answer if message["role"] == "assistant"]
        if not spoken:
            raise SkippedRow(NO_ANSWER)
        if any(map(says_nothing, spoken)):
            raise SkippedRow(EMPTY_ANSWER)
    return pair


def _join_prompt(given: list[dict[str, Any]], shared: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt: the messages `given` as such, and those with which both answers begin, which may repeat them."""
    if shared[: len(given)] == given or (given and shared[-len(given) :] == given):
        return shared
    if not shared or given[-len(shared) :] == shared:
        return given
    if given[-1]["role"] == shared[0]["role"] == "user":
        raise RowError("field 'prompt': the answers begin with a question of their own that is not the prompt's")
    return given + shared


def _count_shared(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> int:
    """How many messages both begin with, before the last answer of either."""
    same = sum(1 for _ in takewhile(_is_same, zip(chosen, rejected, strict=False)))
    return min(same, *(_last_answer(messages) for messages in (chosen, rejected)))


def _last_answer(messages: list[dict[str, Any]]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))


def _is_same(pair: tuple[Any, Any]) -> bool:
    return pair[0] == pair[1]
