"""A YAML file as nodes: characters kept, places kept, nothing guessed; unreadable files are refused with the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from optune.config.nodes import Mapping, Node, Scalar, Sequence
from optune.config.problems import mask_entries
from optune.errors import ConfigError

MAX_NODES = 100_000
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _TextLoader(yaml.SafeLoader):
    """Leaves every plain scalar a text; only the merge key `<<` keeps its meaning."""

    yaml_implicit_resolvers = {"<": [(_MERGE_TAG, yaml.SafeLoader.yaml_implicit_resolvers["<"][0][1])]}  # noqa: RUF012


def read_yaml(path: Path, shown: str | None = None) -> Mapping:
    """The mapping that a YAML file holds; an empty file is an empty mapping. `shown` names the file in messages.

    Raises ConfigError with `file:line` where the file cannot be read, names a key twice, or is not a mapping.
    """
    shown = shown or str(path)
    return parse_yaml(_read_text(path, shown), shown)


def parse_yaml(text: str, shown: str) -> Mapping:
    """As `read_yaml`, from text."""
    try:
        root = yaml.compose(text, Loader=_TextLoader)
    except RecursionError:
        raise ConfigError("is nested too deeply", where=shown) from None
    except yaml.MarkedYAMLError as error:
        raise _unreadable(error, text, shown) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(
            f"cannot be read as YAML: the character U+{error.character:04X} is not allowed",
            where=f"{shown}:{line}",
        ) from None
    if root is None:
        return Mapping(where=shown)
    converted = _Conversion(shown).convert(root, f"{shown}:{root.start_mark.line + 1}")
    if not isinstance(converted, Mapping):
        kind = "a list" if isinstance(converted, Sequence) else f"the text {_quote(text)}"
        raise ConfigError(
            f"must hold a mapping (lines like `key: value`), not {kind}", where=f"{shown}:{root.start_mark.line + 1}"
        )
    return converted


def parse_flow_list(text: str, where: str) -> Sequence | None:
    """`[a, b]` written as a text, as the list that was meant; None where it is not a list."""
    try:
        root = yaml.compose(text, Loader=_TextLoader)
        node = _Conversion(where).convert(root, where) if isinstance(root, yaml.SequenceNode) else None
    except (yaml.YAMLError, ConfigError):
        return None
    return _stand_at(node, where) if isinstance(node, Sequence) else None


def _stand_at(node: Node, where: str) -> Any:
    """The same node with every place replaced by `where`."""
    if isinstance(node, Scalar):
        return Scalar(node.text, where, node.quoted)
    if isinstance(node, Sequence):
        return Sequence(tuple(_stand_at(item, where) for item in node.items), where)
    return Mapping({key: _stand_at(item, where) for key, item in node.entries.items()}, where)


def _read_text(path: Path, shown: str) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path.absolute())) from None
    try:
        # A byte order mark is no part of the first key; YAML counts \r\n as one line end.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"is not UTF-8: byte 0x{raw[error.start]:02x}", where=f"{shown}:{line}", hint="save the file as UTF-8"
        ) from None


def _unreadable(error: yaml.MarkedYAMLError, text: str, shown: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    number = min(mark.line + 1 if mark else 1, max(len(lines), 1))
    line = lines[number - 1] if lines else ""
    problem = " ".join(part for part in (error.context, error.problem) if part) or "unreadable"
    hint = None
    if line[: len(line) - len(line.lstrip())].count("\t") or "'\\t'" in problem:
        hint = "indent with spaces: YAML does not allow tabs"
    elif "mapping values are not allowed" in problem:
        hint = "a value that holds `: ` stands in quotes; keys of one mapping start in one column"
    elif "expected a single document" in problem:
        hint = "one file is one config: remove the `---` between documents"
    return ConfigError(
        f"cannot be read as YAML: {problem}, in {_quote(line.strip())}", where=f"{shown}:{number}", hint=hint
    )


class _Conversion:
    """YAML nodes into ours."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.count = 0
        self.open: set[int] = set()

    def convert(self, node: yaml.Node, where: str) -> Node:
        self.count += 1
        if self.count > MAX_NODES or id(node) in self.open:
            raise ConfigError("aliases that hold themselves, or too many of them", where=where)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise ConfigError(f"the YAML tag {node.tag!r} is not allowed in a config", where=self.place(node))
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Mapping(self.entries(node), where)
            if isinstance(node, yaml.SequenceNode):
                return Sequence(tuple(self.convert(item, self.place(item)) for item in node.value), where)
        finally:
            self.open.discard(id(node))
        return Scalar(node.value, where, quoted=getattr(node, "style", None) is not None)

    def place(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"

    def entries(self, node: yaml.MappingNode) -> dict[str, Node]:
        """The entries of a mapping. A value stands where its key stands; a key given twice is refused."""
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == _MERGE_TAG:
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    converted = self.convert(part, self.place(part))
                    if not isinstance(converted, Mapping):
                        raise ConfigError("`<<` merges a mapping", where=self.place(key))
                    merged = converted.entries | merged
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key must be a single word", where=self.place(key))
            if key.value in own:
                raise ConfigError(
                    f"the key {key.value!r} stands here for the second time; the first is on line {lines[key.value]}",
                    where=self.place(key),
                    hint="keep one of the two",
                )
            own[key.value] = self.convert(value, self.place(key))
            lines[key.value] = key.start_mark.line + 1
        return merged | own


def _quote(text: str, most: int = 80) -> str:
    """A piece of the file for a message; secrets are hidden."""
    text = mask_entries(" ".join(text.split()))
    return repr(text if len(text) <= most else text[: most - 1] + "…")
