"""`load_rows`: from files to rows of tokens. What is broken is named by file and line, what is left out is counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optune.data.cache import Prepared, RowCache, find_folder
from optune.data.cache_key import find_key
from optune.data.encoder import NO_STOP, RowEncoder, Truncation
from optune.data.encoding import TrainOn
from optune.data.formats import Format
from optune.data.mixing import Mixture, check_mixture
from optune.data.preparing import encode_sources
from optune.data.rows import Report, Rows
from optune.data.sources import Source, list_sources
from optune.data.tokenizer import Tokenizer
from optune.data.workers import Result
from optune.errors import DataError, list_few

if TYPE_CHECKING:
    from optune.data.streams.blocks import StreamedRows


def load_rows(
    train: Any,
    tokenizer: Tokenizer,
    *,
    format: Format = "auto",
    max_length: int | None = None,
    truncation: Truncation = "drop",
    train_on: TrainOn = "assistant",
    parse_special: bool = False,
    embedding_rows: int | None = None,
    streaming: bool = False,
    shuffle_window: int | None = None,
    cache: str | Path | None = None,
) -> Rows | StreamedRows:
    """The rows of `train` as tokens with their targets marked, in the order of the files; `.report` says what happened.

    - `train`: a path, a mapping with the keys of `sources.list_sources`, or a list of these; `Rows.mixture` carries
      the weights.
    - `format`: `auto` (told by the first row of each file), a name in `formats.FORMATS`, or a function of a row (see
      `formats.get_format`).
    - `max_length`: tokens a row may have, None for any number. `truncation`: what happens to a longer one: `drop`
      (counted), `error`, `truncate_right` (the beginning is kept), `truncate_left` (BOS and the end are kept). A row
      left without a target is dropped and counted.
    - `train_on`: `assistant`, `last_assistant` or `all`, for chats; `all` also trains the prompts of completions.
    - `parse_special`: text of control tokens inside messages becomes control tokens; otherwise it stays text.
    - `embedding_rows`: of the model; a token beyond them makes its row a broken one.
    - `streaming`: nothing is read yet, and `build_batches` makes batches that read the files as they need them;
      `shuffle_window`: how many rows are shuffled together then (None: `streams.blocks.DEFAULT_WINDOW`).
    - `cache`: the folder in which prepared rows are kept and looked for, `auto` for the usual one (see
      `cache.find_folder`), None to do without. Rows that are streamed are not kept.

    Raises DataError for a missing file, for rows that are broken (the first one is named, all are counted), and where
    no row is left.
    """
    encoder = RowEncoder(tokenizer, max_length, truncation, train_on, parse_special, embedding_rows)
    if streaming:
        from optune.data.streams.blocks import StreamedRows  # reads torch, which rows alone do not need

        return StreamedRows(_list_streams(train), encoder, format, shuffle_window)
    if shuffle_window is not None:
        raise DataError(
            "is only for data.streaming: rows that are read whole are shuffled as a whole",
            where="data.shuffle_window",
            hint="leave it out, or set data.streaming=true",
        )
    sources = list_sources(train)
    rows, counts = _prepare(encoder, sources, format, cache)
    rows.mixture = _mix(sources, counts)
    return rows


def _list_streams(train: Any) -> list[Source]:
    sources = list_sources(train, may_count=False)
    for source in sources:
        if source.kind == "json":
            raise DataError(
                "a .json list can only be read whole, so it cannot be streamed",
                where=source.name,
                hint="write the rows as JSONL, one a line: jq -c '.[]' rows.json > rows.jsonl",
            )
    return sources


def _mix(sources: Sequence[Source], counts: Sequence[int]) -> Mixture | None:
    """The mixture of sources that gave `counts` rows, None where every row comes once."""
    if all(source.weight == 1 for source in sources):
        return None
    firsts = {source.entry: source for source in reversed(sources)}
    by_entry = [firsts[entry] for entry in range(len(counts))]
    return check_mixture(counts, [source.weight for source in by_entry], [source.name for source in by_entry])


def load_pairs(
    train: Any,
    tokenizer: Tokenizer,
    *,
    format: Format = "preference",
    max_length: int | None = None,
    truncation: Truncation = "drop",
    parse_special: bool = False,
    embedding_rows: int | None = None,
    cache: str | Path | None = None,
) -> Rows:
    """Pairs of a chosen and a rejected answer as tokens: pair i is the rows 2i (chosen) and 2i + 1 (rejected).

    Each row is the prompt and one answer, rendered and encoded as one whole, and the answer alone has targets. Options
    and errors are those of `load_rows`; `format` is `preference` or a function that gives pairs. A pair of which one
    row is left out is left out whole; the report counts pairs. `build_batches` keeps both rows of a pair together.
    """
    encoder = RowEncoder(tokenizer, max_length, truncation, "assistant", parse_special, embedding_rows, pairs=True)
    sources = list_sources(train)
    if any(source.weight != 1 for source in sources):
        raise DataError("a source of pairs has no weight", where="data.train", hint="max_rows takes a part of a source")
    format = "preference" if format == "auto" else format
    rows, _ = _prepare(encoder, sources, format, cache)
    rows.report.kept = len(rows) // 2
    rows.together = 2
    return rows


def _prepare(encoder: RowEncoder, sources: list[Source], format: Format, cache: str | Path | None) -> Prepared:
    """The rows of all sources, and how many of them each entry of the list gave; from the cache where they are."""

    def make() -> Prepared:
        counts, chats = [0] * (sources[-1].entry + 1), 0

        def count(source: Source, result: Result) -> Result:
            nonlocal chats
            counts[source.entry] += len(result[1])
            chats += result[0].chats
            return result

        results = encode_sources(encoder, sources, format)
        rows = join_results((count(source, result) for source, result in results), sources)
        for source in sources:
            if source.name not in rows.report.files:
                rows.report.note("a source without a row", source.name)
        _check_stop(rows, encoder, chats)
        return rows, counts

    folder = find_folder(cache)
    if folder is None:
        rows, counts = make()
    else:
        rows, counts = RowCache(folder).fetch(lambda: find_key(encoder, sources, format, folder), make)
    rows.sources = sources
    rows.report.note_twice(sources)
    return rows, counts


def join_results(results: Iterable[Result], sources: Sequence[Source]) -> Rows:
    """All rows and reports as one. Raises DataError where a row is broken or none is left; `sources` names the files
    then."""
    parts: list[Rows] = []
    report, errors = Report(), list[DataError]()
    for chunk, rows in results:
        parts.append(rows)
        report.merge(chunk.report)
        errors += chunk.errors
    if errors:
        first, rest = errors[0], errors[1:]
        also = f" (of {report.rows} rows {len(rest)} more cannot be used: " if rest else ""
        also += list_few([str(error.where) for error in rest], 5) + ")" if rest else ""
        raise DataError(str(first).removeprefix(f"{first.where}: ") + also, where=first.where, hint=first.hint)
    report.kept = sum(map(len, parts))
    if not report.kept:
        names = list_few([source.name for source in sources])
        # A note may be the cause: a template that leaves the answers out leaves no target.
        reasons = "; ".join([*report.skipped_lines(), *report.noted_lines()])
        is_part = any(source.first or source.stop is not None for source in sources)
        nothing = "no rows in the part that is taken" if is_part else "no rows"
        raise DataError(
            f"none of the {report.rows} rows can be trained: {reasons}" if reasons else nothing, where=names
        )
    return Rows.join(parts, report)


def _check_stop(rows: Rows, encoder: RowEncoder, chats: int) -> None:
    """Refuses answers of which none teaches the model to stop; notes it where that may be meant.

    It may be where all is trained alike, where there are no chats, and where every row was cut at its end.
    """
    tokenizer, report = encoder.tokenizer, rows.report
    if tokenizer.teaches_stop(rows.tokens, rows.trained):
        return
    is_cut = encoder.truncation == "truncate_right" and bool((rows.lengths == encoder.max_length).all())
    if chats and encoder.train_on != "all" and not is_cut:
        raise DataError(
            f"no answer in the {report.kept} rows ends with a token that says so, so the model would not learn to "
            f"stop: the chat template {tokenizer.template_name} writes none, or max_length cuts it off",
            where=rows[0].where,
            hint="give a template that does as data.chat_template (a file, or a name such as chatml), or mark the "
            "answers and the token behind them in it with {% generation %} … {% endgeneration %}",
        )
    report.note(NO_STOP, rows[0].where, len(rows))
