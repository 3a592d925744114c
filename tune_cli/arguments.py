"""Arguments of a command: options anywhere, the other words in order, errors like all our errors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from optune.config.problems import suggest
from optune.errors import ConfigError


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An option's `type`: reads a whole number within the bounds."""
    bounds = f"from {minimum} up" if maximum is None else f"from {minimum} to {maximum:,}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return read


class Parser(argparse.ArgumentParser):
    """Takes options; the words between them come back in order, because `key=value` may stand anywhere."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            prog=f"optune {command}",
            usage=f"optune {command} {usage}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.command = command

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            name = "/".join(action.option_strings)
            if name and message.startswith(f"argument {name}: "):
                words = f"{action.option_strings[-1]} {action.metavar or ''}".rstrip()
                reason = message.removeprefix(f"argument {name}: ")
                raise ConfigError(_say_plainly(reason), where=action.option_strings[-1], hint=f"{words}: {action.help}")
        raise ConfigError(f"optune {self.command}: {message}", hint=f"usage: {self.usage}")

    def split(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options and the other words. Raises ConfigError for an option that does not exist."""
        words, rest = _split_at_dashes(words)
        options, others = self.parse_known_args(self._join_values(words))
        for word in others:
            if word.startswith("-") and word != "-":
                name = word.split("=")[0]
                known = [option for action in self._actions for option in action.option_strings]
                raise ConfigError(
                    f"optune {self.command} has no option {name!r}",
                    hint=suggest(name, known) or f"usage: {self.usage}",
                )
        return options, others + rest

    def _join_values(self, words: list[str]) -> list[str]:
        """`--memory -1GiB` as `--memory=-1GiB`: the number is the option's value, and no option of that name."""
        valued = {name for action in self._actions if action.nargs is None for name in action.option_strings}
        joined: list[str] = []
        for word in words:
            if joined and joined[-1] in valued and re.match(r"-\.?[0-9]", word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def take(self, words: list[str], *names: str, optional: int = 0) -> list[str]:
        """Checks that as many words came as there are `names`, of which the last `optional` may be left out."""
        if len(words) < len(names) - optional:
            self.error(f"{names[len(words)]} is missing")
        if len(words) > len(names):
            self.error(f"{words[len(names)]!r} is one word too many")
        return words


def _say_plainly(reason: str) -> str:
    """argparse's reason in our words."""
    for pattern, words in (
        (r"expected one argument", "a value is missing"),
        (r"ignored explicit argument (.*)", r"takes no value, and was given \1"),
        (r"invalid int value: (.*)", r"\1 is not a whole number"),
        (r"invalid float value: (.*)", r"\1 is not a number"),
        (r"invalid choice: ('.*?') \(choose from (.*)\)", r"\1 is not one of \2"),
    ):
        if found := re.fullmatch(pattern, reason):
            return found.expand(words)
    return reason


def _split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    listed = list(words)
    end = listed.index("--") if "--" in listed else len(listed)
    return listed[:end], listed[end + 1 :]
