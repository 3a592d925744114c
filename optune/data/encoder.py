"""From rows as files hold them to tokens with their targets: a pure function of a chunk of rows.

`RowEncoder` knows a tokenizer and the options of the data section and nothing of files, so it may be sent to worker
processes and used by readers that never end. A chunk's result does not depend on the chunks before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from optune.data.encoding import Encoded, TrainOn, mark_answers, mark_spans
from optune.data.formats import (
    NO_ANSWER,
    Chat,
    Example,
    Format,
    Pair,
    RowError,
    Segments,
    SkippedRow,
    Tokens,
    detect_format,
    fitting_formats,
    get_format,
    may_be_misread,
    name_format,
)
from optune.data.rows import Report, Row, TooLong
from optune.data.sources import BadRow
from optune.data.spans import Answer
from optune.data.tokenizer import Tokenizer
from optune.data.traced import DATA, FIRST_MESSAGE, GENERATED, Traced, concat, runs_of
from optune.errors import DataError

Truncation = Literal["drop", "error", "truncate_right", "truncate_left"]
TRUNCATIONS = ("drop", "error", "truncate_right", "truncate_left")
NO_STOP = "no target is an end-of-turn token, so the model does not learn to stop"
TRAIN_ON = ("assistant", "last_assistant", "all")


@dataclass
class EncodedChunk:
    """What became of a chunk of rows.

    - `rows`: the kept ones, in order.
    - `report`: rows read, skips and notes; sums over tokens are left to `Rows`.
    - `chats`: how many conversations there were.
    - `errors`: a DataError for each row that cannot be used, `where` naming it.
    - `format`: the format at the end of the chunk; None while no row has told it.
    """

    rows: list[Row] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    errors: list[DataError] = field(default_factory=list)
    chats: int = 0
    format: str | None = None


@dataclass(frozen=True)
class _Prepared:
    """A row on its way: its text with what is needed to mark the targets once it is tokens."""

    where: str
    example: Chat | Segments | Tokens
    text: Traced | None = None
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class RowEncoder:
    """Encodes chunks of rows; the options are those of `load_rows`. Can be pickled. With `pairs` each row becomes two,
    the chosen answer and behind it the rejected one, or none.

    Raises DataError for an option that does not exist.
    """

    tokenizer: Tokenizer
    max_length: int | None = None
    truncation: Truncation = "drop"
    train_on: TrainOn = "assistant"
    parse_special: bool = False
    embedding_rows: int | None = None
    pairs: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("truncation", self.truncation, TRUNCATIONS),
            ("train_on", self.train_on, TRAIN_ON),
        ):
            if value not in allowed:
                raise DataError(f"{value!r} is none of {', '.join(allowed)}", where=f"data.{name}")

    def encode(
        self, rows: Sequence[tuple[str, Any]], format: Format = "auto", *, source: str = "", detected: str | None = None
    ) -> EncodedChunk:
        """The rows of one source, each with its place (`file:line`); a `BadRow` stands for one that cannot be read.

        `format`: a name in `formats.FORMATS`, a function of a row, or `auto`: the first row that tells its format
        decides for those behind it; `detected` is what an earlier chunk of the source has told (see `first_format`).
        `source` is the name under which the report gives the format. Broken rows are collected; DataError is raised for
        a wrong `format` alone.
        """
        read = None if format == "auto" else get_format(format)
        if format == "preference" and not self.pairs:
            raise _refuse_pairs("data.format")
        chunk = EncodedChunk(format=detected if format == "auto" else name_format(format))
        self.tokenizer.forget_seams()
        prepared = []
        for where, row in rows:
            chunk.report.read(where)
            is_doubtful = format == "auto" and isinstance(row, dict) and may_be_misread(row, chunk.format)
            hint = "the format is told by the first row; data.format names another" if is_doubtful else None
            with _Collecting(chunk, where, hint):
                if isinstance(row, BadRow):
                    raise RowError(row.problem)
                chunk.format = chunk.format or detect_format(row)
                chunk.report.formats.setdefault(source, chunk.format)
                if is_doubtful and (others := [name for name in fitting_formats(row) if name != chunk.format]):
                    chunk.report.note(f"rows with keys of {' and '.join(others)} too, read as {chunk.format}", where)
                prepared += self._prepare_all(chunk, where, (read or get_format(chunk.format))(row))
        if not chunk.errors:
            self._encode(chunk, prepared)
        for row in chunk.rows:
            chunk.report.keep(row.where, len(row.tokens), int(row.trained.sum()))
        return chunk

    def _prepare_all(self, chunk: EncodedChunk, where: str, example: Example) -> list[_Prepared]:
        """What becomes a row each: the example, or both halves of a pair."""
        if isinstance(example, Pair) != self.pairs:
            if self.pairs:
                raise RowError("holds no chosen and rejected answer, which this recipe trains")
            raise _refuse_pairs()
        halves = example.halves() if isinstance(example, Pair) else (example,)
        return [self._prepare(chunk, where, half) for half in halves]

    def _prepare(self, chunk: EncodedChunk, where: str, example: Chat | Segments | Tokens) -> _Prepared:
        if isinstance(example, Tokens):
            if example.tokens and max(example.tokens) >= self.tokenizer.vocab_size:
                raise RowError(f"found the id {max(example.tokens)}, the vocabulary has {self.tokenizer.vocab_size}")
            return _Prepared(where, example)
        if isinstance(example, Segments):
            text = concat(Traced(piece, ((len(piece), DATA),)) for piece, _ in example.pieces)
            return _Prepared(where, example, text if isinstance(text, Traced) else Traced(text))
        messages, tools = example.messages, example.tools
        if self.train_on != "all" and not any(message["role"] == "assistant" for message in messages):
            raise SkippedRow(NO_ANSWER)
        text = self.tokenizer.render_traced(messages, tools, parse_special=self.parse_special)
        chunk.chats += 1
        if day := self.tokenizer.printed_date(tools):
            chunk.report.note(f"rows whose chat template may print the date, here {day} (data.template_date)", where)
        for note in example.notes:
            chunk.report.note(note, where)
        _note_left_out(chunk.report, where, example, text)
        wants_answers = self.train_on != "all" or any("weight" in message for message in messages)
        answers = tuple(self.tokenizer.find_answers(messages, tools, text)) if wants_answers else ()
        return _Prepared(where, example, self.tokenizer.release_spoken(text, messages, tools), answers)

    def _encode(self, chunk: EncodedChunk, prepared: list[_Prepared]) -> None:
        texts = [row.text for row in prepared if row.text is not None]
        encoded = iter(self.tokenizer.encode_traced(texts, parse_special=self.parse_special))
        size = 2 if self.pairs else 1
        for start in range(0, len(prepared), size):
            found = [(row, next(encoded) if row.text is not None else None) for row in prepared[start : start + size]]
            with _Collecting(chunk, prepared[start].where):
                marked = [(row.where, self._mark(chunk.report, row, text)) for row, text in found]
                chunk.rows += [self._fit(chunk.report, where, row) for where, row in marked]

    def _mark(self, report: Report, row: _Prepared, encoded: Encoded | None) -> Encoded:
        if encoded is None:
            assert isinstance(row.example, Tokens)
            trained = np.array(row.example.trained, bool)
            trained[:1] = False
            return Encoded(np.array(row.example.tokens, np.int32), trained)
        if encoded.stuck:
            report.note("rows with text of control tokens that this tokenizer cannot read as text", row.where)
        elif encoded.forged:
            report.note("rows with text of control tokens inside, read as text", row.where)
        if isinstance(row.example, Chat):
            return mark_answers(encoded, row.answers, row.example.messages, self.train_on)
        assert isinstance(row.example, Segments)
        spans, start = [], 0
        for piece, is_trained in row.example.pieces:
            if is_trained or self.train_on == "all":
                spans.append((start, start + len(piece)))
            start += len(piece)
        return mark_spans(encoded, spans, self.tokenizer.eos_id)

    def _fit(self, report: Report, where: str, encoded: Encoded) -> Row:
        """The row within the limits of length and embedding. Raises for one that has nothing to train within them."""
        limit, rows = self.max_length, self.embedding_rows
        reason = "no target"
        highest = int(encoded.tokens.max(initial=0))
        if rows is not None and highest >= rows:
            raise DataError(
                f"the token {self.tokenizer.decode([highest])!r} has the id {highest}, and the model's embedding has "
                f"{rows} rows",
                hint="a token was added to the tokenizer alone: resize the model's embedding and save it, then train",
            )
        if limit is not None and len(encoded.tokens) > limit:
            encoded = self._cut(report, encoded, limit)
            reason = f"no target within max_length={limit}"
        if not encoded.trained.any():
            raise SkippedRow(reason)
        return Row(encoded.tokens, encoded.trained, where, encoded.weights)

    def _cut(self, report: Report, encoded: Encoded, limit: int) -> Encoded:
        length, targets = len(encoded.tokens), int(encoded.trained.sum())
        if self.truncation == "drop":
            report.too_long.merge(TooLong(1, length, length, targets, length))
            raise SkippedRow(f"longer than max_length={limit}")
        if self.truncation == "error":
            raise RowError(f"{length} tokens, more than max_length={limit} (data.truncation is error)")
        kept = np.arange(limit)
        if self.truncation == "truncate_left":
            kept = np.arange(length - limit, length)
            if encoded.begins:
                kept[0] = 0
        weights = None if encoded.weights is None else encoded.weights[kept]
        trained = encoded.trained[kept]
        trained[:1] = False
        lost = length - limit if trained.any() else length  # a row without a target is left out whole
        report.too_long.merge(TooLong(1, length, lost, targets - int(trained.sum()), length))
        return dataclasses.replace(encoded, tokens=encoded.tokens[kept], trained=trained, weights=weights)


def _refuse_pairs(where: str | None = None) -> DataError:
    return DataError(
        "rows of chosen and rejected answers (format preference) cannot be trained by this recipe",
        where=where,
        hint="it trains single answers: data.format={_target_: optune.data.formats.read_chosen} takes the chosen ones, "
        "and a recipe of yours gets pairs from data.load_pairs (docs/data.md)",
    )


def first_format(rows: Sequence[tuple[str, Any]]) -> str | None:
    """The format that `auto` takes from these rows, None where none of them tells one."""
    for _, row in rows:
        if not isinstance(row, BadRow):
            try:
                return detect_format(row)
            except RowError:
                continue
    return None


def _note_left_out(report: Report, where: str, chat: Chat, text: Traced) -> None:
    shown = {origin & ~GENERATED for _, origin in runs_of(text)}
    hidden_roles = set()
    for index, message in enumerate(chat.messages):
        says = [message.get("content"), message.get("tool_calls")]
        if any(part and not str(part).isspace() for part in says) and FIRST_MESSAGE + index not in shown:
            hidden_roles.add(message["role"])
    for role in sorted(hidden_roles):
        report.note(f"the chat template leaves out messages of role {role}", where)
    if chat.tools and DATA not in shown:
        report.note("the chat template leaves out the tools", where)


class _Collecting:
    """Turns what a row raises into a counted skip or a collected error that names the row."""

    def __init__(self, chunk: EncodedChunk, where: str, hint: str | None = None) -> None:
        self._chunk, self._where, self._hint = chunk, where, hint

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, SkippedRow):
            self._chunk.report.skip(str(error), self._where)
        elif isinstance(error, RowError):
            self._chunk.errors.append(DataError(str(error), where=self._where, hint=self._hint))
        elif isinstance(error, DataError) and error.where is None:
            self._chunk.errors.append(DataError(str(error), where=self._where, hint=error.hint))
        else:
            return False
        return True
