"""Named templates: which there are, what they need, and what a model trained with one is saved with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from optune import data, models
from optune.data.control import compile_control
from optune.data.template import ChatTemplate
from optune.data.tokenizer_files import SHIPPED
from optune.errors import DataError
from tests import fixtures
from tests.data.chat_templates import SPECIAL, make_backend
from tests.data.test_template import say

NAMES = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
CHAT = [say("system", "w0"), say("user", "w1"), say("assistant", "w2")]


def needed(name: str) -> list[str]:
    """What the template says that it needs."""
    return (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8").partition("tokens: ")[2].partition(" -#}")[0].split()


@pytest.mark.parametrize("name", NAMES)
def test_a_template_lists_the_tokens_that_it_writes(name: str) -> None:
    """Markers of role names in words alone (zephyr) are text; all else that is a marker has to be a token."""
    template = ChatTemplate(
        (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8"), name=name, tokens={"eos_token": ""}
    )
    written = template.render(CHAT, add_generation_prompt=True)
    is_control = compile_control(make_backend().get_added_tokens_decoder().values(), "")
    listed = set(needed(name))
    assert listed <= {*SPECIAL, "eos_token"}
    found = set(is_control.findall(written))
    assert found == listed - {"eos_token"} or (name == "zephyr" and listed == {"eos_token"})
    assert "eos_token" in listed or re.search(r"\beos_token\b", template.literals) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_without_these_tokens_is_refused_by_their_names(tmp_path: Path, name: str) -> None:
    folder = fixtures.write_tokenizer(tmp_path)
    missing = [token for token in needed(name) if token not in (*fixtures.SPECIAL_TOKENS, "eos_token")]
    if missing:
        with pytest.raises(DataError, match=re.escape(f"the template {name} writes {', '.join(missing)}, which")):
            data.load_tokenizer(folder, name)
    else:
        ids, trained = data.load_tokenizer(folder, name).encode_chat(CHAT)
        words = [fixtures.VOCABULARY[token] for token, flag in zip(ids, trained, strict=True) if flag]
        assert words[-2:] == ["w2", "<end>"]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
        with pytest.raises(DataError, match=f"the template {name} writes eos_token, which the tokenizer has not"):
            data.load_tokenizer(folder, name)


def test_a_name_means_the_models_own_template_first_and_a_file_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fixtures.write_tokenizer(tmp_path / "t0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpaca").write_text("a file")
    assert "### Response" in data.load_tokenizer(folder, "alpaca").render(CHAT)
    assert data.load_tokenizer(folder, "./alpaca").render(CHAT) == "a file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/alpaca.jinja").write_text("the model's own")
    assert data.load_tokenizer(folder, "alpaca").render(CHAT) == "the model's own"
    with pytest.raises(DataError, match=r"no such file: .*zefyr; the model's own templates: alpaca, default") as caught:
        data.load_tokenizer(folder, "zefyr")
    assert caught.value.hint == "did you mean zephyr?"


def test_a_replaced_template_replaces_all_that_the_model_had(tmp_path: Path) -> None:
    source = fixtures.write_model(tmp_path / "m0")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    (source / "chat_template.json").write_text('{"chat_template": "old"}')
    assert data.load_tokenizer(source).changed_files == {}
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}<end>\n")
    changed = data.load_tokenizer(source, str(tmp_path / "own.jinja")).changed_files
    (tmp_path / "saved").mkdir()
    models.copy_companions(source, tmp_path / "saved", changed)
    saved = data.load_tokenizer(tmp_path / "saved")
    assert saved.render(CHAT, tools=[{"name": "f"}]) == "w0<end>"  # jinja drops the last line end of a file
    assert not (tmp_path / "saved/chat_template.json").exists()
    ends = json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"]
    assert ends == [1, 4]
    (source / "generation_config.json").unlink()
    alone = data.load_tokenizer(source, "zephyr").changed_files["generation_config.json"]
    assert alone is not None
    assert json.loads(alone) == {"eos_token_id": [4]}


def test_the_day_that_templates_print_is_given_or_today(tmp_path: Path) -> None:
    folder = fixtures.write_tokenizer(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    fixed = data.load_tokenizer(folder, template_date="2024-07-26")
    assert fixed.render(CHAT) == "26 Jul 2024"
    assert str(fixed.printed_date(None)) == "2024-07-26"
    assert data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t1")).printed_date(None) is None
    for wrong in ("26.07.2024", "2024-13-01", "today"):
        with pytest.raises(DataError, match=f"data.template_date: '{wrong}' is no day written as 2024-07-26"):
            data.load_tokenizer(folder, template_date=wrong)
