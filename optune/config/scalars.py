"""One text into one value: number, truth value, choice or text, with the rules that it must keep."""

from __future__ import annotations

import math
import os
import re
from typing import Any

from optune.config.nodes import Scalar
from optune.config.options import NO_RULES, Rules
from optune.config.problems import suggest

_INT = re.compile(r"[+-]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+(?:_[0-9]+)*\.?(?:[0-9]+(?:_[0-9]+)*)?|\.[0-9]+(?:_[0-9]+)*)(?:[eE][+-]?[0-9]+)?\Z")
_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")


class UnfitError(Exception):
    """A text that is not what the key wants. `wants` continues the sentence `<key> must be …`; `because` ends it."""

    def __init__(self, wants: str, text: str, hint: str | None = None, because: str | None = None) -> None:
        super().__init__(wants)
        self.wants, self.text, self.hint, self.because = wants, text, hint, because

    def describe(self, shown: str | None = None) -> str:
        """`must be a whole number, not 'four'`; `shown` stands in for a value that must not be shown."""
        value = "null" if self.text in ("null", "~") else (shown or repr(self.text)) if self.text else "empty"
        return f"must be {self.wants}, not {value}" + (f": {self.because}" if self.because else "")


def _refuse_nulls(scalar: Scalar, wants: str, nullable: bool, rules: Rules = NO_RULES) -> None:
    """No value at all, or a spelling of null that only Python knows."""
    if scalar.is_python_null:
        raise UnfitError(
            wants, scalar.text, "write null" if nullable else "null is written null, and this key needs a value"
        )
    if scalar.is_null or not scalar.text:
        raise UnfitError(wants, scalar.text, _explain_null(rules))


def _explain_null(rules: Rules) -> str | None:
    return f"null is {rules.null}" if rules.null else None


def read_int(scalar: Scalar, rules: Rules = NO_RULES, nullable: bool = False) -> int:
    """A whole number in decimal; `1_000` is 1000."""
    wants = _bounded("a whole number", rules, nullable)
    _refuse_nulls(scalar, wants, nullable, rules)
    if not _INT.match(scalar.text):
        hint = None
        if _FLOAT.match(scalar.text) and math.isfinite(number := float(scalar.text)) and number == int(number):
            hint = f"write {int(number)}"
        raise UnfitError(wants, scalar.text, hint)
    return int(_check_bounds(int(scalar.text), scalar, rules, wants))


def read_float(scalar: Scalar, rules: Rules = NO_RULES, nullable: bool = False) -> float:
    """A finite number: `1e-5`, `1E-5`, `.00001` and `1_000.5` are all numbers."""
    wants = _bounded("a number", rules, nullable)
    _refuse_nulls(scalar, wants, nullable, rules)
    if not _FLOAT.match(scalar.text) or not math.isfinite(float(scalar.text)):
        raise UnfitError(wants, scalar.text, _decimal_comma(scalar.text))
    return _check_bounds(float(scalar.text), scalar, rules, wants)


def _decimal_comma(text: str) -> str | None:
    dotted = text.replace(",", ".", 1)
    return f"write {dotted}" if dotted != text and _FLOAT.match(dotted) else None


def _bounded(noun: str, rules: Rules, nullable: bool) -> str:
    bounds = [f"above {rules.above:g}"] if rules.above is not None else []
    if rules.minimum is not None and rules.maximum is not None:
        bounds.append(f"from {rules.minimum:g} to {rules.maximum:g}")
    elif rules.minimum is not None:
        bounds.append(f"of at least {rules.minimum:g}")
    elif rules.maximum is not None:
        bounds.append(f"{'and ' if bounds else ''}of at most {rules.maximum:,g}")
    if rules.below is not None:
        bounds.append(f"and below {rules.below:g}" if bounds else f"below {rules.below:g}")
    return " or ".join([" ".join([noun, *bounds]), *rules.words, *(["null"] if nullable else [])])


def _check_bounds(number: float, scalar: Scalar, rules: Rules, wants: str) -> float:
    outside = (
        (rules.minimum is not None and number < rules.minimum)
        or (rules.above is not None and number <= rules.above)
        or (rules.below is not None and number >= rules.below)
        or (rules.maximum is not None and number > rules.maximum)
    )
    if outside:
        raise UnfitError(wants, scalar.text, _explain_null(rules))
    return number


def read_bool(scalar: Scalar, nullable: bool = False) -> bool:
    """`true` or `false`."""
    if scalar.text in _TRUE or scalar.text in _FALSE:
        return scalar.text in _TRUE
    _refuse_nulls(scalar, "true or false", nullable)
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    near = meant.get(scalar.text.lower())
    raise UnfitError("true or false", scalar.text, f"write {near}" if near else None)


def read_choice(scalar: Scalar, choices: tuple[Any, ...], nullable: bool = False) -> Any:
    """One of `choices`, spelled exactly. Where a choice is called `none`, null means it: null keys are off."""
    if scalar.text in choices:
        return scalar.text
    if scalar.is_null and "none" in choices:
        return "none"
    names = ", ".join(map(str, choices))
    wants = f"one of {names}" + (" or null" if nullable else "")
    _refuse_nulls(scalar, wants, nullable)
    raise UnfitError(wants, scalar.text, suggest(scalar.text, map(str, choices)))


def read_text(scalar: Scalar, rules: Rules = NO_RULES, nullable: bool = False) -> str:
    """The characters typed. A path has `~` and environment variables expanded."""
    wants = ("a path" if rules.is_path else "a text") + (" or null" if nullable else "")
    # A key that needs a text keeps what a variable says, even `null`.
    is_null = scalar.is_null and (nullable or not scalar.resolved)
    if is_null or (scalar.is_python_null and (nullable or scalar.text == "None")):
        raise UnfitError(wants, scalar.text, "write null" if nullable else "a text of these letters stands in quotes")
    if rules.not_empty and not scalar.text.strip():
        raise UnfitError(wants, scalar.text, _explain_null(rules))
    return expand(scalar.text) if rules.is_path else scalar.text


def expand(path: str) -> str:
    """`path` with a leading `~` and `$NAME`, `${NAME}` expanded; `$$` is a dollar sign.

    Raises UnfitError for a variable that is not set or a user that does not exist: no folder is ever called `~`.
    """

    def look_up(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name is None:
            return "$"
        if name not in os.environ:
            because = f"the environment variable {name} is not set"
            raise UnfitError("a path", path, f"export {name}=…, or write $$ for a dollar sign", because)
        return os.environ[name]

    expanded = os.path.expanduser(path)  # noqa: PTH111 (Path would change the characters)
    if path.startswith("~") and expanded == path:
        raise UnfitError("a path", path, f"write ./{path} for a folder of that name", "there is no such user")
    return _VARIABLE.sub(look_up, expanded)


def guess(scalar: Scalar) -> Any:
    """A value without a declared type: null, true, false, numbers by their plain spellings, else the text."""
    if scalar.quoted:
        return scalar.text
    if scalar.is_null:
        return None
    if scalar.text == "None":
        raise UnfitError("null or a value", scalar.text, "write null, or 'None' in quotes for the text")
    if scalar.text in _TRUE or scalar.text in _FALSE:
        return scalar.text in _TRUE
    if _INT.match(scalar.text):
        return int(scalar.text)
    if _FLOAT.match(scalar.text) and not re.match(r"[+-]?0[0-9]", scalar.text):
        return float(scalar.text)
    return scalar.text
