"""Rendering is transformers' rendering, and what a template refuses is said in its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from optune import data
from optune.data.template import ChatTemplate
from optune.data.traced import plain
from optune.errors import DataError, ModelError
from tests import fixtures
from tests.data.chat_templates import FAMILIES, load_judge, load_ours, source_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says <b>the weather</b> & more: é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOL_CHAT = [
    say("user", "weather?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    say("tool", "12", tool_call_id="abcdefghi"),
    say("assistant", "It is 12."),
]
CHAT = [
    say("user", " Hi <there> "),
    say("assistant", "Hello,\n\nyou & 日本 "),
    say("user", "More"),
    say("assistant", "No"),
]
CHATS = {
    "one turn": CHAT[:2],
    "two turns": CHAT,
    "question last": CHAT[:3],
    "system": [say("system", " Be brief. "), *CHAT],
    "thinking": [
        CHAT[0],
        say("assistant", "<think>\nhm\n</think>\n\nHello"),
        CHAT[2],
        say("assistant", "<think>a</think>No"),
    ],
    "reasoning": [CHAT[0], say("assistant", "No", reasoning_content="because")],
    "developer": [say("developer", " Be brief. "), *CHAT],
    "a later system": [*CHAT[:2], say("system", "Now be long."), *CHAT[2:]],
    "two questions": [CHAT[0], *CHAT[:2]],
    "answer first": CHAT[1:],
    "empty question": [say("user", ""), CHAT[1]],
}


def judged(judge: PreTrainedTokenizerBase, messages: Any, **options: Any) -> str | None:
    """transformers' rendering, None where the template refuses the conversation."""
    try:
        return judge.apply_chat_template(messages, tokenize=False, **options)
    except jinja2.exceptions.TemplateError:
        return None


def rendered(ours: data.Tokenizer, messages: Any, tools: Any = None, prompt: bool = False) -> str | None:
    try:
        return ours.render(messages, tools, prompt)
    except DataError:
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_rendering_and_ids_equal_transformers(name: str) -> None:
    """Also where the template refuses, and refuses the same."""
    ours, judge = load_ours(name), load_judge(name)
    count = 0
    for chat, messages in CHATS.items():
        for prompt in (False, True):
            expected = judged(judge, messages, add_generation_prompt=prompt)
            assert rendered(ours, messages, None, prompt) == expected, chat
            if expected is not None:
                count += 1
                ids = judge.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]
                assert ours.encode_chat(messages, add_generation_prompt=prompt)[0] == ids, chat
    assert count >= 10


def test_at_least_fifteen_families_are_compared() -> None:
    """By what makes them different, so a template counts once under whatever name."""
    assert len({source_of(name).read_text(encoding="utf-8") for name in FAMILIES if "named" not in name}) >= 25


CALLS = [CALL | {"id": "abcdefgh1"}, CALL | {"id": "abcdefgh2"}]
MANY_STEPS = [
    say("user", "weather?"),
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    say("tool", "12", tool_call_id="abcdefgh1"),
    say("tool", "13", tool_call_id="abcdefgh2"),
    {"role": "assistant", "content": "Again.", "tool_calls": [CALL]},
    say("tool", "14", tool_call_id="abcdefghi"),
    say("assistant", "It is 14."),
    say("user", "Thanks"),
    say("assistant", "Bye"),
]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes_tools])
def test_tools_render_as_in_transformers(name: str) -> None:
    ours, judge = load_ours(name), load_judge(name)
    for messages in (TOOL_CHAT, TOOL_CHAT[:2], TOOL_CHAT[:1]):
        assert ours.render(messages, TOOLS) == judge.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    expected = None
    for length in range(1, len(MANY_STEPS) + 1):
        for tools in (TOOLS, None):
            expected = judged(judge, MANY_STEPS[:length], tools=tools)
            assert rendered(ours, MANY_STEPS[:length], tools) == expected
    assert name == "llama31" or expected is not None


PARTS = [{"type": "text", "text": " One, "}, {"type": "text", "text": "two "}]


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_are_shown_as_in_transformers_or_joined_for_templates_that_take_none(name: str) -> None:
    ours, judge = load_ours(name), load_judge(name)
    whole = [say("user", " One, two "), say("assistant", " One, two ")]
    parts: list[dict[str, Any]] = [{"role": message["role"], "content": PARTS} for message in whole]
    expected = judged(judge, parts if FAMILIES[name].takes_parts else whole)
    assert ours.render(parts) == expected
    if FAMILIES[name].takes_parts:
        assert expected != judged(judge, whole)


CONTENT = st.text(alphabet="ab<|>/ \n\té日{}%'\"\\", min_size=1, max_size=30)


@pytest.mark.parametrize("name", FAMILIES)
@given(contents=st.lists(CONTENT, min_size=2, max_size=5))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_content_renders_as_in_transformers(name: str, contents: list[str]) -> None:
    messages = [say(("user", "assistant")[index % 2], content) for index, content in enumerate(contents)]
    ours, judge = load_ours(name), load_judge(name)
    assert ours.render(messages) == judge.apply_chat_template(messages, tokenize=False)


def test_refusal_is_told_in_the_templates_own_words() -> None:
    tokenizer = load_ours("mistral")
    with pytest.raises(DataError, match="roles must alternate") as caught:
        tokenizer.render([say("user", "a"), say("user", "b")])
    assert "chat_template.jinja" in str(caught.value.hint)


def test_a_template_that_fails_says_on_which_line() -> None:
    template = ChatTemplate("{% for m in messages %}\n{{ 'a' + m.content }}\n{% endfor %}", name="my.jinja")
    with pytest.raises(DataError, match="fails on line 2: TypeError"):
        template.render([{"role": "user", "content": {"a": 1}}])


def test_a_text_that_is_no_template_is_refused_with_file_and_line(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path, chat_template="{{ bos_token }}\n{% for m in %}")
    with pytest.raises(DataError, match=r"chat_template\.jinja:2: not a chat template"):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format(messages[0].content) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(DataError, match=r"SecurityError|UndefinedError"):
        ChatTemplate(attack + "{{ undefined.x }}", name="evil").render([say("user", "x")])


def test_to_json_has_the_options_of_transformers() -> None:
    template = ChatTemplate("{{ messages[0].x | tojson(indent=2, sort_keys=true, separators=(',', ': ')) }}", name="t")
    value = {"b": "<é>", "a": [1, None]}
    expected = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True, separators=(",", ": "))
    assert plain(template.render([{"role": "user", "x": value}])) == expected


def test_rendering_keeps_to_one_date_for_a_whole_run() -> None:
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", name="t")
    assert plain(template.render([])) == plain(template.render([]))


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize("place", ["config", "config list", "jinja", "legacy json", "additional"])
def test_templates_are_found_wherever_transformers_finds_them(tmp_path: Path, place: str) -> None:
    fixtures.write_tokenizer(tmp_path, chat_template=None)
    config_path = tmp_path / "tokenizer_config.json"
    settings_ = json.loads(config_path.read_text())
    if place in ("config", "jinja"):
        settings_["chat_template"] = "D" if place == "config" else "not this one"
    if place == "config list":
        settings_["chat_template"] = NAMED
    if place in ("jinja", "additional"):
        (tmp_path / "chat_template.jinja").write_text("D")
    if place == "additional":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    if place == "legacy json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    config_path.write_text(json.dumps(settings_))
    tokenizer = data.load_tokenizer(tmp_path)
    assert tokenizer.render([say("user", "x")]) == "D"
    if place in ("config list", "additional"):
        assert tokenizer.render([say("user", "x")], TOOLS) == "T"
        assert data.load_tokenizer(tmp_path, "tool_use").render([say("user", "x")]) == "T"
    if place != "legacy json":
        judge = AutoTokenizer.from_pretrained(tmp_path)
        assert judge.apply_chat_template([say("user", "x")], tokenize=False) == "D"


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path)
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert data.load_tokenizer(tmp_path, str(tmp_path / "other.jinja")).render([say("user", "x")]) == "x<end>"
    with pytest.raises(DataError, match=f"data.chat_template: no such file: {tmp_path}/nope.jinja"):
        data.load_tokenizer(tmp_path, str(tmp_path / "nope.jinja"))


def test_no_template_is_an_error_only_where_one_is_needed(tmp_path: Path) -> None:
    tokenizer = data.load_tokenizer(fixtures.write_tokenizer(tmp_path, chat_template=None))
    assert tokenizer.encode("w1 w2") == [16, 17]
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.render([say("user", "x")])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00\xff"])
def test_broken_tokenizer_files_are_named(tmp_path: Path, content: str) -> None:
    fixtures.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        data.load_tokenizer(tmp_path)


def test_missing_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}/nowhere: there is no such folder"):
        data.load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no tokenizer\.json") as caught:
        data.load_tokenizer(tmp_path)
    assert "save_pretrained" in str(caught.value.hint)


def test_named_tokens_may_be_objects_and_must_exist(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings_ = json.loads(path.read_text()) | {"eos_token": {"content": "<end>", "special": True}}
    path.write_text(json.dumps(settings_))
    assert data.load_tokenizer(tmp_path).eos_id == 4
    path.write_text(json.dumps(settings_ | {"eos_token": "<nope>"}))
    with pytest.raises(ModelError, match="eos_token '<nope>' is not in the vocabulary"):
        data.load_tokenizer(tmp_path)
    path.write_text("{broken")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not JSON"):
        data.load_tokenizer(tmp_path)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    count = len(fixtures.VOCABULARY)
    added = {str(count): {"content": "<new>", "special": True}, "4": {"content": "<end>", "special": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    tokenizer = data.load_tokenizer(tmp_path)
    assert tokenizer.encode("w1 <new>", special=True)[-1] == count
    assert tokenizer.vocab_size == count + 1
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<new>") == count
