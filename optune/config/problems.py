"""All that is wrong with a config, said at once; suggestions; and what a message must not show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from optune.errors import ConfigError

HIDDEN = "***"
_SECRETS = ("token", "key", "keys", "password", "passwords", "passwd", "passphrase", "secret", "secrets", "credentials")
_ENTRY = re.compile(r"""([\w.-]+)(\s*[:=]\s*)('[^']*'|"[^"]*"|[^,{}\[\]]+)""")
# null, a truth value, or a number too short to be a PIN or password of digits.
_HARMLESS = re.compile(r"\s*(?:null|~|true|false|[+-]?[0-9]{1,3}(?:\.[0-9]+)?)?\s*\Z", re.IGNORECASE)


class ConfigProblemsError(ConfigError):
    """Several things wrong at once; `errors` holds each."""

    def __init__(self, errors: list[ConfigError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


class Problems:
    """Collects what is wrong, so that a user sees all of it in one go."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def add(self, message: str, *, where: str | None, hint: str | None = None) -> None:
        """Notes one thing that is wrong."""
        self.errors.append(ConfigError(message, where=where, hint=hint))

    def raise_if_any(self) -> None:
        """Raises what was noted: the one error as it is, several as `ConfigProblemsError`."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigProblemsError(self.errors)


def suggest(word: str, candidates: Iterable[str]) -> str | None:
    """`did you mean '…'?` with the candidate nearest to `word`, None when none is near."""
    nearest = find_nearest(word, candidates)
    return f"did you mean {nearest!r}?" if nearest else None


def find_nearest(word: str, candidates: Iterable[str], closeness: float = 0.6) -> str | None:
    """The candidate nearest to `word` in spelling, at least so close (1 = equal); case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(candidates, reverse=True)}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=closeness)
    return by_lower[found[0]] if found else None


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value is a secret: `api_key`, `hfToken`, `password` … but not `max_tokens`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).lower())
    return any(word.endswith(_SECRETS) for word in words)


def hides(key: str, value: Any, *, declared: bool = False) -> bool:
    """Whether a value must not be shown: it stands under a key that looks like a secret's.

    Null and truth values are no secrets, nor are numbers where the schema declares one. Other digits may be a PIN.
    """
    is_harmless = value is None or isinstance(value, bool) or (declared and isinstance(value, int | float))
    return not is_harmless and is_secret(key)


def show_text(key: str, text: str) -> str:
    """A text as a message may show it: that of a secret is not shown, but that it is a text."""
    return repr(text) if not is_secret(key) or _HARMLESS.match(text) else "the text that is given"


def mask_argument(argument: str) -> str:
    """An override as it may be shown: the values of secrets are hidden, also inside a mapping."""
    key, equals, value = argument.partition("=")
    return f"{key}={HIDDEN}" if equals and is_secret(key) and not _HARMLESS.match(value) else mask_entries(argument)


def mask_entries(text: str) -> str:
    """A piece of YAML or of an override as it may be shown: what follows a secret's key is hidden."""

    def mask(found: re.Match[str]) -> str:
        shown = not is_secret(found[1]) or _HARMLESS.match(found[3])
        return found[0] if shown else found[1] + found[2] + HIDDEN

    return _ENTRY.sub(mask, text)
