from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from optune import export, lora, models
from optune.errors import ConfigError, ModelError, OptuneError
from tests import fixtures
from tests.lora import judges

TARGETS = ["q_proj", "v_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, *, size: float = 1.0, **settings: Any) -> Path:
    """An adapter of optune's beside the tokenizer of its base, as a checkpoint holds it."""
    model = models.load(base, dtype=torch.float32)
    lora.apply(model, **({"rank": 4, "alpha": 6, "targets": TARGETS} | settings))
    judges.randomise(model)
    for layer in lora.layers(model).values():
        layer.lora_B.weight.data *= size
    lora.save(model, folder, base=str(base))
    models.copy_companions(base, folder)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def expected_merge(base: Path, adapter: Path, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Every tensor of the base, with the adapter of scale 1.5 added: the formula, from the files alone."""
    tensors, parts = stored(base), load_file(adapter / lora.WEIGHTS_FILE)
    merged = {}
    for name, weight in tensors.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        target = dtype or weight.dtype
        if f"{key}.lora_A.weight" in parts:
            delta = parts[f"{key}.lora_B.weight"].float() @ parts[f"{key}.lora_A.weight"].float()
            merged[name] = (weight.float() + 1.5 * delta).to(target)
        else:
            merged[name] = weight.to(target)
    return merged


def assert_bit_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("asked", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_merged_files_hold_the_fp32_sum_rounded_once_in_the_bases_dtype_or_the_one_asked(
    tmp_path: Path, base_dtype: torch.dtype, asked: str | None, size: float
) -> None:
    base = fixtures.write_model(tmp_path / "base", dtype=base_dtype)
    adapter = write_adapter(base, tmp_path / "adapter", size=size)
    report = export.export(adapter, tmp_path / "out", merge=True, dtype=asked)
    dtype = export.DTYPES[asked] if asked else base_dtype
    assert_bit_equal(stored(tmp_path / "out"), expected_merge(base, adapter, dtype))
    assert export.DTYPES[report.dtype] == dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == str(dtype).split(".")[1]
    assert f"in {report.dtype}{'' if asked else ', the base'}" in report.lines()[0]


def test_each_tensor_of_a_base_in_mixed_dtypes_keeps_its_own(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", dtype=torch.bfloat16)
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in stored(base).items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(base, tmp_path / "adapter")
    report = export.export(adapter, tmp_path / "out", merge=True)
    assert_bit_equal(stored(tmp_path / "out"), expected_merge(base, adapter, None))
    assert report.dtype == "bf16 and fp32"


@pytest.mark.parametrize("tied", [False, True])
def test_merged_folder_opens_in_transformers_with_the_logits_of_base_and_adapter_in_peft(
    tmp_path: Path, tied: bool
) -> None:
    base = fixtures.write_model(tmp_path / "base", tie_word_embeddings=tied)
    adapter = write_adapter(base, tmp_path / "adapter")
    report = export.export(adapter, tmp_path / "out", merge=True)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = judges.logits(judges.open_in_peft(base, adapter))
    torch.testing.assert_close(judges.logits(model), wanted, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == fixtures.CHAT_TEMPLATE
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [1, 4]
    assert report.proof is not None
    assert report.proof.layers == 6
    assert report.proof.difference < report.proof.tolerance < report.proof.effect


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "target_modules": "all-linear"},
        {"target_modules": ["lm_head", "o_proj"]},
    ],
    ids=str,
)
def test_an_adapter_that_peft_wrote_is_merged(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = judges.peft_model(tmp_path / "base", **settings)
    with judges.quiet():
        theirs.save_pretrained(str(tmp_path / "adapter"))
    report = export.export(tmp_path / "adapter", tmp_path / "out", merge=True)
    merged = models.load(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(judges.logits(merged), judges.logits(theirs), rtol=1e-5, atol=1e-5)
    assert report.base == str(tmp_path / "base")


def test_a_sharded_base_is_merged(tmp_path: Path) -> None:
    single = fixtures.write_model(tmp_path / "single")
    models.save(models.load(single, dtype=torch.float32), tmp_path / "base", source=single, max_shard_bytes=20_000)
    adapter = write_adapter(tmp_path / "base", tmp_path / "adapter")
    export.export(adapter, tmp_path / "out", merge=True)
    assert_bit_equal(stored(tmp_path / "out"), expected_merge(tmp_path / "base", adapter, None))


def test_an_adapter_smaller_than_the_rounding_is_said_to_be_lost(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base", dtype=torch.bfloat16)
    adapter = write_adapter(base, tmp_path / "adapter", size=1e-3)
    lost = export.export(adapter, tmp_path / "bf16", merge=True)
    kept = export.export(adapter, tmp_path / "fp32", merge=True, dtype="fp32")
    assert lost.proof is not None
    assert kept.proof is not None
    assert lost.proof.lost > 0.5 > kept.proof.lost
    assert "use --dtype fp32" in lost.lines()[-1]
    assert not any("--dtype" in line for line in kept.lines())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("merge", "the merged weights give logits that differ"),
        ("save", "the written files give logits that differ"),
    ],
)
def test_a_merge_that_does_not_compute_the_same_logits_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, said: str
) -> None:
    base = fixtures.write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", size=0.05)
    good_merge, good_save = lora.merge, models.save

    def merge_with_a_wrong_scale(model: nn.Module) -> list[str]:
        for layer in lora.layers(model).values():
            layer.scale *= 1.1
        return good_merge(model)

    def save_another_layer(model: models.Decoder, folder: Path, **options: Any) -> None:
        model.blocks[1].self_attn.q_proj.weight.data *= 1.01  # pyright: ignore
        good_save(model, folder, **options)

    # By name: `lora` and `models` here may be stand-ins for modules that were not read yet, which cannot be patched.
    monkeypatch.setattr("optune.lora.merge", merge_with_a_wrong_scale if broken == "merge" else good_merge)
    monkeypatch.setattr("optune.models.save", save_another_layer if broken == "save" else good_save)
    with pytest.raises(OptuneError, match=said):
        export.export(adapter, tmp_path / "out", merge=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_a_moved_base_is_named_and_given_by_hand(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=re.escape(f"base_model_name_or_path is {str(base)!r}")) as caught:
        export.export(adapter, tmp_path / "out", merge=True)
    assert caught.value.hint is not None
    assert "--base PATH" in caught.value.hint
    assert not (tmp_path / "out").exists()
    report = export.export(adapter, tmp_path / "out", merge=True, base=str(tmp_path / "moved"))
    assert report.base == str(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"--base: .*nowhere"):
        export.export(adapter, tmp_path / "out2", merge=True, base=str(tmp_path / "nowhere"))


def test_an_adapter_without_a_base_says_how_to_give_one(tmp_path: Path) -> None:
    adapter = write_adapter(fixtures.write_model(tmp_path / "base"), tmp_path / "adapter")
    judges.edit_json(adapter / lora.CONFIG_FILE, lambda config: config.update(base_model_name_or_path=None))
    with pytest.raises(ModelError, match="base_model_name_or_path is not set"):
        export.export(adapter, tmp_path / "out", merge=True)


def add_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.add_special_tokens(["<new>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_token_added_beside_the_adapter_without_a_row_in_the_base_says_resize(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    add_token(adapter)
    size = len(fixtures.VOCABULARY)
    with pytest.raises(ModelError, match=f"token ids up to {size}, the base's embedding {size} rows") as caught:
        export.export(adapter, tmp_path / "out", merge=True)
    assert caught.value.hint is not None
    assert "resize" in caught.value.hint


def test_a_token_added_to_a_base_with_room_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    size = len(fixtures.VOCABULARY)
    base = fixtures.write_model(tmp_path / "base", vocab_size=size + 1)
    adapter = write_adapter(base, tmp_path / "adapter", targets=["lm_head", "q_proj"])
    add_token(adapter)
    export.export(adapter, tmp_path / "out", merge=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids("<new>") == size
    assert (
        model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    )


def test_an_adapter_trained_with_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    size = len(fixtures.VOCABULARY)
    grown = fixtures.write_model(tmp_path / "grown", vocab_size=size + 1)
    adapter = write_adapter(grown, tmp_path / "adapter", targets="lm_head")
    base = fixtures.write_model(tmp_path / "base")
    with pytest.raises(ModelError, match=rf"lm_head\.lora_B\.weight is \[{size + 1}, 4\], \[{size}, 4\] wanted"):
        export.export(adapter, tmp_path / "out", merge=True, base=str(base))


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_full_checkpoint_becomes_a_folder_without_optunes_own_files(
    tmp_path: Path, dtype: str | None, shards: bool
) -> None:
    base = fixtures.write_model(tmp_path / "base")
    checkpoint = tmp_path / "run/checkpoints/step-000003"
    options = {"max_shard_bytes": 20_000} if shards else {}
    models.save(models.load(base, dtype=torch.float32), checkpoint, source=base, **options)  # type: ignore[arg-type]
    (checkpoint / "optune").mkdir()
    (checkpoint / "optune/manifest.json").write_text("{}")
    report = export.export(checkpoint, tmp_path / "out", dtype=dtype)
    kind = torch.bfloat16 if dtype else torch.float32
    assert_bit_equal(stored(tmp_path / "out"), {name: tensor.to(kind) for name, tensor in stored(base).items()})
    assert not (tmp_path / "out/optune").exists()
    assert (report.kind, report.dtype) == ("model", dtype or "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == kind
    AutoTokenizer.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_an_adapter_is_copied_and_opens_in_peft(tmp_path: Path, dtype: str | None) -> None:
    base = fixtures.write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    report = export.export(adapter, tmp_path / "out", dtype=dtype, base=str(base))
    kind = torch.bfloat16 if dtype else torch.float32
    tensors = {key: tensor.to(kind) for key, tensor in load_file(adapter / lora.WEIGHTS_FILE).items()}
    assert_bit_equal(load_file(tmp_path / "out" / lora.WEIGHTS_FILE), tensors)
    judges.open_in_peft(base, tmp_path / "out")
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (report.kind, report.dtype) == ("adapter", dtype or "fp32")


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_run_folder_stands_for_its_model(tmp_path: Path, kind: str) -> None:
    base = fixtures.write_model(tmp_path / "base")
    run = tmp_path / "run"
    (run / "checkpoints/step-000002").mkdir(parents=True)
    if kind == "full":
        shutil.copytree(base, run / "model")
    else:
        write_adapter(base, run / "model")
    assert export.export(run, tmp_path / "out", merge=kind == "adapter").kind in ("model", "merged")
    models.check(tmp_path / "out")
    shutil.rmtree(run / "model")
    with pytest.raises(ModelError) as caught:
        export.export(run, tmp_path / "out2")
    assert "step-000002" in str(caught.value.hint)


def test_an_empty_destination_is_filled_and_a_used_one_is_left_alone(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    (tmp_path / "empty").mkdir()
    export.export(base, tmp_path / "empty")
    models.check(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    for used in (tmp_path / "empty", tmp_path / "file", base):
        with pytest.raises(ConfigError, match="not an empty folder"):
            export.export(base, used)
    assert (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"base", "empty", "file"}


@pytest.mark.parametrize(
    ("arguments", "where"),
    [({"merge": True}, "--merge"), ({"base": "x"}, "--base"), ({"dtype": "float8"}, "--dtype")],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any], where: str) -> None:
    base = fixtures.write_model(tmp_path / "base")
    with pytest.raises(ConfigError) as caught:
        export.export(base, tmp_path / "out", **arguments)
    assert caught.value.where == where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["absent", "empty"])
def test_a_checkpoint_that_is_none_is_named_with_its_absolute_path(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "checkpoint"
    if what == "empty":
        folder.mkdir()
    with pytest.raises(ModelError) as caught:
        export.export(folder, tmp_path / "out")
    assert caught.value.where == str(folder)


def test_a_damaged_adapter_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    base = fixtures.write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    (adapter / lora.WEIGHTS_FILE).unlink()
    for merge in (True, False):
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            export.export(adapter, tmp_path / "out", merge=merge)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
