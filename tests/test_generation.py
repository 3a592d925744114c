"""Generation says what transformers says, a batch says what its rows say alone, and every stop token stops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.generation import logits_process

from optune import generation, models
from optune.errors import ConfigError, ModelError, OptuneError
from tests import fixtures

PROMPTS = [[7, 30], [9, 12, 13, 44, 45, 21, 33, 60, 61, 8, 15], [20, 21, 22, 23, 24]]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral_sliding": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    "qwen3_mixed": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0, 1.2, 1.4, 1.6],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 8,
        }
    },
}


def write(folder: Path, **overrides: Any) -> Path:
    """A model whose greedy text does not settle on one word at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fixtures.model_config(**overrides)))
    config = transformers.AutoConfig.from_pretrained(folder)
    judge = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.dim() == 1))
    judge.generation_config.eos_token_id = None
    judge.save_pretrained(folder)
    return folder


def generate_by_transformers(folder: Path, prompts: list[list[int]], stop: list[int] | None, count: int, **more: Any):
    """New tokens of each prompt, alone, without the stop token."""
    texts = []
    for prompt in prompts:
        judge = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 2, "eos_token_id": stop} | more
        ids = torch.tensor([prompt])
        out = judge.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)[0].tolist()
        new = out[len(prompt) :]
        texts.append(new[:-1] if new and new[-1] in (stop or []) else new)
    return texts


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_unequal_prompts_is_transformers_greedy_text_of_each_alone(tmp_path: Path, shape: str) -> None:
    folder = write(tmp_path, **SHAPES[shape])
    model = models.load(folder, dtype=torch.float32)
    expected = generate_by_transformers(folder, PROMPTS, None, 14)
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    assert len(set(expected[0])) > 3, "the fixture should say more than one word"
    assert generation.generate(model, PROMPTS, max_new_tokens=14) == expected
    assert [generation.generate(model, [prompt], max_new_tokens=14)[0] for prompt in PROMPTS] == expected


def test_every_stop_token_ends_its_row_and_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path)
    model = models.load(folder, dtype=torch.float32)
    free = generation.generate(model, PROMPTS, max_new_tokens=14)
    stop = [free[0][2], free[1][5]]
    expected = generate_by_transformers(folder, PROMPTS, stop, 14)
    assert [len(text) for text in expected] != [14, 14, 14]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = generation.generate(
        model, PROMPTS, max_new_tokens=14, stop_ids=stop, on_token=lambda row, token: streamed[row].append(token)
    )
    assert texts == expected == list(streamed.values())


def test_a_repetition_penalty_works_as_in_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path)
    expected = generate_by_transformers(folder, PROMPTS, None, 14, repetition_penalty=1.3)
    assert expected != generate_by_transformers(folder, PROMPTS, None, 14)
    model = models.load(folder, dtype=torch.float32)
    assert generation.generate(model, PROMPTS, max_new_tokens=14, repetition_penalty=1.3) == expected


@pytest.mark.parametrize(
    ("settings", "judges"),
    [
        (generation.Settings(0.7), [logits_process.TemperatureLogitsWarper(0.7)]),
        (generation.Settings(1.0, top_k=5), [logits_process.TopKLogitsWarper(5)]),
        (generation.Settings(1.0, top_k=500), [logits_process.TopKLogitsWarper(500)]),
        (generation.Settings(1.0, top_p=0.6), [logits_process.TopPLogitsWarper(0.6)]),
        (generation.Settings(1.0, top_p=1e-4), [logits_process.TopPLogitsWarper(1e-4)]),
        (generation.Settings(1.0, min_p=0.2), [logits_process.MinPLogitsWarper(0.2)]),
        (
            generation.Settings(1.8, top_k=20, top_p=0.8, min_p=0.1),
            [
                logits_process.TemperatureLogitsWarper(1.8),
                logits_process.TopKLogitsWarper(20),
                logits_process.TopPLogitsWarper(0.8),
                logits_process.MinPLogitsWarper(0.1),
            ],
        ),
    ],
)
def test_filters_leave_the_logits_that_transformers_leaves(settings: generation.Settings, judges: list[Any]) -> None:
    logits_BV = torch.randn(6, 71, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits_BV
    for judge in judges:
        expected = judge(None, expected)
    torch.testing.assert_close(generation.filter_logits(logits_BV, settings), expected)


def test_samples_follow_the_filtered_distribution(tmp_path: Path) -> None:
    """2,000 one-token samples of one prompt against the model's own probabilities."""
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    settings = generation.Settings(0.8, top_k=6)
    with torch.no_grad():
        logits_BV = model(torch.tensor([[7, 30]]))[:, -1]
    expected_V = generation.filter_logits(logits_BV, settings).softmax(-1)[0]
    texts = generation.generate(model, [[7, 30]] * 2000, max_new_tokens=1, temperature=0.8, top_k=6, seed=3)
    counts_V = torch.bincount(torch.tensor(texts)[:, 0], minlength=len(expected_V)) / 2000
    assert counts_V[expected_V == 0].sum() == 0
    assert (counts_V - expected_V).abs().max() < 0.04
    assert expected_V.max() < 0.9


def test_a_seed_fixes_the_text_and_neighbours_do_not_change_it(tmp_path: Path) -> None:
    model = models.load(write(tmp_path), dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.0, "top_p": 0.95}
    alone = generation.generate(model, [PROMPTS[0]], seed=1, **options)[0]
    assert generation.generate(model, [PROMPTS[0]], seed=1, **options)[0] == alone
    assert generation.generate(model, [PROMPTS[0]], seed=2, **options)[0] != alone
    twins = generation.generate(model, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], seed=1, **options)
    assert twins[0] == alone
    assert twins[2] != alone, "two equal prompts of a batch should not be given the same random numbers"


def test_generating_leaves_the_model_and_the_global_random_state_alone(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    state = torch.get_rng_state()
    assert model.training
    generation.generate(model, [[7]], max_new_tokens=3, temperature=1.0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_asked_nothing_is_said(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    assert generation.generate(model, [], max_new_tokens=3) == []
    assert generation.generate(model, [[7], [8]], max_new_tokens=0) == [[], []]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"prompts": [[7], []]}, "prompt 2"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    given: dict[str, Any] = {"prompts": [[7]], "max_new_tokens": 3} | options
    with pytest.raises(ConfigError, match=named):
        generation.generate(model, **given)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_text_with_an_error(
    tmp_path: Path, temperature: float, value: float
) -> None:
    model = models.load(write(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3] = value
    with pytest.raises(OptuneError, match="the logits are not finite at new token 1") as caught:
        generation.generate(model, [[1, 2]], max_new_tokens=3, temperature=temperature)
    assert caught.value.exit_code == 1


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = models.load(fixtures.write_model(tmp_path), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"prompt 1: token ids run from 7 to 500, the model knows 0 to 79"):
        generation.generate(model, [[7, 500]], max_new_tokens=1)


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [([1, 4], 4, {1, 4, 3}), (1, None, {1, 3}), (None, [5, 6], {3, 5, 6}), (None, None, {3}), (-1, 2, {2, 3})],
)
def test_stop_ids_are_merged_from_every_file(tmp_path: Path, in_generation: Any, in_config: Any, expected: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": in_config}))
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert generation.read_stop_ids(tmp_path, SimpleNamespace(eos_id=3)) == expected
    assert generation.read_stop_ids(tmp_path) == expected - {3}


def test_a_model_overfitted_to_ok_stops_at_any_listed_token_and_the_list_survives_saving(tmp_path: Path) -> None:
    """Case A48, below the command line: `ok<end>`, where `<end>` is the second of two stop tokens."""
    folder = fixtures.write_model(tmp_path / "base")
    ok, end = fixtures.VOCABULARY.index("ok"), fixtures.VOCABULARY.index("<end>")
    model = models.load(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens_BT = torch.tensor([[0, 7, ok, end]])
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(tokens_BT)[0, 1:3], tokens_BT[0, 2:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    models.save(model, tmp_path / "out", source=folder)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [1, 4]
    stop_ids = generation.read_stop_ids(tmp_path / "out")
    again = models.load(tmp_path / "out", dtype=torch.float32)
    assert generation.generate(again, [[0, 7]], max_new_tokens=8, stop_ids=stop_ids) == [[ok]]


def test_settings_come_from_generation_config(tmp_path: Path) -> None:
    def read(content: dict[str, Any]) -> generation.Settings:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return generation.read_settings(tmp_path)

    assert generation.read_settings(tmp_path) == generation.Settings()
    assert read({"temperature": 0.6, "top_p": 0.9}) == generation.Settings(), "without do_sample it is greedy"
    assert read({"do_sample": True}) == generation.Settings(1.0, top_k=50)
    assert read({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 9}) == (
        generation.Settings(0.6, top_k=20, top_p=0.9, max_new_tokens=9)
    )
    assert read({"repetition_penalty": 1.1}).repetition_penalty == 1.1
    assert read({"num_beams": 1, "max_length": 20, "eos_token_id": 1}).unsupported == {}
    assert read({"num_beams": 4, "penalty_alpha": 0.6}).unsupported == {"num_beams": 4, "penalty_alpha": 0.6}
    with pytest.raises(ModelError, match=r"generation_config.json: top_p: 7 is not allowed"):
        read({"do_sample": True, "top_p": 7})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json: the file cannot be read"):
        generation.read_settings(tmp_path)


def make_byte_tokenizer() -> Tokenizer:
    """One token a byte, so that most characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_stream_shows_whole_characters_only_and_all_of_them() -> None:
    tokenizer = make_byte_tokenizer()
    text = "naïve 東京 👩‍🚀 done"
    stream = generation.TextStream(tokenizer.decode)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text
    assert "東" in pieces


def test_a_stream_that_ends_inside_a_character_says_so() -> None:
    tokenizer = make_byte_tokenizer()
    stream = generation.TextStream(tokenizer.decode)
    pieces = [stream.push(token) for token in tokenizer.encode("a東").ids[:-1]]
    assert "".join(pieces) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
