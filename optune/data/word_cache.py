"""Token ids of words that were seen before, so that a text is mostly looked up and seldom encoded.

The pre-tokenizers of byte-level tokenizers cut every text in front of a single space that stands between two characters
that are no white space: no part of their patterns goes on over such a space, and none looks back. What stands before
and behind it is then tokenised apart, so the ids of a text are those of its words behind one another, each with the
space in front of it. This holds for the tokenizers that `cuts_at_spaces` knows; the texts of all others are encoded
whole.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers

Locate = Callable[[int, int], tuple[int, int]]
_Stretch = tuple[int, list[str], list[Any]]
"""Where a piece of text starts, its words, and the ids of each."""

_MOST = 200_000
"""Words kept, some 30 MB of them."""
_LONGEST = 64
"""Characters of a word that is kept."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    # Llama 3, and Qwen 2 to 3, which takes digits one by one.
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
    # gpt-oss, Phi 4.
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
}
"""The patterns of `Split` pre-tokenizers that are known to cut at spaces, beside GPT-2's in `ByteLevel`."""


def cuts_at_spaces(backend: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a text are those of its words, as this module cuts them."""
    if getattr(backend.model, "dropout", None) is not None:
        return False
    for token in backend.get_added_tokens_decoder().values():
        is_blank = token.content.isspace()
        if token.lstrip or token.rstrip or token.single_word or (" " in token.content and not is_blank):
            return False
    normalizer, steps = _describe(backend.normalizer), _describe(backend.pre_tokenizer)
    if normalizer not in (None, {"type": "NFC"}) or steps is None:
        return False
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    return bool(steps) and all(map(_is_known, steps)) and any(map(_is_pattern, steps))


def _describe(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _is_known(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] == "Digits" or _is_pattern(step)


def _is_pattern(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return step["use_regex"]
    is_plain = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return is_plain and step["pattern"].get("Regex") in _PATTERNS


class WordCache:
    """Encodes texts as `backend` does. What it remembers changes no result and is left behind when it is pickled."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._can_cut = cuts_at_spaces(backend)
        self._control = _compile_added(backend)
        # Word → its ids as bytes of int32. The first word of a stretch carries a space in front, the last one a space
        # behind, which tells them from those inside: these begin and end with a character that is no white space.
        self._ids: dict[str, bytes] = {}
        self._located: dict[tuple[str, int, int], tuple[int, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return WordCache, (self._backend,)

    def encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, Locate]]:
        """For each text its ids, int32 and not to be written to, and the function that finds the tokens which cover
        characters `start` to `end`: first and one past last, equal where there is none."""
        if not self._can_cut or len(texts) == 1:
            # A text alone is encoded without waking the thread pool.
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False) if texts else []
            return [(np.array(encoding.ids, np.int32), _locate_by_encoding(encoding)) for encoding in encodings]
        if len(self._ids) > _MOST:
            self._ids.clear()
            self._located.clear()
        new: dict[str, None] = {}
        cut = [self._cut(text, new) for text in texts]
        encodings = self._backend.encode_batch(list(map(_text_of, new)), add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._ids[word] = array("i", encoding.ids).tobytes()
        rows = [self._join(stretches) for stretches in cut]
        for word in new:
            if len(word) > _LONGEST:
                del self._ids[word]
        return rows

    def _cut(self, text: str, new: dict[str, None]) -> list[_Stretch]:
        """The stretches of a text, an added token being one of its own; words that are not known are added to `new`."""
        stretches, start = [], 0
        known = self._ids.get
        for piece in self._control.split(text):
            if not piece:
                continue
            words = piece.split(" ")
            words[0] = f" {words[0]}"
            words[-1] += " "
            ids = list(map(known, words))
            if None in ids:
                # Between words that are known there is no white space but the one at which they are cut.
                unknown = [word for word, found in zip(words, ids, strict=True) if found is None]
                if any(map(_is_blank_edged, unknown)):
                    words = _join_blanks(words)
                    unknown = [word for word in words if word not in self._ids]
                new.update(dict.fromkeys(unknown))
                ids = []
            stretches.append((start, words, ids))
            start += len(piece)
        return stretches

    def _join(self, stretches: list[_Stretch]) -> tuple[np.ndarray, Locate]:
        for _, words, ids in stretches:
            if not ids:
                ids += map(self._ids.__getitem__, words)
        parts = [b"".join(ids) for _, _, ids in stretches]
        starts = [start for start, _, _ in stretches]

        def place(character: int) -> tuple[str, int, int, int]:
            """The word that holds a character, the tokens before it, its length as text, and the place in it."""
            index = bisect_right(starts, character) - 1
            start, words, ids = stretches[index]
            offset = character - start
            for number, word in enumerate(words):
                length = len(_text_of(word))
                if offset < length:
                    before = sum(map(len, parts[:index])) + sum(map(len, ids[:number]))
                    return word, before // 4, length, offset
                offset -= length
            raise IndexError(character)

        def locate(start: int, end: int) -> tuple[int, int]:
            if start >= end:
                return 0, 0
            word, before, length, offset = place(start)
            first = before + (self._locate_in(word, offset, length)[0] if offset else 0)
            word, before, _, offset = place(end - 1)
            return first, max(first, before + self._locate_in(word, 0, offset + 1)[1])

        return np.frombuffer(b"".join(parts), np.int32), locate

    def _locate_in(self, word: str, start: int, end: int) -> tuple[int, int]:
        """The tokens of a word that cover some of its characters; behind or ahead of all where there are none."""
        key = word, start, end
        if key not in self._located:
            encoding = self._backend.encode(_text_of(word), add_special_tokens=False)
            found = _locate_by_encoding(encoding)(start, end)
            self._located[key] = found if found != (0, 0) or not start else (len(encoding), len(encoding))
        return self._located[key]


def _compile_added(backend: tokenizers.Tokenizer) -> re.Pattern[str]:
    """A pattern that cuts a text as the tokenizer does before all else: at its added tokens, the longest first.

    Tokens that are looked for in normalised text only come second; where there are both kinds they are left alone.
    """
    added = list(backend.get_added_tokens_decoder().values())
    raw = [token for token in added if not token.normalized] or (added if backend.normalizer is None else [])
    longest_first = sorted((token.content for token in raw if token.content), key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _text_of(word: str) -> str:
    """A word as it stands in its text, with the space in front of it."""
    text = word[1:] if word[0] == " " else f" {word}"
    return text[:-1] if word[-1] == " " else text


def _is_blank_edged(word: str) -> bool:
    """Whether white space may stand at a cut beside the word, apart from the space that marks a first or last one."""
    if not word.strip():
        return True
    return (word[0] != " " and word[0].isspace()) or (word[-1] != " " and word[-1].isspace())


def _join_blanks(words: list[str]) -> list[str]:
    """The words with those joined between which the text is not cut."""
    joined, start = [], 0
    for index in range(1, len(words)):
        # An empty word, the other side of a second space, is white space too.
        if words[index - 1][-1:].strip() and words[index][:1].strip():
            joined.append(" ".join(words[start:index]) if index - start > 1 else words[start])
            start = index
    joined.append(" ".join(words[start:]))
    return joined


def _locate_by_encoding(encoding: tokenizers.Encoding) -> Locate:
    """Asks the encoding about the few characters at the boundaries; its list of all offsets is slow to copy."""

    def locate(start: int, end: int) -> tuple[int, int]:
        token_at = encoding.char_to_token
        first = next((t for place in range(start, end) if (t := token_at(place)) is not None), None)
        if first is None:
            return 0, 0
        last = next(t for place in range(end - 1, start - 1, -1) if (t := token_at(place)) is not None)
        # A character of several bytes may be several tokens.
        while last + 1 < len(encoding) and encoding.token_to_chars(last + 1)[0] < end:  # pyright: ignore[reportOptionalSubscript]
            last += 1
        return first, last + 1

    return locate
