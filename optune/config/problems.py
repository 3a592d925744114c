"""All that is wrong with a config, said at once; suggestions; and what a message must not show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from optune.errors import ConfigError

HIDDEN = "***"
_SECRETS = ("token", "key", "keys", "password", "passwords", "passwd", "passphrase", "secret", "secrets", "credentials")
_ENTRY = re.compile(r"""([\w.-]+)(\s*[:=]\s*)('[^']*'|"[^"]*"|[^,{}\[\]]+)""")


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


def mask_argument(argument: str) -> str:
    """An override as it may be shown: the values of secrets are hidden, also inside a mapping."""
    key, equals, _ = argument.partition("=")
    return f"{key}={HIDDEN}" if equals and is_secret(key) else mask_entries(argument)


def mask_entries(text: str) -> str:
    """A piece of YAML or of an override as it may be shown: what follows a secret's key is hidden."""
    return _ENTRY.sub(lambda found: found[1] + found[2] + HIDDEN if is_secret(found[1]) else found[0], text)
