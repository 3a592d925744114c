"""Control tokens, and text that looks like one.

A control token is an added token that the tokenizer calls special, or that the chat template writes itself. Written by
the template it is one token. Inside a message it is text: `<|im_end|>` in a question is seven characters and more, so
that nobody forges a turn and no harmless document about chat formats breaks a row. One exception: marks such as
`<think>`, which are not special and no part of a plain chat, are tokens in an answer, because the model writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from optune.data.traced import DATA, FIRST_MESSAGE, GENERATED, Traced, concat, plain, spans_of
from optune.errors import DataError

_FENCE = "\U0010fffc"
"""A private character that stands around the number of a control token while a text is encoded."""


def compile_control(
    added: Iterable[tokenizers.AddedToken], literals: str, end_token: str | None = None
) -> re.Pattern[str]:
    """A pattern that matches every control token, the longest first.

    `literals` is the text that the chat templates write. An added token that is neither special nor written by a
    template is ordinary vocabulary, and so is one of white space.
    """
    tokens = {
        token.content for token in added if token.special or (token.content in literals and not token.content.isspace())
    } | {end_token or ""}
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class PlainText:
    """Encodes texts in which some markers are control tokens and others are text, in one encoding each.

    The second tokenizer that this takes is made when the first such text comes: it is the model's own, with each
    control token under a private name. The template's markers are given these names before encoding, so that all other
    text, markers included, goes the way of ordinary text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        added: Mapping[int, tokenizers.AddedToken],
        is_control: re.Pattern[str],
    ) -> None:
        self._backend = backend
        self._is_control = is_control
        self._ids = {token.content: number for number, token in added.items() if is_control.fullmatch(token.content)}
        self._second: tokenizers.Tokenizer | None = None
        self._id_map: dict[int, int] = {}
        self.control_ids = frozenset(self._ids.values())

    def find_forged(self, text: Traced) -> int:
        """How many markers in the text are not the template's alone."""
        own = _template_spans(text)
        return sum(
            not any(start <= match.start() and match.end() <= end for start, end in own)
            for match in self._is_control.finditer(plain(text))
        )

    def leaks(self, text: Traced) -> bool:
        """Whether a marker of the row, fenced by `fence_markers`, stands in the text as if the template wrote it."""
        return any(match.string.startswith(_FENCE, match.end()) for _, match in self._genuine(text))

    def encode(self, text: Traced) -> tuple[np.ndarray, list[tuple[int, int]], int]:
        """(ids, character offsets in `text`, markers that stayed control tokens because nothing else spells them)."""
        second = self._make_second() if self._second is None else self._second
        given = plain(text)
        if _FENCE in given:
            raise DataError("the row holds text of control tokens together with the private character U+10FFFC")
        pieces, shifts, cursor, shift = [], [(0, 0)], 0, 0
        for start, match in self._genuine(text):
            name = _private_name(match[0], self._ids)
            pieces += [given[cursor:start], name]
            cursor = start + len(match[0])
            shift += len(match[0]) - len(name)
            shifts.append((cursor - shift, shift))
        encoding = second.encode("".join([*pieces, given[cursor:]]), add_special_tokens=False)
        ids = np.array([self._id_map.get(number, number) for number in encoding.ids], np.int32)
        offsets = _shift_back(encoding.offsets, shifts)
        genuine = [start for start, _ in self._genuine(text)]
        stuck = sum(
            # An unknown word is a control token too ('<unk>'), but no marker.
            number in self.control_ids
            and self._is_control.search(given, start, end) is not None
            and not any(start <= place < end for place in genuine)
            for number, (start, end) in zip(ids.tolist(), offsets, strict=True)
        )
        return ids, offsets, stuck

    def _genuine(self, text: Traced) -> list[tuple[int, re.Match[str]]]:
        given = plain(text)
        return [
            (start + match.start(), match)
            for start, end in _template_spans(text)
            for match in self._is_control.finditer(given[start:end])
            if match[0] in self._ids
        ]

    def _make_second(self) -> tokenizers.Tokenizer:
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._ids:
                token |= {"content": _private_name(token["content"], self._ids), "normalized": False}
        second = tokenizers.Tokenizer.from_str(json.dumps(description))
        for token in self._backend.get_added_tokens_decoder().values():
            name = _private_name(token.content, self._ids) if token.content in self._ids else token.content
            ours, theirs = second.token_to_id(name), self._backend.token_to_id(token.content)
            if ours is not None and theirs is not None:
                self._id_map[ours] = theirs
        clash = [
            number
            for number in self._id_map
            if (token := self._backend.model.id_to_token(number)) is not None and second.token_to_id(token) != number
        ]
        if clash:
            raise DataError(f"the vocabulary has gaps (id {clash[0]}), so markers in messages cannot be kept as text")
        self._second = second
        return second


def release_spoken(text: Traced, messages: Sequence[Mapping[str, Any]], is_spoken: re.Pattern[str]) -> Traced:
    """The text with the markers that match `is_spoken` in what the assistant says as if the template had written them.

    Markers in tool calls stay text.
    """
    pieces, given = [], plain(text)
    for start, end, origin in spans_of(text):
        index, cursor = (origin & ~GENERATED) - FIRST_MESSAGE, start
        says_words = index >= 0 and messages[index]["role"] == "assistant" and not messages[index].get("tool_calls")
        for match in is_spoken.finditer(given[start:end]) if says_words else ():
            pieces += [text[cursor : start + match.start()], Traced(match[0])]
            cursor = start + match.end()
        pieces.append(text[cursor:end])
    released = concat(pieces)
    return released if isinstance(released, Traced) else text


def fence_markers(value: Any, is_control: re.Pattern[str]) -> Any | None:
    """A copy of a JSON value with a private character behind each marker in its strings; None where there is none.

    A template copies the fence along with the marker, which shows markers whose trace it loses.
    """
    count = 0

    def visit(item: Any) -> Any:
        nonlocal count
        if isinstance(item, str):
            fenced, added = is_control.subn(lambda match: match[0] + _FENCE, item)
            count += added
            return fenced
        if isinstance(item, list | tuple):
            return [visit(part) for part in item]
        return {key: visit(part) for key, part in item.items()} if isinstance(item, dict) else item

    copy = visit(value)
    return copy if count else None


def _private_name(token: str, ids: Mapping[str, int]) -> str:
    return f"{_FENCE}{ids[token]}{_FENCE}"


def _template_spans(text: Traced) -> list[tuple[int, int]]:
    """The stretches written by the template, in and out of its generation tags alike."""
    joined: list[tuple[int, int]] = []
    for start, end, origin in spans_of(text):
        if origin & ~GENERATED >= DATA:
            continue
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _shift_back(offsets: list[tuple[int, int]], shifts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets in the text with private names as offsets in the text itself. `shifts`: (from position, characters)."""
    positions = np.array([position for position, _ in shifts])
    amounts = np.array([amount for _, amount in shifts])
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    starts = pairs[:, 0] + amounts[np.searchsorted(positions, pairs[:, 0], side="right") - 1]
    ends = pairs[:, 1] + amounts[np.searchsorted(positions, pairs[:, 1], side="right") - 1]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
