"""`optune cp NAME DEST`: copies a shipped recipe or config."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from optune.errors import ConfigError
from tune_cli.arguments import Parser
from tune_cli.cat import find_shipped


def run(words: list[str]) -> int:
    """Writes the copy and says where; a file that is there stays unless --force is given."""
    parser = Parser("cp", "NAME DEST [--force]", "Copies a recipe or config. DEST is a folder or the name of the copy.")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    options, others = parser.split(words)
    name, destination = parser.take(others, "NAME", "DEST")
    source = find_shipped(name).path
    target = Path(destination).expanduser()
    if target.is_dir() or destination.endswith("/"):
        target = target / source.name
    elif not target.suffix:
        target = target.with_name(target.name + source.suffix)
    _write(source.read_bytes(), target, force=options.force)
    print(f"{target.absolute()}", file=sys.stdout)
    return 0


def _write(content: bytes, target: Path, *, force: bool) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(
            "is there already", where=str(target.absolute()), hint="give another name, or --force to overwrite it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {os.strerror(error.errno or 0)}", where=str(target.absolute())) from None
