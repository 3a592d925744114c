"""Files whose rows are lines: JSONL, JSON lists, plain text. All are UTF-8, and only LF ends a line.

CR before LF, a byte order mark at the start of the file and blank lines are nothing. Each reader comes in two parts:
`records` finds the rows without looking into them, `parse` makes a row of one; so rows can be skipped cheaply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from optune.data.sources.source import READ_ERRORS, Mark, Record, Source, explain_read, open_source, read_lines
from optune.data.sources.values import DECODER, LISTS, BadRow, check_row, explain, parse_object

MARK = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\r\n]*")


def find_lines(source: Source, start: Mark) -> Iterator[Record]:
    """The lines that are not blank."""
    rows = start.rows
    for number, line, after in read_lines(source, start):
        if isinstance(line, bytes):
            line = line.removeprefix(MARK) if number == 1 else line
            if not line.strip():
                continue
        rows += 1
        yield Record(number, line, after._replace(rows=rows))


def parse_json_line(line: Any) -> Any:
    return line if isinstance(line, BadRow) else parse_object(line)


def parse_text_line(line: Any) -> Any:
    """A line of plain text is a row of its own, `{"text": line}`; white space at its start stays."""
    if isinstance(line, BadRow):
        return line
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line")
    return BadRow("holds NUL bytes, as a file in another encoding does") if "\0" in text else {"text": text}


def find_in_json(source: Source, start: Mark) -> Iterator[Record]:
    """A list of objects, each with the line that it starts on; a file that is no list is read as JSONL.

    The file is read whole, and offsets are rows. A row comes parsed. An object over several lines is neither, which is
    said with the way out.
    """
    try:
        with open_source(source) as stream:
            content = stream.read().removeprefix(MARK)
    except READ_ERRORS as error:
        yield Record(0, BadRow(explain_read(source, error)), Mark(rows=1))
        return
    begin = len(content) - len(content.lstrip())
    if content.startswith(b"[", begin):
        pairs = _split_list(content)
    elif problem := _find_tall_object(content, begin):
        pairs = [(content.count(b"\n", 0, begin) + 1, BadRow(problem))]
    else:
        pairs = ((number, parse_json_line(line)) for number, line, _ in find_lines(source, Mark()))
    for rows, (number, row) in enumerate(pairs, start=1):
        if rows > start.rows:
            yield Record(number, row, Mark(rows, number, rows))


def keep(row: Any) -> Any:
    return row


def _find_tall_object(content: bytes, begin: int) -> str | None:
    """What to say of a file that has an object over several lines at `begin`; None where it has not."""
    line = content[begin : content.find(b"\n", begin) + 1 or None]
    if isinstance(parse_object(line), dict):  # JSONL, however long it is
        return None
    try:
        text = content[begin:].decode("utf-8")
        row, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or "\n" not in text[:end]:
        return None
    said = "found an object over several lines, wanted a list of objects, or one object a line"
    inner = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if text[end:].strip() or not inner or set(LISTS) & row.keys():
        return f"{said} (`jq -c .` writes rows so)"
    return f"{said} (`jq -c '.[\"{inner[0][:40]}\"][]'` writes the objects of {inner[0][:40]!r} so)"


def _split_list(content: bytes) -> Iterator[tuple[int, Any]]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield content[: error.start].count(b"\n") + 1, BadRow(f"not UTF-8: byte 0x{content[error.start]:02x}")
        return

    def skip(place: int) -> int:
        return _BLANK.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]

    place, line, counted = skip(text.index("[") + 1), 1, 0
    while not text.startswith("]", place):
        line, counted = line + text.count("\n", counted, place), place
        try:
            row, end = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            bad_at = getattr(error, "pos", None)  # of a syntax error
            yield line if bad_at is None else text.count("\n", 0, bad_at) + 1, BadRow(explain(error))
            return
        yield line, check_row(row, text[place:end])
        place = skip(end)
        if text.startswith(",", place):
            place = skip(place + 1)
        elif not text.startswith("]", place):
            yield text.count("\n", 0, place) + 1, BadRow("not JSON: wanted ',' or ']' after a row")
            return
    after = skip(place + 1)
    if after < len(text):
        yield text.count("\n", 0, after) + 1, BadRow("not JSON: something follows the list")
