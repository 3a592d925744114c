"""The exception tree: every failure that a user can cause or repair is one of these.

`str(error)` is the text behind `error:`; `hint` is the way out, printed behind `hint:`. `exit_code` is what the
command line returns: 2 where the command, the config or its inputs are wrong and nothing was written, 1 for a failure
while running.
"""

from collections.abc import Sequence


class OptuneError(Exception):
    """One clear cause. `where` is a key, a `file:line` or a command-line argument; it is put before the message."""

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.hint = hint


class ConfigError(OptuneError):
    """The command line or the config asks for something that cannot be done."""

    exit_code = 2


class ModelError(OptuneError):
    """A model folder that is missing, broken, or says something that the decoder cannot honour."""

    exit_code = 2


class DataError(OptuneError):
    """A data file or one of its rows cannot be used."""

    exit_code = 2


class CheckpointError(OptuneError):
    """A checkpoint that is missing, incomplete or does not belong to this run."""


class TrainingError(OptuneError):
    """Training cannot go on."""


def list_few(names: Sequence[str], most: int = 3, *, total: int | None = None, separator: str = ", ") -> str:
    """`a, b, c and 9 more`: the first `most` of `names`, for a message. `total`: how many there are, where `names` are
    only the first."""
    shown = names[:most]
    rest = (len(names) if total is None else total) - len(shown)
    return separator.join(shown) + (f" and {rest:,} more" if rest > 0 else "")
