"""`optune download REPO_ID [DEST]`: fetches a model from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from optune.errors import ConfigError
from tune_cli.arguments import Parser

_REPO_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?\Z", re.ASCII)


def run(words: list[str]) -> int:
    """Fetches weights, config, tokenizer and template, and prints the folder. What is there already is kept."""
    parser = Parser(
        "download",
        "REPO_ID [DEST] [--revision REVISION]",
        "Fetches a model from the Hugging Face hub into DEST (models/<name> if left out).\n"
        "HF_TOKEN in the environment opens models that need a login.",
    )
    parser.add_argument("--revision", help="a branch, tag or commit instead of the newest")
    options, others = parser.split(words)
    repo_id, *rest = parser.take(others, "REPO_ID", "DEST", optional=1)
    if not _REPO_ID.match(repo_id):
        raise ConfigError(f"{repo_id!r} is not a model of the hub", hint="write owner/name, as on its page")
    destination = Path(rest[0] if rest else f"models/{repo_id.rsplit('/', 1)[-1]}").expanduser()
    if destination.is_file():
        raise ConfigError("is a file; DEST is a folder", where=str(destination.absolute()))

    from optune import models

    print(models.download(repo_id, destination, revision=options.revision))
    return 0
