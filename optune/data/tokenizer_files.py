"""Reading a model folder's tokenizer files: vocabulary, named tokens, chat templates."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from optune.errors import DataError, ModelError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

SHIPPED = Path(__file__).parent / "templates"
"""Where the named templates are."""

Template = tuple[str, str]
"""(text of a chat template, its file)."""

Sources = dict[str, Template]
"""Name of a chat template → the template."""


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """The vocabulary, with cutting and padding off. Raises ModelError where it is missing or broken."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise ModelError("there is no such folder", where=str(folder))
    if not path.is_file():
        has_other = any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt"))
        hint = "convert it: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        raise ModelError("the model folder has no tokenizer.json", where=str(folder), hint=hint if has_other else None)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception.
        raise ModelError(f"not a tokenizer: {error}", where=str(path)) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelError(f"holds {type(value).__name__}, wanted an object", where=str(path))
    return value


def read_names(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Named special tokens, `{"eos_token": "</s>", …}`; each is written as text or as an object with `content`."""
    named = read_json(folder / "special_tokens_map.json") | {
        key: settings[key] for key in NAMED_TOKENS if key in settings
    }
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key in NAMED_TOKENS if isinstance(text := texts.get(key), str)}


def add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Adds the tokens that `added_tokens_decoder` lists and `tokenizer.json` lacks, in the order of their ids."""
    listed = settings.get("added_tokens_decoder") or {}
    for number in sorted(listed, key=int):
        token = dict(listed[number])
        if backend.token_to_id(token["content"]) is None:
            flags = {
                key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token
            }
            backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])


def find_first_token(backend: tokenizers.Tokenizer) -> int | None:
    """The id that the tokenizer itself puts in front of a text, None where it puts none."""
    with_special, without = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    return with_special[0] if len(with_special) > len(without) and with_special[:1] != without[:1] else None


def read_templates(folder: Path, settings: dict[str, Any]) -> Sources:
    """The chat templates of a model; a file of its own counts before an entry in `tokenizer_config.json`."""
    found: Sources = {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = (_read_text(path), str(path))
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = (_read_text(extra), str(extra))
    if found:
        return found
    config_path = folder / "tokenizer_config.json"
    value = settings.get("chat_template")
    if isinstance(value, list):
        for number, entry in enumerate(value):
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise ModelError(f"chat_template[{number}] has no name and template", where=str(config_path))
            found[entry["name"]] = (entry["template"], f"{config_path} ({entry['name']})")
        return found
    if value is None:
        config_path = folder / "chat_template.json"
        value = read_json(config_path).get("chat_template")
    if value is None:
        return {}
    if not isinstance(value, str):
        raise ModelError(f"chat_template is {type(value).__name__}, wanted text", where=str(config_path))
    return {"default": (value, str(config_path))}


def choose_template(wanted: str, sources: Sources, backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> Template:
    """The model's template of that name, else the named one that is shipped, else the file of that name.

    Raises DataError where there is none of them, and where a shipped one needs tokens that the tokenizer has not.
    """
    if wanted in sources:
        return sources[wanted]
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.jinja"))}
    if wanted in shipped:
        text = _read_text(shipped[wanted])
        _check_tokens(wanted, text, backend, names)
        return text, str(shipped[wanted])
    path = Path(wanted).expanduser().absolute()
    if not path.is_file():
        own = f"; the model's own templates: {', '.join(sorted(sources))}" if sources else ""
        near = difflib.get_close_matches(wanted, [*sources, *shipped], n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is a .jinja file, or one of {', '.join(shipped)}"
        raise DataError(f"data.chat_template: no such file: {path}{own}", hint=hint)
    return _read_text(path), str(path)


def _check_tokens(name: str, text: str, backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
    """A shipped template lists the tokens that it writes behind `tokens:` in its first comment."""
    needed = text.partition("tokens: ")[2].partition(" -#}")[0].split()

    def is_there(token: str) -> bool:
        if token in NAMED_TOKENS:
            return token in names
        return backend.encode(token, add_special_tokens=False).ids == [backend.token_to_id(token)]

    if missing := [token for token in needed if not is_there(token)]:
        raise DataError(
            f"data.chat_template: the template {name} writes {', '.join(missing)}, which the tokenizer has not",
            hint="choose a template whose tokens the model knows: zephyr and alpaca need its end token alone",
        )


def changed_companions(folder: Path, template: str, end_ids: Collection[int]) -> dict[str, str | None]:
    """What has to stand beside a model in `folder` that was trained with another chat template than its own.

    File name → its text, None for one to leave out: the template replaces all others, and `generation_config.json`
    names the tokens that end an answer under it besides its own.
    """
    settings = read_json(folder / "generation_config.json")
    ends = settings.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    settings["eos_token_id"] = [*known, *sorted(set(end_ids) - set(known))]
    return {
        "chat_template.jinja": template,
        "chat_template.json": None,
        "additional_chat_templates": None,
        "generation_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def _read_text(path: Path) -> str:
    try:
        # Bytes, so that line ends stay as they are in the file: a template may write what it holds.
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error}", where=str(path)) from error
