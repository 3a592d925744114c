"""The scripts that make and fetch models, and the shell around them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests import fixtures

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- SmolLM2 out of a GGUF file ---------------------------------------------------------------------------------------


ALPHABET = [*"abcdefghijklmnopqrstuvwxyz0123456789.,'", "Ġ", "Ċ"]
MERGES = [("Ġ", "Ġ"), ("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("1", "2"), ("Ġ", "1"), ("'", "s")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *ALPHABET, *("".join(pair) for pair in MERGES)]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A GGUF file as llama.cpp's converter lays one: rotary pairs side by side, matrices in Q8_0, vectors in F32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_context_length(256)
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(2)
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_add_bos_token(False)
    for name, index in (("bos", 1), ("eos", 2), ("pad", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.shape[0] // SHAPE["head_dim"]
            array = array.reshape(heads, 2, SHAPE["head_dim"] // 2, -1).swapaxes(1, 2).reshape(array.shape)
        array = np.ascontiguousarray(array)
        quantized = array.ndim == 2
        writer.add_tensor(
            gguf_name(name),
            gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0) if quantized else array,
            raw_dtype=gguf.GGMLQuantizationType.Q8_0 if quantized else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, block, rest = name.split(".", 3)
    return f"blk.{block}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """(converted folder, folder with the GGUF file, the weights before they were quantised)."""
    folder = tmp_path_factory.mktemp("gguf")
    tensors = fixtures.model_tensors(fixtures.model_config(**SHAPE))
    write_gguf(folder / "model.gguf", tensors)
    script = load_script("smollm2_from_gguf")
    destination = folder / "converted"
    destination.mkdir()
    script.write_folder(script.Gguf(folder / "model.gguf"), destination)
    return destination, folder, tensors


def test_converted_weights_are_the_quantised_ones_in_hugging_face_order(
    converted: tuple[Path, Path, dict[str, torch.Tensor]],
) -> None:
    folder, _, tensors = converted
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        # Q8_0 keeps 1/254 of the largest value in 32; bf16 rounds to 1/256 of the value itself.
        bound = 2 * tensor.abs().max() / 254
        assert (found[name].float() - tensor).abs().max() <= bound, name


@pytest.mark.slow
def test_converted_model_gives_the_logits_of_the_original_in_transformers(
    converted: tuple[Path, Path, dict[str, torch.Tensor]],
) -> None:
    """Rows in the wrong order would pass a test of shapes; rotary embeddings would show it here."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder, _, tensors = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = LlamaForCausalLM(LlamaConfig(**fixtures.model_config(**SHAPE)))
    original.load_state_dict(tensors, strict=False)
    tokens_BT = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits_BTV, wanted_BTV = loaded(tokens_BT).logits, original(tokens_BT).logits
    assert (logits_BTV - wanted_BTV).abs().max() < 0.03 * wanted_BTV.abs().max()


def test_converted_tokenizer_cuts_text_as_the_pre_tokenizer_named_smollm_does(
    converted: tuple[Path, Path, dict[str, torch.Tensor]],
) -> None:
    """Judge: the two regular expressions that llama.cpp applies one after the other, and merges done by hand."""
    import regex

    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    gpt2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def merge(word: str) -> list[str]:
        pieces = [{" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in word]
        while candidates := [pair for pair in pairwise(pieces) if pair in MERGES]:
            best = min(candidates, key=MERGES.index)
            index = next(i for i in range(len(pieces) - 1) if (pieces[i], pieces[i + 1]) == best)
            pieces[index : index + 2] = ["".join(best)]
        return pieces

    for text in ("the cat's 12 mice", "a  12 34", "12,5.0  the", " the  the\n\n  1", "x1y 22z", "\n 7"):
        words = [
            piece
            for part in regex.split(r"(\p{N})", text)
            for piece in ([part] if part.isdigit() else gpt2.findall(part))
        ]
        assert tokenizer.encode(text).tokens == [token for word in words for token in merge(word)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>the<|im_end|>").ids == [1, *tokenizer.encode("the").ids, 2]


def test_converted_tokenizer_equals_the_conversion_of_transformers_where_no_digit_follows_white_space(
    converted: tuple[Path, Path, dict[str, torch.Tensor]],
) -> None:
    """transformers leaves the digit rule out, so the two may differ there and nowhere else."""
    from transformers import AutoTokenizer

    folder, source, _ = converted
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    for text in ("the cat's mice", "a  b\n\n  the", " the.  the", "<|im_start|>the\n<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (theirs.bos_token, theirs.eos_token, theirs.pad_token)
    chat = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "the"


# --- The tiny model and its rows --------------------------------------------------------------------------------------


def test_rows_that_ship_are_the_ones_that_the_script_makes(tmp_path: Path) -> None:
    load_script("tiny_text").write_rows(tmp_path)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "assets/tiny" / name).read_bytes()


def test_no_validation_question_or_answer_is_trained() -> None:
    def read(name: str) -> list[tuple[str, str]]:
        lines = (ROOT / "assets/tiny" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [tuple(message["content"] for message in json.loads(line)["messages"]) for line in lines]

    train, validation = read("train"), read("validation")
    assert not {question for question, _ in train} & {question for question, _ in validation}
    assert not {answer for _, answer in train} & {answer for _, answer in validation}
    assert len(validation) >= 100


def test_tiny_assets_stay_small() -> None:
    files = [path for path in (ROOT / "assets").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4 * 2**20


# --- The shell --------------------------------------------------------------------------------------------------------


def bash(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {ROOT}/scripts/lib.sh; {command}"],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the scripts need besides Python, to be the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname", "basename", "cat"):
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    return folder


def test_without_python_the_scripts_say_what_to_install(tools: Path) -> None:
    done = bash("find_python", PATH=str(tools))
    assert done.returncode == 1
    assert done.stderr == "error: no Python was found\nhint: install Python 3.12 and run this again\n"


def test_an_old_python_is_named_with_its_version(tools: Path) -> None:
    old = 'case "$2" in "") exit 0;; *python_version*) echo 3.9.2;; *) exit 1;; esac'
    fake_python(tools, "python3", old)
    done = bash("find_python", PATH=str(tools))
    assert done.returncode == 1
    assert "no Python 3.11 or newer was found (python3 is 3.9.2)" in done.stderr


def test_a_python_that_does_not_run_is_passed_over(tools: Path) -> None:
    fake_python(tools, "python3.13", "exit 127")
    fake_python(tools, "python3.11", "exit 0")
    done = bash("find_python", PATH=str(tools))
    assert done.stdout == f"{tools}/python3.11\n"


def test_a_python_without_venv_is_named_with_the_package_to_install(tools: Path) -> None:
    fake_python(tools, "python3", 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = bash("find_python", PATH=str(tools))
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [
        path
        for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]
        if path.is_file() and (path.suffix == ".sh" or path.read_bytes().startswith(b"#!/usr/bin/env bash"))
    ]
    assert len(scripts) >= 6
    done = subprocess.run(["shellcheck", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
