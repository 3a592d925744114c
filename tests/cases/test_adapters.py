"""Cases A37 and A42 to A45: adapters that train, go on, open in PEFT, and merge without losing what was learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests import fixtures
from tests.cases.place import Place, assert_equal, expected, loss_of, reference_loss, turns
from tests.recipes.running import Finished, read_tensors

# PEFT 0.21 asks transformers 5.24 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = "lora_finetune"
ROWS = fixtures.numbered_rows(6)
TRAINED = ("optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-2")


def open_in_peft(adapter: Path, base: Path) -> Any:
    """The adapter on its base as PEFT loads it; what it says about keys is an error (warnings are)."""
    import peft
    from transformers import AutoModelForCausalLM

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    read = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert_equal({name: tensor.float() for name, tensor in read.items()}, read_tensors(adapter))
    return model


def b_matrices(run: Finished) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in run.weights.items() if ".lora_B." in name}


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["[q_proj,v_proj]", "all-linear", "[layers.1.mlp.down_proj,lm_head]"])
def test_adapters_go_on_as_if_never_stopped_and_open_in_peft(place: Place, targets: str) -> None:
    """A37."""
    place.write(ROWS)
    place.write(ROWS[:3], "validation.jsonl")
    words = (*TRAINED, f"lora.targets={targets}", "data.validation=validation.jsonl")
    straight = place.train(*words, recipe=LORA)
    place.stop_at(3, *words, recipe=LORA)
    resumed = place.resume()
    assert resumed.losses == straight.losses
    assert_equal(resumed.weights, straight.weights)
    assert_equal(resumed.optimizer_state, straight.optimizer_state)
    lines = [json.loads(line) for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    (validation_loss,) = [line["validation_loss"] for line in lines if "validation_loss" in line]
    for adapter in (resumed.folder / "model", resumed.checkpoints[-1]):
        judge = open_in_peft(adapter, place.folder / "m0")
        assert validation_loss == pytest.approx(loss_of(judge, map(expected, ROWS[:3])), rel=1e-6)


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        ("[q_proj,v_porj]", "v_porj"),
        ("[nope]", "nope"),
        ("[embed_tokens]", "embed_tokens"),
        ("[q_proj,embed_tokens,nope]", "nope"),
        ("[self_attn]", "self_attn"),
        ("[layers.7.*]", "layers.7.*"),
        ("[q]", "q"),
        ("[]", "lora.targets"),
    ],
)
def test_a_target_that_matches_no_layer_is_refused_by_name(place: Place, targets: str, wrong: str) -> None:
    """A42."""
    place.write(ROWS)
    message = place.refuse(f"lora.targets={targets}", recipe=LORA).err
    assert "lora.targets" in message
    assert wrong in message


def test_the_head_of_a_tied_model_is_refused_as_a_target(place: Place) -> None:
    """A42."""
    fixtures.write_model(place.folder / "tied", tie_word_embeddings=True)
    place.write(ROWS)
    message = place.refuse("lora.targets=[lm_head]", "model.path=tied", recipe=LORA).err
    assert "lm_head" in message
    assert "tied" in message


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("[q_proj,v_proj]", 4),
        ("[lm_head]", 1),
        ("[q_proj,lm_head]", 3),
        ("all-linear", 14),
        ("[layers.0.*]", 7),
        ("['layers\\.[01]\\.mlp\\..*_proj']", 6),
    ],
)
def test_every_target_gets_an_adapter_that_trains(place: Place, targets: str, layers: int) -> None:
    """A42."""
    place.write(ROWS)
    run = place.train(*TRAINED, "max_steps=3", f"lora.targets={targets}", recipe=LORA)
    matrices = b_matrices(run)
    assert len(matrices) == layers
    assert all(float(tensor.abs().min(dim=1).values.max()) > 0 for tensor in matrices.values())
    count = sum(tensor.numel() for tensor in run.weights.values())
    assert f"{count:,} trained of " in place.said


@pytest.mark.parametrize("dropout", ["0", "0.4"])
@pytest.mark.parametrize("mode", [(), ("optimizer_step=in_backward",), ("accumulation=breadth_first",)])
def test_checkpointed_activations_change_no_adapter(place: Place, dropout: str, mode: tuple[str, ...]) -> None:
    """A43."""
    place.write(ROWS)
    words = (*TRAINED, f"lora.dropout={dropout}", "batch_size=2", "max_steps=3", *mode)
    plain = place.train(*words, recipe=LORA)
    checkpointed = place.train(*words, "activation_checkpointing=block", recipe=LORA)
    assert checkpointed.losses == plain.losses
    assert_equal(checkpointed.weights, plain.weights)
    assert all(float(tensor.abs().max()) > 0 for tensor in b_matrices(plain).values())


def test_checkpointed_activations_change_no_weight_of_a_full_finetune(place: Place) -> None:
    """A43."""
    place.write(ROWS)
    plain = place.train(*TRAINED, "batch_size=2")
    assert_equal(place.train(*TRAINED, "batch_size=2", "activation_checkpointing=block").weights, plain.weights)


def add_token(folder: Path, token: str) -> int:
    """One more special token in a model's tokenizer; its id."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.token_to_id(token)


def resize(folder: Path, rows: int) -> None:
    """The embedding and the head of a model with more rows, and its config."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = tensors[name]
        tensors[name] = torch.cat([old, old.mean(dim=0, keepdim=True).expand(rows - len(old), -1)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


@pytest.mark.parametrize("recipe", ["full_finetune", LORA])
def test_a_token_without_a_row_in_the_embedding_is_refused_before_weights_load(
    place: Place, no_weights: None, recipe: str
) -> None:
    """A44."""
    token = add_token(place.folder / "m0", "<tool>")
    marked = "'<turn>' + ('<tool>' if message['role'] == 'tool' else '') +"
    template = fixtures.CHAT_TEMPLATE.replace("'<turn>' +", marked)
    (place.folder / "m0/chat_template.jinja").write_text(template)
    row = {"messages": [{"role": role, "content": "w1"} for role in ("user", "tool", "assistant")]}
    place.write([ROWS[0], row])
    message = place.refuse(recipe=recipe).err
    assert "train.jsonl:2" in message
    assert str(token) in message
    assert f"{len(fixtures.VOCABULARY)} rows" in message


def test_a_pad_token_without_a_row_in_the_embedding_does_no_harm(place: Place) -> None:
    """A44: padding is told by its place, so its id need not be the tokenizer's."""
    place.write(ROWS)
    before = place.train("batch_size=4")
    add_token(place.folder / "m0", "<padding>")
    config = place.folder / "m0/tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "<padding>"}))
    after = place.train("batch_size=4")
    assert after.losses == before.losses
    assert_equal(after.weights, before.weights)


def test_an_added_token_goes_from_the_adapter_into_the_merged_model(place: Place) -> None:
    """A44."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = place.folder / "m0"
    token = add_token(base, "<tool>")
    resize(base, token + 1)
    (base / "chat_template.jinja").write_text(fixtures.CHAT_TEMPLATE.replace("<turn>", "<tool><turn>"))
    place.write(ROWS)
    run = place.train(*TRAINED, recipe=LORA)
    assert place.call("export", str(run.folder), "adapter").code == 0
    merged = place.call("export", "adapter", "merged", "--merge")
    assert merged.code == 0, merged.err
    for folder in (place.folder / "adapter", place.folder / "merged"):
        assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<tool>") == token
    model = AutoModelForCausalLM.from_pretrained(place.folder / "merged", dtype=torch.float32)
    assert model.get_input_embeddings().weight.shape[0] == token + 1
    again = place.train("model.path=merged", "optimizer.lr=0")
    place.write(ROWS[:1])
    rows = [tokens_with_tool(row, token) for row in ROWS]
    assert again.losses == pytest.approx([loss_of(model, [row]) for row in rows], rel=1e-6)


def tokens_with_tool(row: dict[str, Any], token: int) -> tuple[list[int], list[int]]:
    """`expected`, with the added token in front of every turn."""
    turn = fixtures.VOCABULARY.index("<turn>")
    pairs = zip(*expected(row), strict=True)
    told = [pair for i, label in pairs for pair in ([(token, -100)] if i == turn else []) + [(i, label)]]
    return [i for i, _ in told], [label for _, label in told]


def test_an_adapter_whose_tokens_its_base_lacks_is_not_merged(place: Place) -> None:
    """A44."""
    place.write(ROWS)
    run = place.train(*TRAINED, recipe=LORA)
    token = add_token(run.folder / "model", "<tool>")
    before = place.listing()
    result = place.call("export", str(run.folder), "merged", "--merge")
    assert result.code == 2
    assert str(token) in result.err
    assert "resize" in result.err
    assert place.listing() == before


@pytest.mark.parametrize("asked", [None, "fp32", "fp16"])
@pytest.mark.parametrize("rslora", [False, True])
def test_a_merge_is_computed_in_fp32_and_rounded_once(place: Place, asked: str | None, rslora: bool) -> None:
    """A45."""
    dtypes = {None: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    base = fixtures.write_model(place.folder / "m0", dtype=torch.bfloat16)
    place.write(ROWS)
    words = ("optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-4", "model.dtype=bf16", "lora.rank=4")
    run = place.train(*words, "lora.alpha=6", f"lora.use_rslora={rslora}", "lora.targets=all-linear", recipe=LORA)
    result = place.call("export", str(run.folder), "merged", "--merge", *(("--dtype", asked) if asked else ()))
    assert result.code == 0, result.err
    assert (asked or "bf16") in result.err
    if asked is None:
        assert "the base's dtype" in result.err
    merged, weights, adapter = read_tensors(place.folder / "merged"), read_tensors(base), run.weights
    scale = 6 / 4**0.5 if rslora else 6 / 4
    for name, tensor in weights.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = tensor.float()
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = adapter[f"{prefix}.lora_A.weight"].float(), adapter[f"{prefix}.lora_B.weight"].float()
            wanted = wanted + scale * (b @ a)
        assert merged[name].dtype == dtypes[asked]
        assert torch.equal(merged[name], wanted.to(dtypes[asked])), name


def test_a_merged_model_says_what_base_and_adapter_say(place: Place) -> None:
    """A45."""
    place.write([turns("ua", "w1", "w2 w3")] * 6)
    run = place.train(*TRAINED, "epochs=3", recipe=LORA)
    judge = open_in_peft(run.folder / "model", place.folder / "m0")
    assert place.call("export", str(run.folder), "merged", "--merge").code == 0
    row = expected(turns("ua", "w1", "w2 w3"))
    assert reference_loss(place.folder / "merged", [row]) == pytest.approx(loss_of(judge, [row]), rel=1e-5)
    texts = [
        place.call("generate", name, "--prompt", "w1", "--greedy", "--max-new-tokens", "5").out
        for name in ("merged", str(run.folder))
    ]
    assert texts == ["w2 w3\n", "w2 w3\n"]
