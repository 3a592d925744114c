"""generate, export and download on the tiny model."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import fixtures
from tests.tune_cli.conftest import Optune


@pytest.fixture
def m0(folder: Path) -> Path:
    return fixtures.write_model(folder / "m0", dtype=torch.bfloat16)


@pytest.fixture
def adapter(m0: Path, folder: Path) -> Path:
    """An adapter that changes what M0 says, with the tokenizer beside it as a checkpoint has it."""
    from optune import lora, models

    model = models.load(m0, dtype=torch.bfloat16)
    lora.apply(model, rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"])
    generator = torch.Generator().manual_seed(0)
    for parameter in lora.trainable(model).values():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    lora.save(model, folder / "adapter", base=str(m0))
    fixtures.write_tokenizer(folder / "adapter")
    return folder / "adapter"


SHORT = ("--max-new-tokens", "8")


def test_streamed_text_is_the_text_that_a_batch_gives(optune: Optune, m0: Path) -> None:
    prompts = ["w1 w2", "w3 w4 w5 w6 w7 w8 w9 w10 w11"]
    alone = [optune("generate", "m0", "--prompt", prompt, *SHORT).out for prompt in prompts]
    both = optune("generate", "m0", "--prompt", prompts[0], "--prompt", prompts[1], *SHORT)
    assert both.code == 0
    assert both.out == "".join(alone)
    assert len(alone[0].split()) > 2
    assert both.err.splitlines() == [f"> {prompt}" for prompt in prompts]


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(optune: Optune, m0: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(m0)
    model = AutoModelForCausalLM.from_pretrained(m0, dtype=torch.float32)
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    words = ("--prompt", "w1 w2", "--system", "w9", "--dtype", "fp32", "--greedy", *SHORT)
    assert optune("generate", "m0", *words).out == f"{expected}\n"


def test_adapter_finds_its_base_and_a_run_folder_its_result(optune: Optune, adapter: Path, folder: Path) -> None:
    base, adapted = (optune("generate", name, "--prompt", "w1 w2", *SHORT).out for name in ("m0", "adapter"))
    assert base != adapted
    shutil.copytree(adapter, folder / "run/model")
    assert optune("generate", "run", "--prompt", "w1 w2", *SHORT).out == adapted


def test_raw_text_goes_round_the_chat_template(optune: Optune, m0: Path) -> None:
    chat = optune("generate", "m0", "--prompt", "w1 w2", *SHORT).out
    raw = optune("generate", "m0", "--prompt", "w1 w2", "--raw", *SHORT).out
    spelled = "<s><turn>user\nw1 w2<end>\n<turn>assistant\n"
    assert raw != chat
    assert optune("generate", "m0", "--prompt", spelled, "--raw", *SHORT).out == chat


def test_model_without_a_template_says_raw(optune: Optune, m0: Path) -> None:
    (m0 / "chat_template.jinja").unlink()
    result = optune("generate", "m0", "--prompt", "w1")
    assert result.code == 2
    assert "--raw" in result.err


def test_sampling_repeats_with_its_seed(optune: Optune, m0: Path) -> None:
    words = ("generate", "m0", "--prompt", "w1", "--temperature", "2", "--top-k", "40", *SHORT)
    assert optune(*words, "--seed", "1").out == optune(*words, "--seed", "1").out
    assert len({optune(*words, "--seed", str(seed)).out for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m0",), "--prompt is missing"),
        (("--prompt", "a"), "MODEL is missing"),
        (("m0", "--prompt", "a", "--raw", "--system", "b"), "--system is part of a chat"),
        (("m0", "--prompt", "a", "--greedy", "--top-k", "3"), "--greedy takes the likeliest token"),
        (("m0", "--prompt", "a", "--dtype", "fp8"), "is not one of 'bf16', 'fp16', 'fp32'"),
        (("m0", "--prompt", "a", "--top-p", "2"), "top_p"),
        (("m0", "--prompt", "a", "--device", "cuda:7"), "cuda:7"),
        (("./m1", "--prompt", "a"), "m1: there is no such folder"),
        ((".", "--prompt", "a"), "holds no model"),
    ],
)
def test_what_cannot_be_generated_is_refused(optune: Optune, m0: Path, words: tuple[str, ...], message: str) -> None:
    result = optune("generate", *words)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def test_weights_cut_short_are_refused_as_run_refuses_them(optune: Optune, m0: Path) -> None:
    weights = m0 / "model.safetensors"
    for length in (weights.stat().st_size - 10, 100, 0):
        weights.write_bytes(weights.read_bytes()[:length])
        result = optune("generate", "m0", "--prompt", "w1")
        assert result.code == 2
        assert "model.safetensors: the file is damaged or cut short" in result.err
        assert "hint: copy or download the model again" in result.err


def test_adapter_whose_base_is_gone_names_both(optune: Optune, adapter: Path, folder: Path) -> None:
    (folder / "m0").rename(folder / "elsewhere")
    result = optune("generate", "adapter", "--prompt", "a")
    assert result.code == 2
    assert str(folder / "adapter/adapter_config.json") in result.err
    assert str(folder / "m0") in result.err


def test_merged_export_says_what_base_and_adapter_say(optune: Optune, adapter: Path, folder: Path) -> None:
    result = optune("export", "adapter", "merged", "--merge")
    assert (result.code, result.out) == (0, f"{folder / 'merged'}\n")
    assert "bf16, the base's dtype" in result.err
    words = ("--prompt", "w1 w2", *SHORT)
    assert optune("generate", "merged", *words).out == optune("generate", "adapter", *words).out
    assert load_file(folder / "merged/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_export_writes_the_dtype_that_is_asked_for(optune: Optune, m0: Path, folder: Path) -> None:
    assert optune("export", "m0", "wide", "--dtype", "fp32").code == 0
    assert load_file(folder / "wide/model.safetensors")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m0",), "DEST is missing"),
        (("m0", "m0"), "m0: it exists"),
        (("m0", "new", "--merge"), "not an adapter"),
        (("m0", "new", "--dtype", "int3"), "int3"),
        (("nope", "new"), "nope: there is no such folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    optune: Optune, m0: Path, folder: Path, words: tuple[str, ...], message: str
) -> None:
    before = sorted(folder.iterdir())
    result = optune("export", *words)
    assert result.code == 2
    assert message in result.err
    assert sorted(folder.iterdir()) == before


def test_download_without_a_network_fails_soon_and_clearly(optune: Optune, folder: Path) -> None:
    began = time.monotonic()
    result = optune("download", "owner/name", "models/name")
    assert time.monotonic() - began < 10
    assert result.code != 0
    assert "owner/name" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("name", ["a/b/c", "a b", "https://hub/a/b"])
def test_download_refuses_what_is_no_repository(optune: Optune, name: str) -> None:
    result = optune("download", name)
    assert result.code == 2
    assert "is not a model of the hub" in result.err
