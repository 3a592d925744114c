"""A model's tokenizer and chat template, read from its folder with `tokenizers` and nothing else.

Reads `tokenizer.json` (the vocabulary), `tokenizer_config.json` and `special_tokens_map.json` (which tokens begin, end
and pad), and the chat templates in `chat_template.jinja`, `additional_chat_templates/`, `tokenizer_config.json` or
`chat_template.json`. Where they disagree the order is that of transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from optune.data.control import PlainText, compile_control, fence_markers, release_spoken
from optune.data.encoding import Encoded, TrainOn, encode, mark_answers
from optune.data.spans import Answer, AnswerFinder
from optune.data.template import ChatTemplate
from optune.data.tokenizer_files import (
    Sources,
    add_missing_tokens,
    changed_companions,
    choose_template,
    find_first_token,
    read_backend,
    read_json,
    read_names,
    read_templates,
)
from optune.data.traced import DATA, Traced, plain
from optune.data.word_cache import WordCache
from optune.errors import DataError, ModelError


def load_tokenizer(
    folder: str | Path, chat_template: str | None = None, *, template_date: str | None = None
) -> Tokenizer:
    """The tokenizer of the model in `folder`. Nothing is looked up on a network.

    `chat_template` replaces the model's template: the name of one of the model's own templates, of one in
    `data/templates`, or a file. `template_date` (2024-07-26) is the day that a template prints which asks for the date;
    None is today.

    Raises ModelError where a file is missing or broken, DataError where the chat template or the date is.
    """
    now = None if template_date is None else _read_date(template_date)
    folder = Path(folder).expanduser().resolve()
    backend = read_backend(folder)
    settings = read_json(folder / "tokenizer_config.json")
    names = read_names(folder, settings)
    add_missing_tokens(backend, settings)
    sources = read_templates(folder, settings)
    if chat_template is not None:
        sources = {"default": choose_template(chat_template, sources, backend, names)}
    tokenizer = Tokenizer(folder, backend, names, sources, now)
    if chat_template is not None:
        tokenizer.changed_files = changed_companions(folder, sources["default"][0], tokenizer.end_ids())
    return tokenizer


def _read_date(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise DataError(f"{text!r} is no day written as 2024-07-26", where="data.template_date") from None


class Tokenizer:
    """Text to token ids and back, and conversations to token ids with the answers marked.

    - `vocab_size`: the highest id that can occur, plus 1.
    - `bos_id`, `eos_id`: None where the tokenizer has none. `adds_bos`: whether a text begins with BOS.
    - `pad_id`: the pad token, else the end token, else 0; padding is told by its place, so any id does.
    - `control_ids`: the ids of the control tokens (see `control.py`).
    - `folder`: where the files are.
    - `template_name`: the file of the chat template, None where there is none.
    - `changed_files`: what a model trained with this tokenizer needs other files for than those in `folder`: name →
      text, None for a file to leave out. Empty unless the chat template was replaced.
    """

    def __init__(
        self,
        folder: Path,
        backend: tokenizers.Tokenizer,
        names: dict[str, str],
        template_sources: Sources,
        now: datetime | None = None,
    ) -> None:
        self.folder = folder
        self.changed_files: dict[str, str | None] = {}
        self.names = names
        ids = {name: backend.token_to_id(token) for name, token in names.items()}
        for name in ("bos_token", "eos_token"):
            if name in names and ids[name] is None:
                raise ModelError(
                    f"{name} {names[name]!r} is not in the vocabulary", where=str(folder / "tokenizer_config.json")
                )
        self.eos_id: int | None = ids.get("eos_token")
        first = find_first_token(backend)
        self.bos_id: int | None = ids.get("bos_token", first)
        # What `tokenizer.json` does decides, as in transformers; `add_bos_token` in the config is not asked.
        self.adds_bos = first is not None and first == self.bos_id
        self.pad_id: int = next((i for i in (ids.get("pad_token"), self.eos_id) if i is not None), 0)
        # BOS is put by `encode`, where the rendered text is known; offsets are wanted as they are.
        backend.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
        self._added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        self._backend = backend
        self._templates = {
            key: ChatTemplate(source, name=name, tokens=names, now=now)
            for key, (source, name) in template_sources.items()
        }
        self.template_name = next((template.name for template in self._templates.values()), None)
        literals = "\0".join(template.literals for template in self._templates.values())
        self.is_control = compile_control(self._added.values(), literals, names.get("eos_token"))
        self._words = WordCache(backend)
        self._plain_text = PlainText(backend, self._added, self.is_control)
        self.control_ids = self._plain_text.control_ids
        self._finders: dict[str, AnswerFinder] = {}
        self._spoken: dict[str, re.Pattern[str] | None] = {}

    def fingerprint(self) -> str:
        """sha256 over all that decides which tokens a text or a conversation becomes, as it is in memory."""
        templates = {key: template.identity for key, template in self._templates.items()}
        settings = [self.names, self.bos_id, self.eos_id, self.adds_bos, templates]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self._backend.to_str().encode())
        return digest.hexdigest()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text. `special=False`: the text alone, markers in it being plain text. `special=True`: markers
        are control tokens, and the text begins with exactly one BOS where the tokenizer begins texts with one."""
        traced = Traced(text) if special else Traced(text, ((len(text), DATA),))
        return self.encode_traced([traced], begin=special)[0].tokens.tolist()

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of token ids."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode_traced(
        self, texts: Sequence[Traced], *, begin: bool = True, parse_special: bool = False
    ) -> list[Encoded]:
        """Each text as one encoding, `begin` putting the BOS. No position is marked as trained."""
        return encode(
            texts,
            self._words,
            self._plain_text,
            bos_id=self.bos_id,
            adds_bos=self.adds_bos and begin,
            parse_special=parse_special,
        )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation through the chat template, equal to transformers' `apply_chat_template(tokenize=False)`."""
        template = self._choose(tools)
        return plain(template.render(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the rendered conversation, and for each whether it is trained under `train_on`."""
        traced = self.render_traced(messages, tools, add_generation_prompt=add_generation_prompt)
        (encoded,) = self.encode_traced([self.release_spoken(traced, messages, tools)])
        if not add_generation_prompt:
            encoded = mark_answers(encoded, self.find_answers(messages, tools, traced), messages, train_on)
        return encoded.tokens.tolist(), encoded.trained.tolist()

    def render_traced(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
        parse_special: bool = False,
    ) -> Traced:
        """The rendered conversation with the origin of each character. A template that turns markers inside a message
        into control tokens of its own is refused."""
        template = self._choose(tools)
        traced = template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        fenced = None if parse_special else fence_markers([list(messages), tools], self.is_control)
        if fenced is not None:
            other = template.render(*fenced, add_generation_prompt=add_generation_prompt)
            if self._plain_text.leaks(other):
                raise DataError(
                    f"text of a control token in a message becomes a control token in {template.name}",
                    hint="take the marker out of the row",
                )
        return traced

    def find_answers(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, rendered: Traced
    ) -> list[Answer]:
        """The spans of the answers in what `render_traced` gave (see `spans.py`)."""
        return self._finder(tools).find(messages, tools, rendered)

    def forget_seams(self) -> None:
        """From here on answers are found as if no conversation had been seen before."""
        for finder in self._finders.values():
            finder.forget()

    def end_ids(self, tools: Sequence[Any] | None = None) -> set[int]:
        """The ids that end an answer: the end token, and the one that the chat template writes after an answer."""
        ends = self._finder(tools).end_tokens if self._templates else ()
        # Where several tokens end an answer together it is the last of them.
        tokens = [found[-1] for end in ends if (found := self.is_control.findall(end))]
        return {i for i in (self.eos_id, *map(self._backend.token_to_id, tokens)) if i is not None}

    def release_spoken(self, text: Traced, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> Traced:
        """A rendered conversation as it is to be encoded: in answers, marks such as `<think>` are the model's own."""
        template = self._choose(tools)
        if template.name not in self._spoken:
            self._spoken[template.name] = self._learn_spoken(template)
        spoken = self._spoken[template.name]
        return text if spoken is None or not spoken.search(plain(text)) else release_spoken(text, messages, spoken)

    def _learn_spoken(self, template: ChatTemplate) -> re.Pattern[str] | None:
        """Matches the control tokens that are not special and that a chat of plain words is rendered without."""
        question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        try:
            chat = template.render([question, answer, question], add_generation_prompt=True)
        except DataError:
            return None
        turns = set(self.is_control.findall(plain(chat)))
        known = [token.content for token in self._added.values() if not token.special]
        spoken = [token for token in known if self.is_control.fullmatch(token) and token not in turns]
        return re.compile("|".join(map(re.escape, sorted(spoken, key=len, reverse=True)))) if spoken else None

    def teaches_stop(self, tokens: np.ndarray, trained: np.ndarray) -> bool:
        """Whether some target is a token that ends an answer: one of `end_ids`, or another control token that stands
        last in a run of targets, as where a template closes its answers with a token of its own."""
        last = trained & ~np.append(trained[1:], False)
        others = {self._backend.token_to_id(token) for name, token in self.names.items() if name != "eos_token"}
        ends = self.end_ids()
        closing = self._plain_text.control_ids - others | ends
        return bool(np.isin(tokens[trained], list(ends)).any() or np.isin(tokens[last], list(closing)).any())

    def printed_date(self, tools: Sequence[Any] | None) -> date | None:
        """The day that the chat template may print, None for one that prints none."""
        template = self._choose(tools)
        return template.date if template.prints_date else None

    def _finder(self, tools: Sequence[Any] | None) -> AnswerFinder:
        template = self._choose(tools)
        if template.name not in self._finders:
            finder = AnswerFinder(template, end_token=self.names.get("eos_token"), is_control=self.is_control)
            self._finders[template.name] = finder
        return self._finders[template.name]

    def _choose(self, tools: Sequence[Any] | None) -> ChatTemplate:
        if not self._templates:
            raise DataError(
                f"no chat template in {self.folder}",
                hint="give one as data.chat_template, or use data.format completion or text",
            )
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))
