"""`load_rows`: from files to rows of tokens. What is broken is named by file and line, what is left out is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np

from optune.data.encoding import Encoded, TrainOn, mark_answers, mark_spans
from optune.data.formats import (
    NO_ANSWER,
    Chat,
    Example,
    RowError,
    Segments,
    SkippedRow,
    Tokens,
    detect_format,
    get_format,
    may_be_misread,
)
from optune.data.rows import Report, Row, Rows
from optune.data.sources import BadRow, Source, list_sources, name_rows, read_rows
from optune.data.spans import Answer
from optune.data.tokenizer import Tokenizer
from optune.data.traced import DATA, FIRST_MESSAGE, GENERATED, Traced, concat, runs_of
from optune.errors import DataError

Truncation = Literal["drop", "error", "truncate_right", "truncate_left"]
TRUNCATIONS = ("drop", "error", "truncate_right", "truncate_left")
TRAIN_ON = ("assistant", "last_assistant", "all")

_CHUNK = 1000
"""Rows encoded at once: enough to keep all cores busy, few enough to stay small."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Prepared:
    """A row on its way: its text with what is needed to mark the targets once it is tokens."""

    where: str
    example: Example
    text: Traced | None = None
    answers: tuple[Answer, ...] = ()


def load_rows(
    train: Any,
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    max_length: int | None = None,
    truncation: Truncation = "drop",
    train_on: TrainOn = "assistant",
    parse_special: bool = False,
    embedding_rows: int | None = None,
) -> Rows:
    """The rows of `train` as tokens with their targets marked, in the order of the files; `.report` says what happened.

    - `train`: a path, a mapping `{path, format}`, or a list of these.
    - `format`: `auto` (told by the first row of each file) or a name in `formats.FORMATS`.
    - `max_length`: tokens a row may have, None for any number. `truncation`: what happens to a longer one: `drop`
      (counted), `error`, `truncate_right` (the beginning is kept), `truncate_left` (BOS and the end are kept). A row
      left without a target is dropped and counted.
    - `train_on`: `assistant`, `last_assistant` or `all`, for chats; `all` also trains the prompts of completions.
    - `parse_special`: text of control tokens inside messages becomes control tokens; otherwise it stays text.
    - `embedding_rows`: of the model; a token beyond them makes its row a broken one.

    Raises DataError for a missing file, for rows that are broken (the first one is named, all are counted), and where
    no row is left.
    """
    for name, value, allowed in (("truncation", truncation, TRUNCATIONS), ("train_on", train_on, TRAIN_ON)):
        if value not in allowed:
            raise DataError(f"{value!r} is none of {', '.join(allowed)}", where=f"data.{name}")
    loader = _Loader(tokenizer, max_length, truncation, train_on, parse_special, embedding_rows)
    sources = list_sources(train)
    for source in sources:
        loader.load(source, source.format or format)
    return loader.finish(sources)


class _Loader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int | None,
        truncation: Truncation,
        train_on: TrainOn,
        parse_special: bool,
        embedding_rows: int | None,
    ) -> None:
        self._tokenizer, self._max_length, self._truncation = tokenizer, max_length, truncation
        self._train_on: TrainOn = train_on
        self._parse_special, self._embedding_rows = parse_special, embedding_rows
        self._rows: list[Row] = []
        self._errors: list[DataError] = []
        self._end_ids: set[int] = set()
        self.report = Report()

    def load(self, source: Source, format_name: str) -> None:
        """Reads one file; broken rows are collected, so that all of them are told at once."""
        detected = None if format_name == "auto" else format_name
        is_auto = detected is None
        for chunk in _chunks(read_rows(source), _CHUNK):
            prepared = []
            for line, row in chunk:
                self.report.rows += 1
                where = f"{source.path}:{line}"
                is_doubtful = is_auto and isinstance(row, dict) and may_be_misread(row, detected)
                hint = "the format is told by the first row; data.format names another" if is_doubtful else None
                with _Collecting(self, where, hint):
                    if isinstance(row, BadRow):
                        raise RowError(row.problem)
                    detected = detected or detect_format(row)
                    self.report.formats.setdefault(str(source.path), detected)
                    prepared.append(self._prepare(where, get_format(detected)(row)))
            if not self._errors:
                self._encode(prepared)

    def finish(self, sources: list[Source]) -> Rows:
        if self._errors:
            first, rest = self._errors[0], self._errors[1:]
            also = f" (of {self.report.rows} rows {len(rest)} more cannot be used: " if rest else ""
            also += name_rows([str(error.where) for error in rest[:5]], len(rest)) + ")" if rest else ""
            raise DataError(str(first).removeprefix(f"{first.where}: ") + also, where=first.where, hint=first.hint)
        self.report.kept = len(self._rows)
        if not self._rows:
            names = name_rows([str(source.path) for source in sources[:3]], len(sources))
            # A note may be the cause: a template that leaves the answers out leaves no target.
            reasons = "; ".join([*self.report.skipped_lines(), *self.report.noted_lines()])
            raise DataError(
                f"none of the {self.report.rows} rows can be trained: {reasons}" if reasons else "no rows", where=names
            )
        rows = Rows(self._rows, self.report)
        if self._end_ids and not np.isin(rows.tokens[rows.trained], list(self._end_ids)).any():
            self.report.note(
                "no target is an end-of-turn token, so the model does not learn to stop", rows[0].where, len(rows)
            )
        return rows

    def _prepare(self, where: str, example: Example) -> _Prepared:
        if isinstance(example, Tokens):
            if example.tokens and max(example.tokens) >= self._tokenizer.vocab_size:
                raise RowError(f"found the id {max(example.tokens)}, the vocabulary has {self._tokenizer.vocab_size}")
            return _Prepared(where, example)
        if isinstance(example, Segments):
            text = concat(Traced(piece, ((len(piece), DATA),)) for piece, _ in example.pieces)
            return _Prepared(where, example, text if isinstance(text, Traced) else Traced(text))
        messages, tools = example.messages, example.tools
        if self._train_on != "all" and not any(message["role"] == "assistant" for message in messages):
            raise SkippedRow(NO_ANSWER)
        text = self._tokenizer.render_traced(messages, tools, parse_special=self._parse_special)
        self._end_ids |= self._tokenizer.end_ids(tools)
        self._note_left_out(where, example, text)
        wants_answers = self._train_on != "all" or any("weight" in message for message in messages)
        answers = tuple(self._tokenizer.find_answers(messages, tools, text)) if wants_answers else ()
        return _Prepared(where, example, text, answers)

    def _note_left_out(self, where: str, chat: Chat, text: Traced) -> None:
        shown = {origin & ~GENERATED for _, origin in runs_of(text)}
        hidden_roles = set()
        for index, message in enumerate(chat.messages):
            says = [message.get("content"), message.get("tool_calls")]
            if any(part and not str(part).isspace() for part in says) and FIRST_MESSAGE + index not in shown:
                hidden_roles.add(message["role"])
        for role in sorted(hidden_roles):
            self.report.note(f"the chat template leaves out messages of role {role}", where)
        if chat.tools and DATA not in shown:
            self.report.note("the chat template leaves out the tools", where)

    def _encode(self, prepared: list[_Prepared]) -> None:
        texts = [row.text for row in prepared if row.text is not None]
        encoded = iter(self._tokenizer.encode_traced(texts, parse_special=self._parse_special))
        for row in prepared:
            with _Collecting(self, row.where):
                self._keep(row.where, self._mark(row, next(encoded) if row.text is not None else None))

    def _mark(self, row: _Prepared, encoded: Encoded | None) -> Encoded:
        if encoded is None:
            assert isinstance(row.example, Tokens)
            trained = np.array(row.example.trained, bool)
            trained[:1] = False
            return Encoded(np.array(row.example.tokens, np.int32), trained)
        if encoded.stuck:
            self.report.note("rows with text of control tokens that this tokenizer cannot read as text", row.where)
        elif encoded.forged:
            self.report.note("rows with text of control tokens inside, read as text", row.where)
        if isinstance(row.example, Chat):
            return mark_answers(encoded, row.answers, row.example.messages, self._train_on)
        assert isinstance(row.example, Segments)
        spans, start = [], 0
        for piece, is_trained in row.example.pieces:
            if is_trained or self._train_on == "all":
                spans.append((start, start + len(piece)))
            start += len(piece)
        return mark_spans(encoded, spans, self._tokenizer.eos_id)

    def _keep(self, where: str, encoded: Encoded) -> None:
        limit, rows = self._max_length, self._embedding_rows
        reason = "no target"
        highest = int(encoded.tokens.max(initial=0))
        if rows is not None and highest >= rows:
            raise DataError(
                f"the token {self._tokenizer.decode([highest])!r} has the id {highest}, and the model's embedding has "
                f"{rows} rows",
                hint="a token was added to the tokenizer alone: resize the model's embedding and save it, then train",
            )
        if limit is not None and len(encoded.tokens) > limit:
            encoded = self._cut(encoded, limit)
            reason = f"no target within max_length={limit}"
        if not encoded.trained.any():
            raise SkippedRow(reason)
        self._rows.append(Row(encoded.tokens, encoded.trained, where, encoded.weights))

    def _cut(self, encoded: Encoded, limit: int) -> Encoded:
        length = len(encoded.tokens)
        if self._truncation == "drop":
            raise SkippedRow(f"longer than max_length={limit}")
        if self._truncation == "error":
            raise RowError(f"{length} tokens, more than max_length={limit} (data.truncation is error)")
        kept = np.arange(limit)
        if self._truncation == "truncate_left":
            kept = np.arange(length - limit, length)
            if encoded.begins:
                kept[0] = 0
        weights = None if encoded.weights is None else encoded.weights[kept]
        trained = encoded.trained[kept]
        trained[:1] = False
        return dataclasses.replace(encoded, tokens=encoded.tokens[kept], trained=trained, weights=weights)


class _Collecting:
    """Turns what a row raises into a counted skip or a collected error that names the row."""

    def __init__(self, loader: _Loader, where: str, hint: str | None = None) -> None:
        self._loader, self._where, self._hint = loader, where, hint

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, SkippedRow):
            self._loader.report.skip(str(error), self._where)
        elif isinstance(error, RowError):
            self._loader._errors.append(DataError(str(error), where=self._where, hint=self._hint))
        elif isinstance(error, DataError) and error.where is None:
            self._loader._errors.append(DataError(str(error), where=self._where, hint=error.hint))
        return isinstance(error, SkippedRow | RowError) or (isinstance(error, DataError) and error.where is None)


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
