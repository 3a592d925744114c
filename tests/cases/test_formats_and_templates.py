"""Formats of a user's own and templates that are not the model's, through the command line."""

from __future__ import annotations

import json
import sys

import pytest

from optune.data.tokenizer_files import SHIPPED
from tests.cases.place import FINGERPRINT, Place, encode, expected, reference_loss, targets, turns

OWN = """
def read(row, answer="answer"):
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row[answer]}]}
"""
QUIZ = [{"question": "w1 w2", "answer": "w3 w4"}, {"question": "w5", "answer": "w6"}]


def test_a_function_of_a_row_is_a_format(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the command line trusts its package; what it raises is told with the row."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (place.folder / "rows_of_a_quiz.py").write_text(OWN, encoding="utf-8")
    place.write(QUIZ)
    named = "data.format={_target_: rows_of_a_quiz.read}"
    refused = place.refuse(named)
    assert "data.format._target_" in refused.errors[0]
    assert "--allow-target rows_of_a_quiz" in refused.err
    run = place.train(named, "--allow-target", "rows_of_a_quiz", *FINGERPRINT)
    assert targets(run) == [len(encode("w3 w4 <end>")), len(encode("w6 <end>"))]
    assert "rows_of_a_quiz.read" in place.said
    rows = [turns("ua", row["question"], row["answer"]) for row in QUIZ]
    assert run.losses == pytest.approx([reference_loss(place.folder / "m0", [expected(row)]) for row in rows], rel=1e-6)
    # The saved config repeats the run, and trusts nobody by itself.
    again = place.call("validate", "full_finetune", "--config", str(run.folder / "config.yaml"), "output_dir=new")
    assert again.code == 2
    assert "rows_of_a_quiz" in again.errors[0]
    # In one source of several, with a keyword that the rows do not have.
    listed = "data.train=[{path: train.jsonl, format: {_target_: rows_of_a_quiz.read, answer: reply}}]"
    for command in ("validate", "run"):
        broken = place.call(
            command, "full_finetune", "--config", "config.yaml", listed, "--allow-target", "rows_of_a_quiz"
        )
        assert broken.code == 2
        assert f"{place.folder}/train.jsonl:1: rows_of_a_quiz.read raised KeyError: 'reply'" in broken.errors[0]
    unknown = "data.format={_target_: rows_of_a_quiz.read, reply: x}"
    result = place.call("run", "full_finetune", "--config", "config.yaml", unknown, "--allow-target", "rows_of_a_quiz")
    assert result.code == 2
    assert "data.format.reply" in result.errors[0]


@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_a_model_is_saved_with_the_template_that_it_was_trained_with(place: Place, recipe: str) -> None:
    """So that other tools render its conversations as it learned them, and stop where it stops."""
    from transformers import AutoTokenizer

    (place.folder / "m0/generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    row = turns("ua", "w1", "w2 w3")
    place.write([row])
    run = place.train("optimizer.lr=0", "data.chat_template=zephyr", recipe=recipe)
    assert targets(run) == [3]
    for folder in (run.folder / "model", run.checkpoints[-1]):
        assert (folder / "chat_template.jinja").read_text() == (SHIPPED / "zephyr.jinja").read_text()
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template(row["messages"], tokenize=False)
        assert text == "<|user|>\nw1<end>\n<|assistant|>\nw2 w3<end>\n"
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


def test_a_named_template_whose_tokens_are_not_there_is_refused(place: Place, no_weights: None) -> None:
    place.write([turns("ua", "w1", "w2")])
    message = place.refuse("data.chat_template=chatml").err
    assert "the template chatml writes <|im_start|>, <|im_end|>, which the tokenizer has not" in message
    assert "did you mean chatml?" in place.refuse("data.chat_template=chatlm").err


def test_answers_that_never_end_are_refused(place: Place, no_weights: None) -> None:
    source = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '\n' }}{% endfor %}"
    (place.folder / "m0/chat_template.jinja").write_text(source, encoding="utf-8")
    place.write([turns("ua", "w1", "w2")])
    message = place.refuse().err
    assert "would not learn to stop" in message
    assert "m0/chat_template.jinja" in message
    assert "generation" in message


def test_a_template_that_prints_the_date_prints_the_same_on_every_day(place: Place) -> None:
    """Otherwise a run that goes on tomorrow would have other rows than today."""
    dated = "{% set day = strftime_now('%d') | int %}{{ 'w%d' | format(day) + '\n' }}"
    template = place.folder / "m0/chat_template.jinja"
    template.write_text(dated + template.read_text(), encoding="utf-8")
    row = turns("ua", "w1", "w2")
    place.write([row])
    for day, words in (("2024-07-26", ()), ("2031-01-09", ("data.template_date=2031-01-09",))):
        run = place.train("optimizer.lr=0", *words)
        ids, labels = expected(row)
        said = encode(f"w{int(day[-2:])} \n")
        assert run.losses[0] == pytest.approx(
            reference_loss(place.folder / "m0", [(said + ids, [-100] * len(said) + labels)]), rel=1e-6
        )
        assert f"may print the date, here {day} (data.template_date)" in place.said
    assert "'soon' is no day written as 2024-07-26" in place.refuse("data.template_date=soon").err
