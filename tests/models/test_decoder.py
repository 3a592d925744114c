"""What the decoder's parts promise to the training step: checkpointing, compiling, frozen weights, caches."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from optune import generation, models
from optune.models import decoder, masks, recomputing
from tests import fixtures
from tests.optim.memory_tracker import StorageTracker

TOKENS_BT = torch.tensor([[0, 7, 8, 30, 31, 44], [0, 9, 60, 61, 62, 5]])


def load(folder: Path, **overrides: Any) -> models.Decoder:
    return models.load(fixtures.write_model(folder, **overrides), dtype=torch.float32)


class Dropped(nn.Linear):
    """A linear layer with dropout before it, as an adapter has."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(hidden, 0.5))


def gradients(model: models.Decoder, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(TOKENS_BT).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["selective", "block"])
def test_activation_checkpointing_gives_the_same_gradients_with_dropout(tmp_path: Path, kind: Any) -> None:
    model = load(tmp_path)
    for block in model.blocks:
        block.get_submodule("mlp").__setattr__("up_proj", Dropped(32, 64, bias=False))
    plain = gradients(model)
    with mock.patch.object(recomputing, "checkpoint", wraps=recomputing.checkpoint) as used:
        model.activation_checkpointing = kind
        checkpointed = gradients(model)
    assert used.call_count == len(model.blocks)
    assert plain.keys() == checkpointed.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert not torch.equal(plain["model.norm.weight"], gradients(model, seed=1)["model.norm.weight"])


def test_blocks_keep_neither_their_normed_states_nor_the_product_of_their_gate(tmp_path: Path) -> None:
    """Bytes that live when the forward pass is over; two backwards over it find what they need."""
    model = load(tmp_path, num_hidden_layers=3)
    tokens_BT = TOKENS_BT.repeat(4, 3)

    def run() -> tuple[int, list[Tensor]]:
        with StorageTracker(model.parameters()) as tracker:
            hidden_BTD = model.hidden(tokens_BT)
            kept = tracker.live_bytes
        hidden_BTD.square().mean().backward(retain_graph=True)
        (hidden_BTD * 3).sum().backward()
        made = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return kept, made

    kept, made = run()
    with mock.patch.object(decoder, "remaking", lambda *_: nullcontext()):
        more, plain = run()
    config = model.config
    assert more - kept == 4 * tokens_BT.numel() * 3 * (2 * config.hidden_size + config.intermediate_size)
    assert len(made) == len(plain) == len(list(model.parameters())) - (not config.tie_word_embeddings)
    assert all(map(torch.equal, made, plain))


def test_activation_checkpointing_keeps_only_the_inputs_of_blocks(tmp_path: Path) -> None:
    """Counts what lives when the forward pass is over."""
    model = load(tmp_path, num_hidden_layers=6)

    def saved_bytes() -> int:
        with StorageTracker(model.parameters()) as tracker:
            before = tracker.live_bytes
            hidden_BTD = model.embed(TOKENS_BT)
            context = model.context(torch.arange(TOKENS_BT.shape[1])[None])
            for block in model.blocks:
                hidden_BTD = model.run_block(block, hidden_BTD, context)
            return tracker.live_bytes - before

    everything = saved_bytes()
    model.activation_checkpointing = "block"
    assert saved_bytes() < everything / 5


def test_the_parts_called_one_by_one_give_what_forward_gives(tmp_path: Path) -> None:
    model = load(tmp_path)
    hidden_BTD = model.embed(TOKENS_BT)
    context = model.context(torch.arange(TOKENS_BT.shape[1])[None])
    for block in model.blocks:
        hidden_BTD = model.run_block(block, hidden_BTD, context)
    by_parts = model.lm_head(model.final_norm(hidden_BTD))
    assert torch.equal(by_parts, model(TOKENS_BT))
    assert torch.equal(model.final_norm(hidden_BTD), model.hidden(TOKENS_BT))


def test_attention_needs_a_mask_only_where_causal_order_is_not_enough() -> None:
    """Off the CPU, and with a cache."""

    def mask(window: int | None, documents_BT: torch.Tensor | None) -> torch.Tensor | None:
        return masks.make_mask(6, torch.device("cpu"), window, documents_BT, None, None)

    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert mask(None, None) is None
    assert mask(None, documents_BT) is not None
    assert mask(6, None) is None
    narrow = mask(2, documents_BT)
    assert narrow is not None
    seen = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    seen += [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert narrow[0, 0].int().tolist() == seen


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_frozen_weights_cost_no_gradient_work(tmp_path: Path, checkpointing: Any) -> None:
    """With one trainable projection in the first block, backward makes weight gradients for it alone."""
    from torch.utils.flop_counter import FlopCounterMode

    model = load(tmp_path)
    model.activation_checkpointing = checkpointing

    def backward_flops() -> int:
        loss = model(TOKENS_BT).square().mean()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    everything = backward_flops()
    model.zero_grad()
    model.requires_grad_(False)
    trained = model.get_parameter("model.layers.0.self_attn.q_proj.weight").requires_grad_(True)
    only_one = backward_flops()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["model.layers.0.self_attn.q_proj.weight"]
    assert trained.grad is not None and trained.grad.abs().sum() > 0
    tokens = TOKENS_BT.numel()
    linear = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    # Left out: dW of every other linear layer, and dX of the two that read the first norm's output beside q_proj.
    saved = 2 * tokens * (sum(p.numel() for p in linear) - trained.numel())
    assert everything - only_one >= saved


def test_the_embedding_of_the_padding_token_gets_no_gradient_from_inputs_as_in_transformers(tmp_path: Path) -> None:
    model = load(tmp_path)
    tokens_BT = torch.tensor([[0, 2, 7]])
    model(tokens_BT).square().mean().backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    assert gradient[2].abs().sum() == 0 and gradient[7].abs().sum() > 0


def test_tied_models_share_one_parameter(tmp_path: Path) -> None:
    model = load(tmp_path, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert (
        sum(p.numel() for p in model.parameters()) == 80 * 32 + sum(p.numel() for p in model.blocks.parameters()) + 32
    )


def test_a_cache_filled_in_pieces_gives_the_logits_of_one_pass(tmp_path: Path) -> None:
    mistral: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    for name, overrides in {"full": {}, "sliding": mistral | {"sliding_window": 3}}.items():
        model = load(tmp_path / name, **overrides)
        expected = model(TOKENS_BT)
        with torch.no_grad():
            cache = model.new_cache(2, 6)
            pieces = [model(part, cache=cache) for part in TOKENS_BT.split([2, 1, 3], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="room for 6 tokens a row; 7 are needed"):
            model(TOKENS_BT[:, :1], cache=cache)


def test_float64_models_compute_norms_in_float64(tmp_path: Path) -> None:
    """So that gradients can be checked by finite differences."""
    model = models.load(fixtures.write_model(tmp_path, num_hidden_layers=1, pad_token_id=None), dtype=torch.float64)
    assert model(TOKENS_BT).dtype == torch.float64
    weight = model.get_parameter("model.layers.0.input_layernorm.weight")

    def loss_of(values: Tensor) -> Tensor:
        name = "model.layers.0.input_layernorm.weight"
        return torch.func.functional_call(model, {name: values}, (TOKENS_BT,)).square().mean()

    assert torch.autograd.gradcheck(loss_of, (weight.detach().clone().requires_grad_(True),))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_compiled_blocks_give_the_same_numbers_and_keep_their_names(tmp_path: Path, checkpointing: Any) -> None:
    model = load(tmp_path)
    model.activation_checkpointing = checkpointing
    names = [name for name, _ in model.named_parameters()]
    expected, expected_gradients = model(TOKENS_BT), gradients(model)
    model.compile_blocks(options={"fallback_by_default": True})  # no loops in C++, which take their time
    torch.testing.assert_close(model(TOKENS_BT), expected, rtol=0, atol=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-7)
    assert [name for name, _ in model.named_parameters()] == names
    documents_BT = torch.tensor([[0, 0, 1, 1, 1, 2]]).expand(2, -1)
    positions_BT = torch.tensor([[0, 1, 0, 1, 2, 0]]).expand(2, -1)
    packed = model(TOKENS_BT, positions_BT, documents_BT)
    alone = load(tmp_path / "again")(TOKENS_BT[:, 2:5])
    torch.testing.assert_close(packed[:, 2:5], alone, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_all_blocks_share_one_compiled_graph_and_lengths_do_not_pile_up(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    model = load(tmp_path, num_hidden_layers=4)
    counter = CompileCounter()
    model.compile_blocks(backend=counter)
    for length in (6, 5, 4, 3):
        model(TOKENS_BT[:, :length]).sum().backward()
    assert counter.frame_count <= 2, "one graph for the first length, one for any length"
    before = counter.frame_count
    texts = generation.generate(model, [[0, 7], [0, 8, 30]], max_new_tokens=4)
    assert counter.frame_count == before, "generating must not compile for every layer and length"
    assert texts == generation.generate(load(tmp_path, num_hidden_layers=4), [[0, 7], [0, 8, 30]], max_new_tokens=4)
