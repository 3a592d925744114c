"""A config as YAML that loads to the same config again."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from optune.config.options import NO_RULES, Rules, rules_of
from optune.config.problems import HIDDEN, hides
from optune.config.shipped import shipped_name

RECIPE_LINE = "# recipe: "
RESUMED_LINE = "# resumed: "
# A text that no reader can take for null, a number, a truth value, a list or an interpolation.
_PLAIN = re.compile(r"[A-Za-z_/.~][\w/.+@-]*(?: [\w/.+@-]+)*\Z", re.ASCII)
_TAKEN = re.compile(r"(?:null|none|true|false|yes|no|on|off|y|n|~)\Z", re.IGNORECASE)
_NUMERIC = re.compile(r"\.?[0-9]|\.(?:inf|nan)\Z", re.IGNORECASE)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_yaml(cfg: Any, *, hide_secrets: bool = False) -> str:
    """`cfg` (a dataclass that `load` returned) as YAML; `load` makes the same config of it.

    The first line names the recipe where `cfg` belongs to one. `hide_secrets` is for what is printed or logged: the
    values of keys like `api_key` become `***`.
    """
    recipe = recipe_of(type(cfg))
    lines = [f"{RECIPE_LINE}{recipe}"] if recipe else []
    lines += _section(cfg, "", hide_secrets)
    return "\n".join(lines) + "\n"


def to_run_yaml(cfg: Any) -> str:
    """The config.yaml of a run folder, which repeats the run: `cfg` without what was for this one start.

    Where the run goes on from another folder, and the changes that were allowed for it, stand in a comment at the end:
    see `read_resumed`.
    """
    start: dict[str, Any] = {}
    if cfg.resume not in (None, "auto"):
        start["from"] = str(Path(cfg.resume).absolute())
    if cfg.allow_change:
        start["allow_change"] = list(cfg.allow_change)
    comment = f"{RESUMED_LINE}{json.dumps(start)}\n" if start else ""
    return to_yaml(dataclasses.replace(cfg, resume=None, allow_change=[])) + comment


def read_resumed(config: Path) -> tuple[str | None, list[str]]:
    """From which folder the run of a saved config went on last, and the changes that were allowed for it.

    `optune resume` needs both as long as the run has not saved anew: its newest checkpoint is that of before.
    """
    for line in reversed(config.read_text(encoding="utf-8-sig").splitlines()):
        if line.startswith(RESUMED_LINE):
            start = json.loads(line.removeprefix(RESUMED_LINE))
            return start.get("from"), start.get("allow_change", [])
    return None, []


def to_dict(cfg: Any, *, hide_secrets: bool = True) -> dict[str, Any]:
    """`cfg` as plain dicts and lists, for loggers."""
    return _plain(cfg, hide_secrets)


def recipe_of(schema: type[Any]) -> str | None:
    """How the recipe that declares `schema` is named on the command line: a shipped name or an absolute path."""
    module = inspect.getmodule(schema)
    file = getattr(module, "__file__", None)
    if file is None or module is None or module.__name__.startswith("optune."):
        return None
    return shipped_name(Path(file)) or str(Path(file).absolute())


def _plain(value: Any, hide: bool) -> Any:
    declared = dataclasses.is_dataclass(value)
    if declared:
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {
            key: HIDDEN if hide and hides(key, item, declared=declared) else _plain(item, hide)
            for key, item in value.items()
        }
    return [_plain(item, hide) for item in value] if isinstance(value, (list, tuple)) else value


def _section(section: Any, indent: str, hide: bool) -> list[str]:
    lines: list[str] = []
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, str) and get_origin(hints[field.name]) is Literal:
            lines.append(f"{indent}{field.name}: {value}")  # one of the declared words, `none` among them
        else:
            lines += _entry(field.name, value, rules_of(field), indent, hide, declared=True)
    return lines


def _entry(key: str, value: Any, rules: Rules, indent: str, hide: bool, *, declared: bool = False) -> list[str]:
    name = f"{indent}{_scalar(key, NO_RULES)}:"
    if hide and hides(key, value, declared=declared):
        return [f"{name} {_scalar(HIDDEN, NO_RULES)}"]
    if dataclasses.is_dataclass(value):
        return [name, *_section(value, f"{indent}  ", hide)]
    if isinstance(value, dict) and value:
        return [name, *(line for item in value.items() for line in _entry(*item, rules, f"{indent}  ", hide))]
    if isinstance(value, (list, tuple)) and any(
        isinstance(item, dict) or dataclasses.is_dataclass(item) for item in value
    ):
        return [name, *(line for item in value for line in _item(item, rules, f"{indent}  ", hide))]
    return [f"{name} {_inline(value, rules, hide)}"]


def _item(item: Any, rules: Rules, indent: str, hide: bool) -> list[str]:
    """One item of a list that holds mappings."""
    if dataclasses.is_dataclass(item):
        lines = _section(item, f"{indent}  ", hide)
    elif isinstance(item, dict) and item:
        lines = [line for entry in item.items() for line in _entry(*entry, rules, f"{indent}  ", hide)]
    else:
        return [f"{indent}- {_inline(item, rules, hide)}"]
    return [f"{indent}- {lines[0][len(indent) + 2 :]}", *lines[1:]]


def _inline(value: Any, rules: Rules, hide: bool) -> str:
    if isinstance(value, dict):
        entries = (
            f"{_scalar(key, NO_RULES)}: {_inline(HIDDEN if hide and hides(key, item) else item, rules, hide)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(item, rules, hide) for item in value) + "]"
    return _scalar(value, rules)


def _scalar(value: Any, rules: Rules) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return _text(str(value), rules)


def _text(text: str, rules: Rules) -> str:
    """A text, in quotes where bare characters would be read otherwise; what `load` would expand is escaped."""
    text = _escape_expansions(text, rules.is_path)
    is_plain = _PLAIN.match(text) and not _TAKEN.match(text) and not _NUMERIC.match(text)
    return text if is_plain else _quote(text)


def _escape_expansions(text: str, is_path: bool) -> str:
    if is_path:
        text = text.replace("$", "$$")
    # OmegaConf reads `${`; a backslash keeps it a text, and backslashes in front of one count double.
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def _quote(text: str) -> str:
    """YAML's double quotes. JSON's would do but for characters that YAML wants escaped and JSON escapes in halves."""
    return '"' + "".join(_escape(character) for character in text) + '"'


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def write_override(key: str, text: str, *, is_path: bool = False) -> str:
    """`key='text'` as an override that gives `key` these very characters."""
    escaped = _escape_expansions(text, is_path)
    # Hydra's grammar: a quote is escaped by a backslash, and backslashes in front of a quote count double.
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), escaped)
    return f"{key}='{escaped}'"
