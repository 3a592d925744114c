"""Where the answers stand in a rendered conversation.

An answer reaches from the place where the model starts to write, which is the end of the generation prompt, to the end
of its end-of-turn token. In a plain chat that is the message's content and the token after it; with tool calls or
reasoning it includes the frame that the template puts around them, because the model has to write that frame too.

`{% generation %}` tags in the template decide where there are any. Otherwise the trace of the rendering tells where the
content of each answer is, and the question is left how much of the template's own text before and after it belongs to
the answer. That is looked up in the template: what it writes last when the conversation stops before the answer
(with a generation prompt), and what it writes last when the conversation stops after it. Only these short texts at the
seams are compared, so templates that reorder, trim or drop earlier turns do no harm. Each seam is worked out once and
remembered by its text. What does not fit is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from optune.data.template import REASONING_FIELDS, ChatTemplate, join_parts
from optune.data.traced import DATA, FIRST_MESSAGE, GENERATED, TEMPLATE, Traced, plain, spans_of
from optune.errors import DataError

_TAGS_HINT = (
    "mark the answers in the template with {% generation %} … {% endgeneration %} and give it as data.chat_template"
)
_PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


Piece = tuple[int, int, int]
"""(start, end, origin) of a run of the rendered text."""


@dataclass(frozen=True)
class Answer:
    """Characters `start` to `end` of the rendered text are what the model writes as message `message`."""

    message: int
    start: int
    end: int


class AnswerFinder:
    """Finds answers in what `template` renders.

    `end_token` is the tokenizer's end token and `is_control` matches control tokens, both as text.
    """

    def __init__(self, template: ChatTemplate, *, end_token: str | None, is_control: re.Pattern[str]) -> None:
        self._template = template
        self._is_control = is_control
        self._starts: dict[tuple[Any, ...], int] = {}
        self._ends: dict[tuple[Any, ...], int] = {}
        self.end_tokens = tuple(token for token in (end_token, self._learn_end_token()) if token)

    def forget(self) -> None:
        """Forgets the seams that earlier conversations showed, so that what is found depends on none of them."""
        self._starts.clear()
        self._ends.clear()

    def find(self, messages: Sequence[dict[str, Any]], tools: Any, rendered: Traced) -> list[Answer]:
        """The answers of all assistant messages that the template shows, in order of place.

        Raises DataError, naming the template, where a span cannot be proven.
        """
        if self._template.has_generation_tags:
            return self._read_tags(messages, rendered)
        pieces = [(start, end, origin) for start, end, origin in spans_of(rendered) if origin >= DATA]
        answers = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            own = self._find_own(messages, index, tools, rendered, pieces)
            if not own:
                self._check_left_out(messages, index, rendered)
            elif any(pieces[place][2] != FIRST_MESSAGE + index for place in range(own[0], own[-1])):
                raise self._refusal(index, "its content stands in several places")
            else:
                before = pieces[own[0] - 1][1] if own[0] else 0
                after = pieces[own[-1] + 1][0] if own[-1] + 1 < len(pieces) else len(rendered)
                first, last = pieces[own[0]][0], pieces[own[-1]][1]
                text = plain(rendered)
                start = before + self._find_start(messages, index, tools, text[before:first])
                end = last + self._find_end(messages, index, tools, text[last:after])
                answers.append(Answer(index, start, end))
        return answers

    def _find_own(
        self, messages: Sequence[dict[str, Any]], index: int, tools: Any, rendered: Traced, pieces: list[Piece]
    ) -> list[int]:
        """The places among `pieces` of what message `index` says; not where a later message repeats a part of it, as
        the name of a called tool stands in front of the tool's result in some templates."""
        own = [place for place, piece in enumerate(pieces) if piece[2] == FIRST_MESSAGE + index]
        text = plain(rendered)
        seams = (text[pieces[one][1] : pieces[other][0]] for one, other in pairwise(own))
        if index == len(messages) - 1 or not any(self._is_control.search(seam) for seam in seams):
            return own
        alone = self._try_render(messages[: index + 1], tools)
        said = [] if alone is None else _texts(alone, FIRST_MESSAGE + index)
        return own[: len(said)] if said == [text[slice(*pieces[place][:2])] for place in own[: len(said)]] else own

    def _read_tags(self, messages: Sequence[dict[str, Any]], rendered: Traced) -> list[Answer]:
        """The spans between `{% generation %}` tags, without the white space that the template writes last in them."""
        joined: list[list[Piece]] = []
        for start, end, origin in spans_of(rendered):
            if origin & GENERATED:
                piece = (start, end, origin & ~GENERATED)
                touches = bool(joined) and joined[-1][-1][1] == start
                owners = {piece[2], *(other for _, _, other in joined[-1])} - {TEMPLATE, DATA} if touches else set()
                if touches and len(owners) <= 1:
                    joined[-1].append(piece)
                else:
                    joined.append([piece])
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        text, answers = plain(rendered), []
        for number, span in enumerate(joined):
            owner = next((origin - FIRST_MESSAGE for _, _, origin in span if origin >= FIRST_MESSAGE), None)
            if owner is None:
                owner = assistants[min(number, len(assistants) - 1)] if assistants else len(messages) - 1
            start, end, last = span[0][0], span[-1][1], span[-1]
            if last[2] < DATA:
                end = last[0] + len(text[last[0] : last[1]].rstrip())
            answers.append(Answer(owner, start, end))
        return answers

    def _find_start(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, before: str) -> int:
        """How many characters of `before`, the template's text in front of an answer, come ahead of its start."""
        previous = messages[index - 1]["role"] if index else None
        is_plain = _is_plain(messages[index])
        key = (before, previous, is_plain)
        if key not in self._starts:
            prompted = self._tail(messages[:index], tools, add_generation_prompt=True)
            silent = self._tail(messages[:index], tools)
            if prompted is None or silent is None:
                prompted = silent = None
            self._starts[key] = self._match_start(messages, index, tools, before, prompted, silent)
        return self._starts[key]

    def _match_start(
        self,
        messages: Sequence[dict[str, Any]],
        index: int,
        tools: Any,
        before: str,
        prompted: str | None,
        silent: str | None,
    ) -> int:
        if prompted is not None and prompted != silent:
            if before.startswith(prompted):
                return len(prompted)
            if prompted.startswith(before):  # The generation prompt says more than the turn: '<think>' of past turns.
                return len(before)
        header = self._learn_header()
        if header and before.count(header) == 1:
            return before.index(header) + len(header)
        if _is_plain(messages[index]):
            return len(before)
        # No generation prompt to go by: an answer of words in the same place shows where the header ends.
        # Some templates show the tools at the last question, which is another one while the conversation is shorter.
        simple = [*messages[:index], {"role": "assistant", "content": "answer"}]
        for rendered in (self._try_render(simple, tools), self._try_render(simple, None)):
            header = None if rendered is None else _text_before(rendered, FIRST_MESSAGE + index)
            if header is not None and before.startswith(header.rstrip()):
                return len(header) if before.startswith(header) else len(header.rstrip())
        raise self._refusal(index, "its start cannot be told from the template's own text")

    def _find_end(self, messages: Sequence[dict[str, Any]], index: int, tools: Any, after: str) -> int:
        """How many characters of `after`, the template's text behind an answer's content, belong to the answer."""
        is_last = index == len(messages) - 1
        key = (after, is_last, None if is_last else messages[index + 1]["role"])
        if key not in self._ends:
            tail = after if is_last else self._tail(messages[: index + 1], tools)
            length = self._match_end(after, tail)
            if length is None:
                raise self._refusal(index, "its end cannot be told from the template's own text")
            self._ends[key] = length
        return self._ends[key]

    def _match_end(self, after: str, tail: str | None) -> int | None:
        """The length of the end of turn in `after`, when a conversation that stops there ends in `tail`."""
        token_start, length = self._end_of_turn(tail or "")
        if tail is not None and after.startswith(tail[:length]):
            return length
        control = self._is_control.search(after)
        if control is None:
            return None
        # The last turn of a conversation may end in another token than the turns before it ('<|return|>', '<|end|>').
        is_swapped = (
            token_start < length and control.start() == token_start and after.startswith((tail or "")[:token_start])
        )
        return control.end() if is_swapped or control[0] in self.end_tokens else None

    def _end_of_turn(self, tail: str) -> tuple[int, int]:
        """Start and end of the end token in what the template writes after the last answer of a conversation.

        Where it is none of the known ones, all of that text but the white space at its end ends the turn.
        """
        known = [(tail.index(token), tail.index(token) + len(token)) for token in self.end_tokens if token in tail]
        if known:
            return min(known, key=lambda span: (span[0], -span[1]))
        length = len(tail.rstrip())
        last = [match for match in self._is_control.finditer(tail) if match.end() == length]
        return (last[0].start() if last else length, length)

    def _learn_end_token(self) -> str | None:
        """The control tokens with which the template ends an answer of words."""
        last = self._tail(_PROBE, None)
        longer = self._try_render([*_PROBE, _PROBE[0]], None)
        runs = [
            _first_run(self._is_control, text) for text in (last, longer and _text_after(longer, FIRST_MESSAGE + 1))
        ]
        # Two tokens may end a turn together; one that only ends conversations, or begins the next turn, is not of them.
        both = [one for one, other in zip(*runs, strict=False) if one == other]
        return "".join(both) or (runs[0][0] if runs[0] else None)

    def _learn_header(self) -> str | None:
        """The generation prompt: what `add_generation_prompt` adds after a question."""
        prompted = self._tail(_PROBE[:1], None, add_generation_prompt=True)
        silent = self._tail(_PROBE[:1], None)
        return (
            None if prompted is None or silent is None or not prompted.startswith(silent) else prompted[len(silent) :]
        )

    def _tail(
        self, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool = False
    ) -> str | None:
        rendered = self._try_render(messages, tools, add_generation_prompt=add_generation_prompt)
        return None if rendered is None else _text_after_last(rendered)

    def _try_render(
        self, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool = False
    ) -> Traced | None:
        """None where the template refuses this part of a conversation, which it may although it takes the whole."""
        try:
            return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None

    def _check_left_out(self, messages: Sequence[dict[str, Any]], index: int, rendered: Traced) -> None:
        """A template may leave a message out; one that shows it but hides its trace is refused."""
        content = join_parts(messages[index].get("content")).strip()
        if content and content in plain(rendered):
            shown_by_others = [join_parts(m.get("content")) for place, m in enumerate(messages) if place != index]
            if not any(content in other for other in shown_by_others):
                raise self._refusal(index, "the template changes its text in a way that cannot be followed")

    def _refusal(self, index: int, reason: str) -> DataError:
        return DataError(
            f"cannot prove which tokens are the answer in message {index + 1}: {reason} ({self._template.name})",
            hint=_TAGS_HINT,
        )


def _is_plain(message: dict[str, Any]) -> bool:
    """An answer of words alone: no tool calls, no reasoning."""
    return not any(message.get(field) for field in ("tool_calls", *REASONING_FIELDS))


def _text_after_last(rendered: Traced) -> str:
    """What the template wrote behind the last character that came from the row."""
    ends = [end for _, end, origin in spans_of(rendered) if origin & ~GENERATED >= DATA]
    return plain(rendered)[ends[-1] if ends else 0 :]


def _text_before(rendered: Traced, wanted: int) -> str | None:
    """What the template wrote in front of the first character with origin `wanted`."""
    before = 0
    for start, end, origin in spans_of(rendered):
        if origin & ~GENERATED == wanted:
            return plain(rendered)[before:start]
        if origin & ~GENERATED >= DATA:
            before = end
    return None


def _text_after(rendered: Traced, wanted: int) -> str:
    """What the template wrote between the characters with origin `wanted` and the next ones from the row."""
    text, spans = plain(rendered), [span for span in spans_of(rendered) if span[2] & ~GENERATED >= DATA]
    last = max((place for place, span in enumerate(spans) if span[2] & ~GENERATED == wanted), default=None)
    if last is None:
        return ""
    return text[spans[last][1] : spans[last + 1][0] if last + 1 < len(spans) else len(text)]


def _texts(rendered: Traced, wanted: int) -> list[str]:
    """The stretches with origin `wanted`."""
    return [plain(rendered)[start:end] for start, end, origin in spans_of(rendered) if origin & ~GENERATED == wanted]


def _first_run(is_control: re.Pattern[str], text: str | None) -> list[str]:
    """The first control token in a text and those that follow it without anything between."""
    run: list[str] = []
    match = is_control.search(text or "")
    while match:
        run.append(match[0])
        match = is_control.match(text or "", match.end())
    return run
