"""Looking words up gives the very ids, and the very places of characters, that encoding the whole text gives."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from optune.data import word_cache
from optune.data.word_cache import WordCache, cuts_at_spaces
from tests.data.chat_templates import make_backend

_WORDS = """
a B word Word the quick 1 23 4567 . , - _ ' 's 'S 'll é 中 文字 😀 ſ 'ſ İ <|im_end|> <|im_start|>user
<think> [INST] <| ( // #
"""
_PIECES = [*_WORDS.split(), "e\u0301", "\u0301"]
_BLANKS = (" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\x1c", "\x85")
TEXTS = st.lists(st.sampled_from([*_PIECES, *_BLANKS]) | st.text(max_size=3), max_size=14).map("".join)


def make(pre_tokenizer: object, normalizer: object = None) -> Tokenizer:
    backend = Tokenizer.from_str(make_backend().to_str())
    backend.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if normalizer is not None:
        backend.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def known() -> Iterator[Tokenizer]:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    yield make(gpt2)
    yield make(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), normalizers.NFC())
    for pattern in sorted(word_cache._PATTERNS):
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        yield make(pre_tokenizers.Sequence([split, by_bytes]), normalizers.NFC())


KNOWN = list(known())
CACHES = [WordCache(backend) for backend in KNOWN]  # they remember from example to example, as they do in a run


@pytest.mark.parametrize("index", range(len(KNOWN)))
@given(texts=st.lists(TEXTS, min_size=2, max_size=4), data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_words_have_the_ids_and_places_of_whole_texts(index: int, texts: list[str], data: st.DataObject) -> None:
    backend, cache = KNOWN[index], CACHES[index]
    assert cuts_at_spaces(backend)
    for text, (ids, locate) in zip(texts, cache.encode(texts), strict=True):
        whole = backend.encode(text, add_special_tokens=False)
        assert ids.tolist() == whole.ids
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, len(text)))
        covering = [i for i, (a, b) in enumerate(whole.offsets) if start < end and a < end and b > start]
        first, stop = locate(start, end)
        # A character may be several tokens, all of which have its offsets; a token of no characters covers none.
        assert list(range(first, stop)) == (list(range(covering[0], covering[-1] + 1)) if covering else [])


def test_what_a_cache_remembers_stays_behind_when_it_is_sent_and_changes_nothing_when_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = WordCache(KNOWN[0])
    before = [ids.tolist() for ids, _ in cache.encode(["a word and a word", "another word"])]
    assert cache._ids
    sent = pickle.loads(pickle.dumps(cache))
    assert not sent._ids
    monkeypatch.setattr(word_cache, "_MOST", 3)
    for each in (cache, sent, cache):
        assert [ids.tolist() for ids, _ in each.encode(["a word and a word", "another word"])] == before
        assert len(each._ids) < 9


def refused() -> Iterator[tuple[str, Tokenizer]]:
    yield "puts a space in front", make(pre_tokenizers.ByteLevel(add_prefix_space=True))
    yield "pattern", make(pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated"))
    yield "removes", make(pre_tokenizers.Split(" ", "removed"))
    yield "Metaspace", make(pre_tokenizers.Metaspace())
    yield "normalizer", make(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase())
    yield "none", Tokenizer(models.BPE())
    for settings_ in ({"rstrip": True}, {"lstrip": True}, {"single_word": True}):
        backend = make(pre_tokenizers.ByteLevel(add_prefix_space=False))
        backend.add_special_tokens([AddedToken("<mask>", **settings_)])
        yield str(settings_), backend
    backend = make(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_special_tokens(["end of turn"])
    yield "a token with a space inside", backend


@pytest.mark.parametrize(("why", "backend"), list(refused()), ids=lambda value: value if isinstance(value, str) else "")
def test_other_tokenizers_encode_texts_whole(why: str, backend: Tokenizer) -> None:
    assert not cuts_at_spaces(backend), why
    texts = ["a  Word <mask> b end of turn c", " word word"]
    for (ids, _), text in zip(WordCache(backend).encode(texts), texts, strict=True):
        assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
