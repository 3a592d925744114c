"""Interpolations: `${other.key}` and `${oc.env:NAME}` become text, through OmegaConf."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from optune.config.nodes import Mapping, Node, Scalar, Sequence, join
from optune.config.problems import Problems, suggest

_RESOLVER = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*:")
_RESOLVERS = ("oc.env", "oc.decode", "oc.create", "oc.select", "oc.dict.keys", "oc.dict.values")
# OmegaConf reads a default as a number where it looks like one; in quotes it keeps its characters.
_ENV_DEFAULT = re.compile(r"(\$\{\s*oc\.env\s*:\s*[^,{}\s]+\s*,)\s*([^\s'\"{}\[\],][^'\"{}\[\],]*?)\s*\}")


def resolve(tree: Mapping, problems: Problems) -> Mapping:
    """`tree` with every interpolation replaced by what it stands for.

    Failures go to `problems`, naming key and variable. What comes out is text, as if it had been typed there.
    """
    if not _holds_interpolation(tree):
        return tree
    return _Resolution(tree, problems).run(tree)


def _holds_interpolation(node: Node) -> bool:
    if isinstance(node, Scalar):
        return "${" in node.text
    children = node.items if isinstance(node, Sequence) else node.entries.values()
    return any(_holds_interpolation(child) for child in children)


class _Resolution:
    def __init__(self, tree: Mapping, problems: Problems) -> None:
        from omegaconf import OmegaConf

        self.problems = problems
        self.unreadable: set[str] = set()
        self.config: Any = OmegaConf.create(self.plain(tree, ""))

    def run(self, tree: Mapping) -> Mapping:
        resolved = self.node(tree, self.config, "")
        return resolved if isinstance(resolved, Mapping) else tree

    def plain(self, node: Node, path: str) -> Any:
        """The tree as OmegaConf takes it: all texts, null as None. A text it cannot parse is noted and left out."""
        if isinstance(node, Mapping):
            return {key: self.plain(child, join(path, key)) for key, child in node.entries.items()}
        if isinstance(node, Sequence):
            return [self.plain(child, join(path, index)) for index, child in enumerate(node.items)]
        if "${" in node.text:
            text = self.checked(node, path)
            if text is None:
                self.unreadable.add(path)
            return text
        return None if node.is_null else node.text

    def checked(self, node: Scalar, path: str) -> str | None:
        from omegaconf import OmegaConf
        from omegaconf.errors import GrammarParseError

        unknown = [name for name in _RESOLVER.findall(node.text) if name not in _RESOLVERS]
        if unknown:
            hint = suggest(unknown[0], _RESOLVERS) or "use ${oc.env:NAME}, ${oc.env:NAME,default} or ${other.key}"
            self.problems.add(f"{path} uses ${{{unknown[0]}:…}}, which is not known", where=node.where, hint=hint)
            return None
        text = _ENV_DEFAULT.sub(r"\1'\2'}", node.text)
        try:
            OmegaConf.create({"key": text})
        except GrammarParseError as error:
            reason = str(error).splitlines()[0]
            self.problems.add(f"{path} holds an interpolation that cannot be read: {reason}", where=node.where)
            return None
        return text

    def node(self, node: Node, config: Any, path: str) -> Node:
        if isinstance(node, Mapping):
            children = {key: self.child(child, config, key, join(path, key)) for key, child in node.entries.items()}
            return replace(node, entries=children)
        if isinstance(node, Sequence):
            items = (self.child(child, config, index, join(path, index)) for index, child in enumerate(node.items))
            return replace(node, items=tuple(items))
        return node

    def child(self, node: Node, config: Any, key: str | int, path: str) -> Node:
        if not isinstance(node, Scalar):
            return self.node(node, config._get_node(key), path)
        return self.scalar(node, config, key, path) if "${" in node.text else node

    def scalar(self, node: Scalar, config: Any, key: str | int, path: str) -> Node:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if path in self.unreadable:
            return replace(node, is_broken=True)
        try:
            value = config[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            self.explain(node, path, error)
            return replace(node, is_broken=True)
        return _from_plain(value, node.where)

    def explain(self, node: Scalar, path: str, error: Exception) -> None:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        variable = re.search(r"Environment variable '([^']*)' not found", message)
        missing = re.search(r"Interpolation key '([^']*)' not found", message)
        if variable:
            hint = f"export {variable[1]}=…, or give a default: ${{oc.env:{variable[1]},default}}"
            message = f"{path} needs the environment variable {variable[1]}, which is not set"
        elif missing:
            hint = f"for the environment variable write ${{oc.env:{missing[1]}}}" if missing[1].isupper() else None
            message = f"{path} refers to ${{{missing[1]}}}, and the config has no such key"
        else:
            hint, message = None, f"{path} cannot be resolved: {message}"
        self.problems.add(message, where=node.where, hint=hint)


def _from_plain(value: Any, where: str) -> Node:
    if isinstance(value, dict):
        return Mapping({str(key): _from_plain(item, where) for key, item in value.items()}, where)
    if isinstance(value, list):
        return Sequence(tuple(_from_plain(item, where) for item in value), where)
    if value is None:
        return Scalar("null", where)
    text = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return Scalar(text, where, resolved=True)
