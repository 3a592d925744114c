"""Cases A40 and A41: what a run writes loads elsewhere, and embeddings and head are what the files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import fixtures
from tests.cases.place import Place, assert_equal, expected, largest, loss_of, reference_loss
from tests.recipes.running import read_tensors

ROWS = fixtures.numbered_rows(4)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def split(folder: Path) -> None:
    """The weights of a model folder as two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def load_elsewhere(folder: Path) -> Any:
    """The model as transformers loads it, which must not miss or invent a weight."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def assert_index_opens(folder: Path) -> None:
    """Every tensor that an index lists is in its file, and every file holds only what is listed."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert (folder / "model.safetensors").is_file()
        return
    weight_map = json.loads(index.read_text())["weight_map"]
    for file in set(weight_map.values()):
        with safe_open(folder / file, "pt") as tensors:
            assert set(tensors.keys()) == {name for name, owner in weight_map.items() if owner == file}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_full_finetune_loads_elsewhere_with_all_that_belongs_to_it(place: Place, sharded: bool, dtype: str) -> None:
    """A40."""
    from transformers import AutoTokenizer, GenerationConfig

    place.write(ROWS)
    base = place.folder / "m0"
    if sharded:
        split(base)
    run = place.train("optimizer.lr=1", f"model.dtype={dtype}", "checkpoint.save_every_steps=2")
    for folder in (run.folder / "model", *run.checkpoints):
        for name in COMPANIONS[1:]:
            assert (folder / name).read_bytes() == (base / name).read_bytes()
        assert_index_opens(folder)
    model = load_elsewhere(run.folder / "model")
    assert json.loads((run.folder / "model/config.json").read_text())["torch_dtype"] == (
        "float32" if dtype == "fp32" else "bfloat16"
    )
    assert_equal(dict(model.state_dict()), {name: tensor.float() for name, tensor in run.weights.items()})
    messages = ROWS[0]["messages"]
    ours, theirs = AutoTokenizer.from_pretrained(run.folder / "model"), AutoTokenizer.from_pretrained(base)
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert GenerationConfig.from_pretrained(run.folder / "model").eos_token_id == [1, 4]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_second_run_starts_from_the_result(place: Place, sharded: bool) -> None:
    """A40: from `model/`, from a checkpoint, and from an export."""
    place.write(ROWS)
    if sharded:
        split(place.folder / "m0")
    first = place.train("optimizer.lr=1")
    assert place.call("export", str(first.folder), "exported").code == 0
    reference = reference_loss(first.folder / "model", [expected(ROWS[0])])
    for start in (first.folder / "model", first.checkpoints[-1], place.folder / "exported"):
        second = place.train(f"model.path={start}", "optimizer.lr=0.5")
        assert second.losses[0] == pytest.approx(reference, rel=1e-6)
        assert second.losses[0] != first.losses[0]
    load_elsewhere(place.folder / "exported")
    assert {path.name for path in (place.folder / "exported").iterdir()} == {*COMPANIONS, "model.safetensors"}


def write_tied(place: Place, *, tied: bool, head: str) -> Path:
    """M0 with the flag `tied` and a head that is absent, the embedding's own, or another."""
    folder = place.folder / "m0"
    shutil.rmtree(folder)
    fixtures.write_model(folder, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(HEAD, None)
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    elif head == "other":
        tensors[HEAD] = tensors[EMBEDDING].flip(0).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("tied", "head"), [(True, "absent"), (True, "equal"), (False, "equal"), (False, "other")])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_embedding_and_head_are_what_transformers_makes_of_the_files(
    place: Place, tied: bool, head: str, sharded: bool, recipe: str
) -> None:
    """A41."""
    folder = write_tied(place, tied=tied, head=head)
    if sharded:
        split(folder)
    place.write(ROWS)
    run = place.train("optimizer.lr=0.5", recipe=recipe)
    assert run.losses[0] == pytest.approx(reference_loss(folder, [expected(ROWS[0])]), rel=1e-6)
    if recipe == "full_finetune":
        assert_index_opens(run.folder / "model")
        model = load_elsewhere(run.folder / "model")
        state = read_tensors(run.folder / "model")
        assert (HEAD in state) == (not tied)
        place.write(ROWS[:1], "again.jsonl")
        again = place.train("optimizer.lr=0", "data.train=again.jsonl", f"model.path={run.folder / 'model'}")
        assert again.losses == pytest.approx([loss_of(model, [expected(ROWS[0])])], rel=1e-6)
        difference = state[EMBEDDING] - state.get(HEAD, state[EMBEDDING])
        assert (largest({HEAD: difference}) > 0) == (not tied)


@pytest.mark.parametrize(("tied", "head"), [(True, "other"), (False, "absent")])
def test_a_head_that_contradicts_the_config_is_refused(place: Place, tied: bool, head: str) -> None:
    """A41."""
    write_tied(place, tied=tied, head=head)
    place.write(ROWS)
    message = place.refuse().err
    assert HEAD in message
    assert "tie_word_embeddings" in message
    assert str(place.folder / "m0") in message


@pytest.mark.parametrize("fault", ["an entry too many", "an empty tensor", "a missing shard", "a cut shard"])
def test_an_index_that_does_not_match_its_files_is_refused_by_name(place: Place, no_weights: None, fault: str) -> None:
    """A41."""
    folder = place.folder / "m0"
    place.write(ROWS)
    split(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    if fault == "an entry too many":
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.bias"] = shard.name
        index.write_text(json.dumps(content))
    elif fault == "an empty tensor":
        tensors = load_file(shard)
        tensors[HEAD] = tensors[HEAD][:0].clone()
        save_file(tensors, shard, metadata={"format": "pt"})
    elif fault == "a missing shard":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    message = place.refuse().err
    assert {"an entry too many": "lm_head.bias", "an empty tensor": HEAD}.get(fault, shard.name) in message
