"""What a conversation becomes, worked out slowly and without the code under test.

transformers renders it three times: as it is; with a private character in every answer, which shows where it stands;
and with every marker in the messages defaced, so that the markers left are the template's own. What the model has to
write for an answer is spelled out by hand for each family, and must stand in the text word for word. The template's
markers are tokens; all text between them is encoded by a tokenizer that does not know them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from tests.data.chat_templates import FAMILIES, SPECIAL, load_judge, make_backend

Message = dict[str, Any]

MARKER = re.compile("|".join(map(re.escape, sorted(SPECIAL, key=len, reverse=True))))
_DEFACED = "\ue0ff"


def reference(
    name: str, messages: list[Message], tools: Any = None, *, train_on: str = "assistant"
) -> tuple[list[int], list[float]]:
    """Ids, and for each the weight of its target; 0 where it is none."""
    text = render(name, messages, tools)
    spans = [(messages[index].get("weight", 1), *span) for index, span in find_answers(name, messages, tools, text)]
    if train_on == "last_assistant":
        spans = spans[-1:]
    ids, offsets = encode(text, deface(name, messages, tools))
    weights = [float(train_on == "all")] * len(ids)
    for place, (begin, end) in enumerate(offsets):
        for weight, start, stop in spans:
            if end > start and begin < stop:
                weights[place] = weight
    return ids, [0.0, *weights[1:]]


def render(name: str, messages: list[Message], tools: Any) -> str:
    shown = messages if FAMILIES[name].takes_parts else [_join(message) for message in messages]
    text = load_judge(name).apply_chat_template(shown, tools=tools, tokenize=False)
    assert isinstance(text, str)
    return text


def _join(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def find_answers(name: str, messages: list[Message], tools: Any, text: str) -> list[tuple[int, tuple[int, int]]]:
    """(message, its characters in `text`) of every answer."""
    marked, signs = copy.deepcopy(messages), {}
    for index, message in enumerate(marked):
        if message["role"] == "assistant":
            signs[index] = chr(0xE000 + index)
            _put_sign(name, message, signs[index])
    marked_text = render(name, marked, tools)
    unsigned = re.compile(f"[{''.join(signs.values())}]") if signs else re.compile("(?!)")
    assert unsigned.sub("", marked_text) == text, "the signs change what the template does"
    answers = []
    for index, sign in signs.items():
        wanted = write_answer(name, marked[index], is_last=index == len(messages) - 1)
        start = marked_text.index(sign) - wanted.index(sign)
        assert marked_text[start : start + len(wanted)] == wanted, (name, wanted, marked_text)
        begin = len(unsigned.sub("", marked_text[:start]))
        answers.append((index, (begin, begin + len(unsigned.sub("", wanted)))))
    return answers


def _put_sign(name: str, message: Message, sign: str) -> None:
    """Puts the sign behind the first letter of what the message says."""

    def signed(text: str) -> str:
        place = len(text) - len(text.lstrip()) + 1
        return text[:place] + sign + text[place:]

    content, calls = message["content"], message.get("tool_calls")
    if calls and (name in HIDE_CONTENT or not content):
        calls[0]["function"]["name"] = signed(calls[0]["function"]["name"])
    elif isinstance(content, list):
        part = next(part for part in content if part["text"].strip())
        part["text"] = signed(part["text"])
    else:
        message["content"] = signed(content)


HIDE_CONTENT = ("llama31", "mistral_tools", "harmony", "hermes", "granite")
"""Families that leave out the words beside a call."""


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_tags(arguments_first: bool = False) -> Callable[[str, list[Any]], str]:
    def write(content: str, calls: list[Any]) -> str:
        texts = [content] if content and not arguments_first else []
        for call in calls:
            named, given = f'"name": "{call["name"]}"', f'"arguments": {_dump(call["arguments"])}'
            inside = ", ".join((given, named) if arguments_first else (named, given))
            texts.append(f"<tool_call>\n{{{inside}}}\n</tool_call>")
        return "\n".join(texts) + "<|im_end|>"

    return write


def _deepseek(content: str, calls: list[Any]) -> str:
    begin, end = "<|tool▁call▁begin|>function<|tool▁sep|>", "<|tool▁call▁end|>"
    written = [f"{begin}{call['name']}\n{_dump(call['arguments'])}{end}" for call in calls]
    return f"{content}<|tool▁calls▁begin|>{chr(10).join(written)}<|tool▁calls▁end|><|end▁of▁sentence|>"


def _glm(content: str, calls: list[Any]) -> str:
    said = f"\n{content}" if content else ""
    for call in calls:
        pairs = "".join(
            f"\n{key}={value if isinstance(value, str) else _dump(value)}" for key, value in call["arguments"].items()
        )
        said += f"\n<tool_call>{call['name']}{pairs}\n</tool_call>"
    return said


def _named_llama3(content: str, calls: list[Any]) -> str:
    texts = [content.strip()] if content.strip() else []
    texts += [f'{{"name": {_dump(call["name"])}, "parameters": {_dump(call["arguments"])}}}' for call in calls]
    return "\n".join(texts) + "<|eot_id|>"


CALLS: dict[str, Callable[[str, list[Any]], str]] = {
    "qwen25": _in_tags(),
    "qwen3": _in_tags(),
    "named_chatml": _in_tags(),
    "hermes": _in_tags(arguments_first=True),
    "llama31": lambda _, c: f'{{"name": "{c[0]["name"]}", "parameters": {_dump(c[0]["arguments"])}}}<|eot_id|>',
    "mistral_tools": lambda _, c: f"[TOOL_CALLS] {_dump([f | {'id': 'abcdefghi'} for f in c])}</s>",
    "harmony": lambda _, c: f" to={c[0]['name']}<|channel|>commentary<|message|>{_dump(c[0]['arguments'])}<|call|>",
    "granite": lambda _, c: f"<|tool_call|>{_dump(c)}<|end_of_text|>",
    "glm4": _glm,
    "deepseek_tools": _deepseek,
    "nemotron": lambda said, c: f"{said.strip()}<TOOLCALL>{_dump(c)}</TOOLCALL><|eot_id|>",
    "named_llama3": _named_llama3,
}
"""What an answer with calls looks like, from the generation prompt to the end of the turn."""


def write_answer(name: str, message: Message, *, is_last: bool) -> str:
    """What the model has to write for this message."""
    family, content = FAMILIES[name], message.get("content") or ""
    if isinstance(content, list):
        texts = [part["text"] for part in content]
        content = "".join(map(str.strip, texts)) if family.takes_parts else "".join(texts)
    opens = family.last_frame if is_last and family.last_frame is not None else family.frame
    if message.get("tool_calls"):
        written = CALLS[name](content, [call["function"] for call in message["tool_calls"]])
        return (opens if name == "qwen3" else "") + written
    content = content.strip() if family.trims else content
    if name == "smollm3" or (name == "qwen3" and is_last):
        content = content.lstrip("\n")
    return opens + content + (family.last_end if is_last and family.last_end else family.end)


def deface(name: str, messages: list[Message], tools: Any) -> str:
    """The rendering with the first character of every marker in the messages exchanged."""

    def visit(value: Any) -> Any:
        if isinstance(value, str):
            return MARKER.sub(lambda match: _DEFACED + match[0][1:], value)
        if isinstance(value, list):
            return [visit(item) for item in value]
        return {visit(key): visit(item) for key, item in value.items()} if isinstance(value, dict) else value

    return render(name, visit(messages), visit(tools))


@cache
def _bare() -> tuple[Tokenizer, dict[int, int]]:
    """The tokenizer without its special tokens, and its ids → those of the whole one."""
    description = json.loads(make_backend().to_str())
    description["added_tokens"] = []
    bare = Tokenizer.from_str(json.dumps(description))
    bare.add_tokens([token for token in make_backend().get_added_tokens_decoder().values() if not token.special])
    whole = make_backend().get_vocab()
    return bare, {number: whole[token] for token, number in bare.get_vocab().items()}


def encode(text: str, defaced: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and characters; markers that stand in `defaced` too are tokens."""
    assert len(text) == len(defaced)
    bare, same = _bare()
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    cursor = 0
    for start, end in [*(match.span() for match in MARKER.finditer(defaced)), (len(text), len(text))]:
        piece = bare.encode(text[cursor:start])
        ids += [same[number] for number in piece.ids]
        offsets += [(cursor + begin, cursor + stop) for begin, stop in piece.offsets]
        if start < end:
            ids.append(make_backend().get_vocab()[text[start:end]])
            offsets.append((start, end))
        cursor = end
    return ids, offsets
