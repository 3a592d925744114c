"""The first word with the Hugging Face hub: whether it answers, and what its refusals mean.

Whoever fetches something asks this first: the libraries that fetch try again and again, and talk about it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 8.0
"""How long the hub may take for its first answer."""

_REFUSALS = {
    "RepositoryNotFoundError": "the hub has no such {what}, or it is private and HF_TOKEN is not set",
    "GatedRepoError": "the {what} is gated: accept its terms on its page, and set HF_TOKEN",
    "RevisionNotFoundError": "the hub has the {what} but not that revision",
}


def ask(question: Callable[[float], Any]) -> Exception | None:
    """What `question(seconds to wait)` raises, None where the hub answers it, after at most a second more than
    `PATIENCE_S`: it is asked in a thread, because a name server that swallows questions keeps to no timeout of ours."""
    answers: queue.Queue[Exception | None] = queue.Queue()

    def wait() -> None:
        try:
            question(PATIENCE_S)
        except Exception as error:
            answers.put(error)
        else:
            answers.put(None)

    threading.Thread(target=wait, daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE_S + 1)
    except queue.Empty:
        return TimeoutError(f"the hub did not answer within {PATIENCE_S:.0f} s")


def is_refusal(error: BaseException) -> bool:
    """Whether the hub was reached, and said no."""
    return type(error).__name__ in _REFUSALS


def explain(error: BaseException, what: str) -> str:
    """The cause in one line; `what` was asked for: a model or a dataset."""
    name, text = type(error).__name__, str(error).strip().splitlines()
    if is_refusal(error):
        return _REFUSALS[name].format(what=what)
    if name == "OfflineModeIsEnabled":
        return "the hub is not asked, because HF_HUB_OFFLINE is set"
    return f"the hub could not be reached ({name}: {text[0] if text else 'no reason given'})"
