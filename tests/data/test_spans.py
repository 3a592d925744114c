"""What is trained: the answers and their end tokens, for every template, by an independent slow reference."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optune import data
from optune.errors import DataError
from tests import fixtures
from tests.data.chat_templates import FAMILIES, Family, load_judge, load_ours
from tests.data.test_template import CALL, TOOL_CHAT, TOOLS, say


def trained_texts(tokenizer: data.Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The trained stretches, as text."""
    ids, trained = tokenizer.encode_chat(messages, **options)
    groups = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for is_trained, group in groups if is_trained]


def reference(name: str, family: Family, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Ids and flags from transformers' rendering and encoding, the answers found by searching for their text.

    Contents begin and end in a word that occurs nowhere else, so the search has one result.
    """
    judge = load_judge(name)
    text = judge.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            content = message["content"].strip() if family.trims else message["content"]
            is_last = index == len(messages) - 1
            if name == "smollm3" or (name == "qwen3" and is_last):
                content = content.lstrip("\n")
            assert text.count(content) == 1
            start = text.index(content)
            end_token = family.last_end if family.last_end and is_last else family.end
            frame = family.last_frame if family.last_frame and is_last else family.frame
            stop = start + len(content) + len(end_token)
            assert text[start - len(frame) : start] == frame
            assert text[start + len(content) : stop] == end_token
            spans.append((start - len(frame), stop))
    encoding = judge(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    flags = [any(end > start and begin < stop for start, stop in spans) for begin, end in offsets]
    return ids, flags


_FILLER = st.text(alphabet="ab ,.!<|>\n\té日🙂", max_size=12)
_SPACE = st.sampled_from(["", " ", "\n", "  ", "\n\n"])


@st.composite
def conversations(draw: st.DrawFn, takes_system: bool) -> list[dict[str, Any]]:
    count = draw(st.integers(2, 6))
    messages = [
        say(
            ("user", "assistant")[index % 2],
            f"{draw(_SPACE)}q{index}x{draw(_FILLER)}x{index}q{draw(_SPACE)}",
        )
        for index in range(count)
    ]
    return [say("system", "s0x rules x0s"), *messages] if takes_system and draw(st.booleans()) else messages


@pytest.mark.parametrize("name", FAMILIES)
@given(pick=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_ids_and_targets_equal_a_slow_reference(name: str, pick: st.DataObject) -> None:
    messages = pick.draw(conversations(FAMILIES[name].takes_system))
    tokenizer = load_ours(name)
    ids, trained = tokenizer.encode_chat(messages)
    expected_ids, expected = reference(name, FAMILIES[name], messages)
    assert ids == expected_ids
    # Nothing predicts the first token.
    assert trained == [False, *expected[1:]]


@given(pick=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_generation_tags_train_what_transformers_marks_less_the_white_space_behind(pick: st.DataObject) -> None:
    messages = pick.draw(conversations(True))
    ids, trained = load_ours("tagged").encode_chat(messages)
    judge = load_judge("tagged")
    marked = judge.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    newline = judge.encode("\n", add_special_tokens=False)
    end_id = judge.convert_tokens_to_ids("<|im_end|>")
    expected = [
        bool(flag) and not (ids[place - 1] == end_id and [ids[place]] == newline)
        for place, flag in enumerate(marked["assistant_masks"])
    ]
    assert ids == marked["input_ids"]
    assert trained == expected


def test_tool_calls_are_trained_with_the_frame_that_the_model_must_write() -> None:
    texts = {
        "llama31": '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>',
        "mistral_tools": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]'
        "</s>",
        "harmony": ' to=get_weather<|channel|>commentary<|message|>{"city": "Paris"}<|call|>',
        "qwen25": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
    }
    for name, expected in texts.items():
        tokenizer = load_ours(name)
        first, second = trained_texts(tokenizer, TOOL_CHAT, tools=TOOLS)
        assert first.removeprefix("\n") == expected, name
        end = FAMILIES[name].last_end or FAMILIES[name].end
        assert second in [
            f"{frame}It is 12.{end}" for frame in ("", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>")
        ]


def test_the_answer_starts_where_generation_starts() -> None:
    """The text before the first target is what generation is given."""
    for name in ("llama3", "llama31", "smollm2", "qwen25", "qwen3", "gemma", "phi3", "zephyr", "harmony", "tagged"):
        tokenizer = load_ours(name)
        messages = [say("user", "q0x hello x0q"), say("assistant", "q1x there x1q")]
        ids, trained = tokenizer.encode_chat(messages)
        prompt, _ = tokenizer.encode_chat(messages[:1], add_generation_prompt=True)
        given = tokenizer.decode(ids[: trained.index(True)])
        assert given == tokenizer.decode(prompt), name


def test_thinking_is_trained_where_the_template_shows_it_and_nowhere_else() -> None:
    """Qwen3 drops the thoughts of earlier turns; a prefix rendering would show them."""
    messages = [
        say("user", "one"),
        say("assistant", "<think>\nearly thought\n</think>\n\nfirst answer"),
        say("user", "two"),
        say("assistant", "<think>\nlate thought\n</think>\n\nsecond answer"),
    ]
    assert trained_texts(load_ours("qwen3"), messages) == [
        "first answer<|im_end|>",
        "<think>\nlate thought\n</think>\n\nsecond answer<|im_end|>",
    ]
    assert trained_texts(load_ours("deepseek"), messages[:2]) == ["\n\nfirst answer<|end▁of▁sentence|>"]


MULTI_TURN = [
    say("user", "w1"),
    say("assistant", "w2 w3"),
    say("user", "w4"),
    say("assistant", "w5"),
    say("user", "w6"),
]


@pytest.fixture
def t0(tmp_path: Path) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))


def test_a21_a23_every_answer_of_a_chat_without_generation_tags_is_trained(t0: data.Tokenizer) -> None:
    assert trained_texts(t0, MULTI_TURN) == ["w2 w3 <end>", "w5 <end>"]
    assert trained_texts(t0, MULTI_TURN, train_on="last_assistant") == ["w5 <end>"]
    ids, trained = t0.encode_chat(MULTI_TURN, train_on="all")
    assert trained == [False] + [True] * (len(ids) - 1)


def test_a23_a_changed_question_moves_no_target(t0: data.Tokenizer) -> None:
    changed = [*MULTI_TURN[:-1], say("user", "w7")]
    ids, trained = t0.encode_chat(MULTI_TURN)
    other_ids, other = t0.encode_chat(changed)
    assert ids != other_ids
    assert trained == other


def test_answers_beginning_with_the_conversation_are_found(t0: data.Tokenizer) -> None:
    assert trained_texts(t0, [say("assistant", "w1"), say("user", "w2"), say("assistant", "w3")]) == [
        "w1 <end>",
        "w3 <end>",
    ]


def test_empty_questions_do_not_confuse_the_search(t0: data.Tokenizer) -> None:
    chat = [say("user", ""), say("assistant", "w1"), say("user", ""), say("assistant", "w1")]
    assert trained_texts(t0, chat) == ["w1 <end>", "w1 <end>"]


def test_the_same_words_in_question_and_answer_are_told_apart(t0: data.Tokenizer) -> None:
    chat = [say("user", "ok"), say("assistant", "ok"), say("user", "assistant ok"), say("assistant", "assistant")]
    assert trained_texts(t0, chat) == ["ok <end>", "assistant <end>"]


def template_of(tmp_path: Path, source: str) -> data.Tokenizer:
    return data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "own", chat_template=source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # The end token is text that no token stands for.
        ("{% for m in messages %}{{ m.role + ' ' + m.content + ' yes \n' }}{% endfor %}", ["w2 yes", "w4 yes"]),
        # Nothing at all ends a turn.
        ("{% for m in messages %}{{ m.role + ' ' + m.content + '\n' }}{% endfor %}", ["w2", "w4"]),
        # The end token is a separator before the next turn.
        (
            "{% for m in messages %}{{ m.role + ' ' + m.content }}{{ '<end>' if not loop.last }}{% endfor %}",
            ["w2", "w4"],
        ),
        # Text in set blocks, macros, filters.
        (
            "{% macro turn(m) %}<turn>{{ m.role }}\n{% filter trim %} {{ m.content }} {% endfilter %}<end>\n"
            "{% endmacro %}"
            "{% for m in messages %}{% set t %}{{ turn(m) }}{% endset %}{{ t ~ '' }}{% endfor %}",
            ["w2 <end>", "w4 <end>"],
        ),
        # Contents gathered first, written later.
        (
            "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + ['<turn>%s\n%s<end>' | "
            "format(m.role, m.content)] %}{% endfor %}{{ ns.all | join('\n') }}",
            ["w2 <end>", "w4 <end>"],
        ),
    ],
)
def test_unusual_templates_train_the_answer_and_its_end(tmp_path: Path, source: str, expected: list[str]) -> None:
    chat = [say("user", "w1"), say("assistant", "w2"), say("user", "w3"), say("assistant", "w4")]
    assert trained_texts(template_of(tmp_path, source), chat) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content | urlize }}<end>{% endfor %}", "cannot be followed"),
        ("{% for m in messages %}{{ m.content }}<end>{% endfor %}{{ messages[1].content }}", "several places"),
    ],
)
def test_what_cannot_be_proven_is_refused_by_the_name_of_the_template(tmp_path: Path, source: str, reason: str) -> None:
    tokenizer = template_of(tmp_path, source)
    with pytest.raises(DataError, match=f"cannot prove .*{reason}") as caught:
        tokenizer.encode_chat([say("user", "w1"), say("assistant", "w2"), say("user", "w3")])
    assert "chat_template.jinja" in str(caught.value)
    assert "generation" in str(caught.value.hint)


def test_two_tool_calls_in_one_answer_are_one_answer() -> None:
    two = [say("user", "weather?"), {"role": "assistant", "tool_calls": [CALL, CALL]}]
    (text,) = trained_texts(load_ours("qwen25"), two, tools=TOOLS)
    assert len(re.findall("<tool_call>", text)) == 2
    assert text.endswith("</tool_call><|im_end|>")


def test_a_frame_that_every_answer_has_is_trained_because_the_model_writes_it(tmp_path: Path) -> None:
    """The generation prompt of this template differs from turn to turn, so no fixed text can be searched for."""
    source = (
        "{% for m in messages %}{{ '<turn>w%s %s\n' % (loop.index, m.role) }}"
        "{{ ('yes ' if m.role == 'assistant' else '') + m.content + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>w%s assistant\n' % (messages | length + 1) }}{% endif %}"
    )
    chat = [say("user", "w11"), say("assistant", "w12"), say("user", "w13"), say("assistant", "w14")]
    assert trained_texts(template_of(tmp_path, source), chat) == ["yes w12 <end>", "yes w14 <end>"]


def test_a_frame_is_trained_where_the_template_cannot_render_what_comes_before(tmp_path: Path) -> None:
    """A template that looks at the first message renders no prompt for a chat that the answer begins."""
    source = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{{ '<turn>' + m.role + '\n' }}{{ 'yes ' if m.role == 'assistant' }}"
        "{{ m.content + '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
    )
    assert trained_texts(template_of(tmp_path, source), [say("assistant", "w1")]) == ["yes w1 <end>"]


def test_a_prompt_that_opens_a_thought_does_not_hide_the_answers_whose_thought_is_dropped(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<turn>assistant\nyes\n' + (m.reasoning_content or '') + '\nno\n' + m.content + '<end>' }}"
        "{% else %}{{ '<turn>' + m.role + '\n' + m.content + '<end>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>assistant\nyes\n' }}{% endif %}"
    )
    chat = [
        say("user", "w1"),
        say("assistant", "w2", reasoning_content="w12"),
        say("user", "w3"),
        say("assistant", "w4", reasoning_content="w14"),
    ]
    assert trained_texts(template_of(tmp_path, source), chat) == ["w2 <end>", "w14 \n no \n w4 <end>"]
