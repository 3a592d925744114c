"""Cases A48 and A49: generation ends where the model learned to, and a batch says what single prompts say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import fixtures
from tests.cases.place import Place, encode, turns

LEARNED = ("optimizer._target_=torch.optim.AdamW", "optimizer.lr=3e-2", "epochs=12")
SAY = ("--greedy", "--max-new-tokens", "12")


def set_json(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text())
    content.update(entries)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def learned(place: Place) -> Place:
    """A model in `out/model` that says "ok" and ends its turn."""
    place.write([turns("ua", word, "ok") for word in ("w1", "w2", "w3 w4")])
    place.train(*LEARNED, "output_dir=out")
    return place


@pytest.fixture
def learned_other_end(place: Place) -> Place:
    """A model in `out/model` that says "ok" and ends with `</s>`, which its template never writes."""
    prompt = encode("<s> <turn> user \n w1 <end> \n <turn> assistant \n")
    said = encode("ok </s> yes yes yes yes")
    place.write([{"tokens": [*prompt, *said], "labels": [-100] * len(prompt) + said}] * 3)
    place.train(*LEARNED, "output_dir=out")
    return place


@pytest.mark.parametrize("listed", [[1, 4], [4, 1], 4, [1], 1, None])
def test_generation_ends_at_the_end_of_a_turn_whatever_else_is_listed(learned: Place, listed: object) -> None:
    """A48: ids of generation_config.json and of the tokenizer count together."""
    model = learned.folder / "out/model"
    set_json(model / "generation_config.json", eos_token_id=listed)
    for name in ("out", "out/model"):
        result = learned.call("generate", name, "--prompt", "w1", *SAY)
        assert (result.code, result.out) == (0, "ok\n"), result.err


def test_generation_ends_at_the_end_that_the_template_writes_though_no_file_lists_it(place: Place) -> None:
    """A48: as in base models that were taught to chat. The model knows how the talk would go on."""
    place.write([turns("uaua", "w1", "ok", "w7", "w8")] * 3)
    place.train(*LEARNED, "data.train_on=all", "output_dir=out")
    for name, end in (("generation_config.json", 1), ("config.json", 1), ("tokenizer_config.json", "</s>")):
        set_json(place.folder / "out/model" / name, **{"eos_token" if end == "</s>" else "eos_token_id": end})
    spelled = ("--raw", "--prompt", "<s><turn>user\nw1<end>\n<turn>assistant\n")
    assert "w7" in place.call("generate", "out", *spelled, *SAY).out
    assert place.call("generate", "out", "--prompt", "w1", *SAY).out == "ok\n"


def test_generation_ends_at_a_second_end_that_only_the_generation_config_lists(learned_other_end: Place) -> None:
    """A48."""
    generation = learned_other_end.folder / "out/model/generation_config.json"
    assert learned_other_end.call("generate", "out", "--prompt", "w1", *SAY).out == "ok\n"
    set_json(generation, eos_token_id=[4])
    assert learned_other_end.call("generate", "out", "--prompt", "w1", *SAY).out.startswith("ok yes")


def test_the_list_of_ends_is_kept_by_training_merging_and_exporting(place: Place) -> None:
    """A48."""
    place.write([turns("ua", "w1", "ok")] * 4)
    full = place.train("optimizer.lr=0.1")
    adapter = place.train("optimizer.lr=0.1", recipe="lora_finetune")
    assert place.call("export", str(full.folder), "full", "--dtype", "bf16").code == 0
    assert place.call("export", str(adapter.folder), "merged", "--merge").code == 0
    for folder in (full.folder / "model", full.checkpoints[-1], place.folder / "full", place.folder / "merged"):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


PROMPTS = ("w1", "w2 w3 w4 w5 w6 w7 w8 w9 w10")


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_of_unequal_prompts_says_what_each_says_alone(place: Place, order: int) -> None:
    """A49."""
    prompts = PROMPTS[::order]
    alone = [place.call("generate", "m0", "--prompt", prompt, *SAY).out for prompt in prompts]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert place.call("generate", "m0", *words, *SAY).out == "".join(alone)
    assert alone[0] != alone[1]


def test_a_batch_goes_on_until_its_last_answer_has_ended(learned: Place) -> None:
    """A49: the answers end at different lengths."""
    learned.write([turns("ua", "w1", "ok"), turns("ua", "w2 w3 w4", "w5 w6 w7 w8 w9")] * 2)
    learned.train(*LEARNED, "output_dir=two")
    result = learned.call("generate", "two", "--prompt", "w1", "--prompt", "w2 w3 w4", "--prompt", "w1", *SAY)
    assert result.out.splitlines() == ["ok", "w5 w6 w7 w8 w9", "ok"]


def test_greedy_text_is_that_of_transformers_for_every_prompt_of_a_batch(place: Place) -> None:
    """A49."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.folder / "m0", dtype=torch.float32)
    wanted = []
    for prompt in PROMPTS:
        ids = encode(f"<s> <turn> user \n {prompt} <end> \n <turn> assistant \n")
        new = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        kept = [fixtures.VOCABULARY[token] for token in new]
        wanted.append([word for word in kept if word not in (*fixtures.SPECIAL_TOKENS, "\n")])
    result = place.call("generate", "m0", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *SAY)
    assert result.code == 0, result.err
    # Line ends are tokens of their own; `> prompt` between the texts goes to stderr.
    assert result.out.split() == [word for words in wanted for word in words]
