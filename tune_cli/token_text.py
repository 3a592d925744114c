"""Tokens as text for a terminal: what is trained in colour, or between brackets where there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from optune.data.preview import Unit

STYLES = {
    "trained": ("#e4f7e7 on #1f5a32", "#e4f7e7 on #2c6e41"),
    "weighted": ("#fdf0d2 on #6b4a0c", "#fdf0d2 on #815b14"),
    "masked": ("", ""),
    "padding": ("bright_black", "bright_black"),
}
"""Two shades of each kind, so that neighbouring tokens can be told apart."""

CONTROL = {"trained": "bold", "weighted": "bold", "masked": "cyan", "padding": "bright_black"}
"""What a control token has on top."""


@dataclass(frozen=True)
class Signs:
    """What stands for white space, and around tokens where there is no colour."""

    line_end: str = "↵"
    tab: str = "⇥"
    space: str = "·"
    trained: tuple[str, str] = ("⟦", "⟧")
    control: tuple[str, str] = ("‹", "›")
    dot: str = "●"
    rule: str = "─"
    bar: str = "█"


ASCII = Signs("\\n", "\\t", "_", ("[[", "]]"), ("<", ">"), "*", "-", "#")


class TokenText:
    """Turns units into text for one console."""

    def __init__(self, console: Console) -> None:
        self.has_colour = console.color_system is not None and not console.no_color
        self.signs = ASCII if console.options.ascii_only else Signs()

    def legend(self, *, has_weights: bool) -> Text:
        """What the colours or brackets mean."""
        words = [("trained", "trained", 1.0, False)]
        words += [("weighted", "weighted", 0.5, False)] if has_weights else []
        words += [("masked", "not trained", 0.0, False), ("masked", "control token", 0.0, True)]
        parts = [self._run(kind, weight, [(text, is_control)]) for kind, text, weight, is_control in words]
        signs = self.signs
        spaces = f"{signs.space} space  {signs.line_end} line  {signs.tab} tab"
        return Text("  ").join([*parts, Text(spaces, style="bright_black")])

    def flow(self, unit: Unit) -> Text:
        """The tokens behind one another as running text, without padding."""
        runs = [
            (kind, weight, [(self.visible(unit.pieces[i]), unit.special[i]) for i in indices])
            for (kind, weight), indices in groupby(range(unit.tokens), lambda i: (kind_of(unit, i), unit.weight(i)))
        ]
        text = Text().join(self._run(*run) for run in _with_edges(runs, self.signs))
        text.rstrip()
        return text

    def piece(self, unit: Unit, index: int) -> Text:
        """One token, all its spaces visible."""
        shown = self.visible(unit.pieces[index], breaks=False).replace(" ", self.signs.space)
        if unit.special[index] and not self.has_colour:
            shown = shown.join(self.signs.control)
        return Text().append(shown, self._style(kind_of(unit, index), unit.special[index], 0))

    def visible(self, piece: str, *, breaks: bool = True) -> str:
        """`piece` with its white space and control characters visible; a line end still breaks the line."""
        signs = {"\n": self.signs.line_end + ("\n" if breaks else ""), "\t": self.signs.tab, " ": " "}
        return "".join(signs.get(letter) or _escape(letter) for letter in piece)

    def _run(self, kind: str, weight: float, tokens: Sequence[tuple[str, bool]]) -> Text:
        """Neighbouring tokens of one kind."""
        text = Text()
        for number, (shown, is_control) in enumerate(tokens):
            if is_control and not self.has_colour:
                shown = shown.join(self.signs.control)
            text.append(shown, style=self._style(kind, is_control, number))
        if kind in ("trained", "weighted") and not self.has_colour:
            before, after = self.signs.trained
            text = Text(f"{before}{f'{weight:g}x ' if kind == 'weighted' else ''}{text.plain}{after}")
        return text

    def _style(self, kind: str, is_control: bool, number: int) -> str:
        style = STYLES[kind][number % 2]
        return f"{style} {CONTROL[kind]}" if is_control else style


def kind_of(unit: Unit, index: int) -> str:
    """trained, weighted, masked or padding."""
    if unit.padding[index]:
        return "padding"
    if not unit.trained[index]:
        return "masked"
    return "trained" if unit.weight(index) == 1 else "weighted"


def _escape(letter: str) -> str:
    """The letter, or its number where it cannot be seen or would steer the terminal."""
    is_hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")
    return f"\\u{{{ord(letter):x}}}" if is_hidden else letter


def _with_edges(
    runs: Sequence[tuple[str, float, list[tuple[str, bool]]]], signs: Signs
) -> list[tuple[str, float, list[tuple[str, bool]]]]:
    """The runs with every space visible that the eye would miss: at an edge of a run or a line, or beside another space
    or a control token."""
    shown = []
    for kind, weight, tokens in runs:
        text = "".join("\n" * len(token) if is_control else token for token, is_control in tokens)
        letters = [
            signs.space if letter == " " and _is_edge(text, index, signs) else letter
            for index, letter in enumerate("".join(token for token, _ in tokens))
        ]
        place, marked = 0, []
        for token, is_control in tokens:
            marked.append(("".join(letters[place : place + len(token)]), is_control))
            place += len(token)
        shown.append((kind, weight, marked))
    return shown


def _is_edge(text: str, index: int, signs: Signs) -> bool:
    before, after = text[max(0, index - 1) : index], text[index + 1 : index + 1 + len(signs.line_end)]
    return before in ("", " ", "\n") or after[:1] in ("", " ", "\n") or after == signs.line_end
