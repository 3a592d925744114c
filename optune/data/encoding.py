"""From traced text to token ids, and from characters to the tokens that are trained.

A text is encoded once and whole, never in pieces, because tokens depend on their neighbours. The rule at a boundary: a
token belongs to a span when it covers at least one character of it. At the end of an answer stands a control token,
which is always a token of its own, so nothing straddles there; at the start a tokenizer that joins a space to the
following word counts the space with the word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from optune.data.control import PlainText
from optune.data.spans import Answer
from optune.data.traced import Traced, plain
from optune.data.word_cache import Locate, WordCache

TrainOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class Encoded:
    """A row as tokens, before it is cut to length.

    - `tokens` int32 and `trained` bool, of the same length; `trained[t]` says that token t is to be predicted.
    - `weights` float32 of the same length, or None where every trained token counts 1.
    - `locate(start, end)`: first and one-past-last token that cover characters of the text; equal where none does.
    - `begins`: whether the first token is a BOS, written or put.
    - `forged`, `stuck`: markers inside messages; `stuck` ones could not be encoded as text.
    """

    tokens: np.ndarray
    trained: np.ndarray
    weights: np.ndarray | None = None
    locate: Locate | None = None
    begins: bool = False
    forged: int = 0
    stuck: int = 0


def encode(
    texts: Sequence[Traced],
    words: WordCache,
    plain_text: PlainText,
    *,
    bos_id: int | None,
    adds_bos: bool,
    parse_special: bool = False,
) -> list[Encoded]:
    """Each text as one encoding, `words` knowing the tokenizer and what it has seen before.

    `adds_bos`: `bos_id` is put in front where the text does not begin with it already. `parse_special`: markers inside
    messages become control tokens; otherwise they stay text.
    """
    forged = [0 if parse_special else plain_text.find_forged(text) for text in texts]
    ordinary = [plain(text) for text, count in zip(texts, forged, strict=True) if not count]
    encodings = iter(words.encode(ordinary))
    rows = []
    for text, count in zip(texts, forged, strict=True):
        if count:
            tokens, offsets, stuck = plain_text.encode(text)
            rows.append(_finish(tokens, _locate_by_offsets(offsets), bos_id, adds_bos, count, stuck))
        else:
            rows.append(_finish(*next(encodings), bos_id, adds_bos))
    return rows


def mark_answers(
    encoded: Encoded, answers: Sequence[Answer], messages: Sequence[dict[str, Any]], train_on: TrainOn
) -> Encoded:
    """The row with its targets: the answers, the last one, or everything; `weight` of a message scales its answer."""
    if train_on == "last_assistant":
        answers = answers[-1:]
    trained = np.full(len(encoded.tokens), train_on == "all")
    weights = np.ones(len(encoded.tokens), np.float32)
    assert encoded.locate is not None
    for answer in answers:
        first, stop = encoded.locate(answer.start, answer.end)
        weight = np.float32(messages[answer.message].get("weight", 1))
        trained[first:stop] = weight > 0
        weights[first:stop] = weight
    return _with_targets(encoded, trained, weights)


def mark_spans(encoded: Encoded, spans: Sequence[tuple[int, int]], end_id: int | None) -> Encoded:
    """The row with the characters of `spans` as targets, and `end_id` put behind it as one more where it is given."""
    trained = np.zeros(len(encoded.tokens), bool)
    assert encoded.locate is not None
    for start, end in spans:
        first, stop = encoded.locate(start, end)
        trained[first:stop] = True
    if end_id is not None and not (len(encoded.tokens) and encoded.tokens[-1] == end_id):
        encoded = dataclasses.replace(encoded, tokens=np.append(encoded.tokens, np.int32(end_id)))
        trained = np.append(trained, True)
    return _with_targets(encoded, trained, None)


def _with_targets(encoded: Encoded, trained: np.ndarray, weights: np.ndarray | None) -> Encoded:
    # Nothing stands in front of the first token that could predict it.
    trained[:1] = False
    if weights is not None and np.all(weights[trained] == 1):
        weights = None
    return dataclasses.replace(encoded, trained=trained, weights=weights)


def _finish(
    tokens: np.ndarray,
    locate: Locate,
    bos_id: int | None,
    adds_bos: bool,
    forged: int = 0,
    stuck: int = 0,
) -> Encoded:
    begins = bos_id is not None and len(tokens) > 0 and tokens[0] == bos_id
    if adds_bos and bos_id is not None and not begins:
        tokens = np.concatenate([np.array([bos_id], np.int32), tokens])

        def shifted(start: int, end: int) -> tuple[int, int]:
            first, stop = locate(start, end)
            return first + 1, stop + 1

        return Encoded(tokens, np.zeros(len(tokens), bool), None, shifted, True, forged, stuck)
    return Encoded(tokens, np.zeros(len(tokens), bool), None, locate, bool(begins), forged, stuck)


def _locate_by_offsets(offsets: list[tuple[int, int]]) -> Locate:
    starts = np.array([start for start, _ in offsets])
    ends = np.array([end for _, end in offsets])

    def locate(start: int, end: int) -> tuple[int, int]:
        first = int(np.searchsorted(ends, start, side="right"))
        return first, max(first, int(np.searchsorted(starts, end, side="left")))

    return locate
