"""What a row says once its format is read: a conversation, text in pieces, token ids, or two answers to one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EMPTY_ANSWER = "an empty answer"
NO_ANSWER = "no answer"
NO_MESSAGES = "no messages"
NO_PROMPT = "no prompt"
SAME_ANSWERS = "chosen and rejected are the same"
LEFT_OUT = "left out by the format function"
TWO_SYSTEMS = "rows with a field 'system' and another system turn in front, both rendered"
SYSTEM_OUTSIDE = "rows with a field 'system' beside the messages, not rendered"


class RowError(Exception):
    """A row that is not what its format says; the text names field, found and wanted."""


class SkippedRow(Exception):  # noqa: N818
    """A well-formed row with nothing to learn from; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Chat:
    """A conversation as chat templates take it, and the tools that it may call. `notes`: what a person should know of
    the row; the report counts them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segments:
    """Text in pieces, (text, trained), joined without anything between and closed by the end token."""

    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Tokens:
    """Token ids, and which of them are trained."""

    tokens: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers to it, the better one first.

    Texts, or lists of messages as `Chat` has them; `tools` go with messages only. Each answer is rendered with the
    prompt as one whole, so that nothing stands between the two that would not stand there otherwise.
    """

    prompt: str | list[dict[str, Any]]
    chosen: str | list[dict[str, Any]]
    rejected: str | list[dict[str, Any]]
    tools: list[Any] | None = None

    def halves(self) -> tuple[Chat | Segments, Chat | Segments]:
        """The prompt with the chosen answer and with the rejected one; only the answers have targets."""
        return self._join(self.chosen), self._join(self.rejected)

    def _join(self, answer: str | list[dict[str, Any]]) -> Chat | Segments:
        if isinstance(self.prompt, str):
            assert isinstance(answer, str)
            return Segments(((self.prompt, False), (answer, True)))
        assert isinstance(answer, list)
        return Chat([*map(leave_out, self.prompt), *answer], self.tools)


Example = Chat | Segments | Tokens | Pair


def leave_out(message: dict[str, Any]) -> dict[str, Any]:
    """The message as part of a prompt: what the assistant said in it is not trained."""
    return message | {"weight": 0} if message["role"] == "assistant" else message
