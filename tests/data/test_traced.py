"""A traced string has the value of a plain one in every operation, and never tells a wrong origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune.data.traced import DATA, FIRST_MESSAGE, TEMPLATE, Traced, concat, plain, spans_of, splice, trace

TEXT = st.text(alphabet="ab \n\t<>|é日", max_size=12)
SEPARATORS = st.sampled_from([" ", "a", "ab", "\n", "|>"])


def letters(text: str) -> Traced:
    """Every character with an origin of its own, so that a test can tell which one it was."""
    return Traced(text, tuple((1, FIRST_MESSAGE + index) for index in range(len(text))) or ((0, TEMPLATE),))


def origins(text: str) -> list[int]:
    return [origin for start, end, origin in spans_of(text) for _ in range(end - start)]


def check(result: Any, expected: Any, source: str) -> None:
    """Same value, and every character says truly which character of `source` it is."""
    if isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            check(one, other, source)
        return
    assert plain(result) == expected
    assert len(origins(result)) == len(expected)
    for character, origin in zip(expected, origins(result), strict=True):
        assert origin < FIRST_MESSAGE or source[origin - FIRST_MESSAGE] == character


KEEPING: dict[str, Callable[[Any, str], Any]] = {
    "strip": lambda s, _: s.strip(),
    "strip characters": lambda s, x: s.strip(x),
    "lstrip": lambda s, _: s.lstrip(),
    "rstrip characters": lambda s, x: s.rstrip(x),
    "removeprefix": lambda s, x: s.removeprefix(x),
    "removesuffix": lambda s, x: s.removesuffix(x),
    "split": lambda s, _: s.split(),
    "split at": lambda s, x: s.split(x),
    "split once": lambda s, x: s.split(x, 1),
    "split words once": lambda s, _: s.split(None, 1),
    "rsplit": lambda s, x: s.rsplit(x, 1),
    "rsplit words": lambda s, _: s.rsplit(None, 1),
    "splitlines": lambda s, _: s.splitlines(),
    "splitlines with ends": lambda s, _: s.splitlines(True),
    "slice": lambda s, _: s[1:-1],
    "reversed": lambda s, _: s[::-1],
    "every other": lambda s, _: s[::2],
    "characters": lambda s, _: list(s),
}
"""Operations after which every character is still one of the source's."""

MIXING: dict[str, Callable[[Any, str], Any]] = {
    "sum": lambda s, x: x + s + x,
    "partition": lambda s, x: s.partition(x),
    "rpartition": lambda s, x: s.rpartition(x),
    "replace": lambda s, x: s.replace(x, "-"),
    "replace once": lambda s, x: s.replace(x, "", 1),
    "replace nothing": lambda s, _: s.replace("", "."),
    "percent": lambda s, x: f"{x}%s{x}".replace("|", "") % s,
}


@pytest.mark.parametrize("name", KEEPING)
@given(text=TEXT, separator=SEPARATORS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_cutting_keeps_value_and_origin_of_every_character(name: str, text: str, separator: str) -> None:
    result = KEEPING[name](letters(text), separator)
    check(result, KEEPING[name](text, separator), text)
    for part in result if isinstance(result, list) else [result]:
        assert all(origin >= FIRST_MESSAGE for origin in origins(part))


@pytest.mark.parametrize("name", MIXING)
@given(text=TEXT, separator=SEPARATORS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_mixing_keeps_the_value_and_tells_no_wrong_origin(name: str, text: str, separator: str) -> None:
    check(MIXING[name](letters(text), separator), MIXING[name](text, separator), text)


@given(parts=st.lists(st.tuples(TEXT, st.sampled_from([TEMPLATE, DATA, FIRST_MESSAGE])), max_size=6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_concat_equals_repeated_sums(parts: list[tuple[str, int]]) -> None:
    traced = [Traced(text, ((len(text), origin),)) for text, origin in parts]
    joined = concat(traced)
    summed = Traced("")
    for part in traced:
        summed = summed + part
    assert plain(joined) == plain(summed) == "".join(text for text, _ in parts)
    assert origins(joined) == origins(summed) == [origin for text, origin in parts for _ in text]


def test_replacement_text_belongs_to_the_template() -> None:
    result = trace("one\ntwo", DATA).replace("\n", "<br>")
    assert spans_of(result) == [(0, 3, DATA), (3, 7, TEMPLATE), (7, 10, DATA)]


def test_functions_that_know_no_trace_keep_it_where_they_copy() -> None:
    first, second = trace("a b", DATA), trace("c", FIRST_MESSAGE)
    assert spans_of(splice("-".join, [first, second])) == [(0, 3, DATA), (3, 4, TEMPLATE), (4, 5, FIRST_MESSAGE)]


def test_functions_that_change_what_they_are_given_lose_the_trace_instead_of_guessing() -> None:
    result = splice(lambda text: text.encode().hex(), trace("ab", DATA))
    assert result == "6162"
    assert spans_of(result) == [(0, 4, TEMPLATE)]
