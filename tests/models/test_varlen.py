"""What is handed to torch's kernel for packs, which runs on CUDA alone: a slow kernel of the same meaning stands in."""

import pytest
import torch
import torch.nn.functional as F

from optune import models
from optune.models import varlen
from tests import fixtures


def slow_kernel(query, key, value, starts_q, starts_k, longest_q, longest_k, *, window_size, enable_gqa):
    """`torch.nn.attention.varlen.varlen_attn` by its documentation: one sequence after another."""
    left, right = window_size
    assert right == 0, "causal"
    assert torch.equal(starts_q, starts_k)
    assert starts_q.dtype == torch.int32
    lengths = starts_q.diff().tolist()
    assert longest_q == longest_k == max(lengths)
    outs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance <= (left if left >= 0 else len(q)))
        parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
        outs.append(F.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 3])
def test_a_pack_on_cuda_gives_the_hidden_states_of_the_same_pack_here(monkeypatch, tmp_path, window):
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    fixtures.write_model(tmp_path / "m", **(windowed if window else {}))
    model = models.load(tmp_path / "m", dtype=torch.float32)
    tokens_BT = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    documents_BT = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
    positions_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    expected = model.hidden(tokens_BT, positions_BT, documents_BT)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_kernel)
    monkeypatch.setattr(varlen, "fits", lambda *_: True)
    monkeypatch.setattr("optune.models.decoder._is_tiled", lambda *_: False)
    context = model.context(positions_BT, documents_BT)
    assert (context.masks, context.tiled, context.sequences is None) == ({}, False, False)
    found = model.hidden(tokens_BT, positions_BT, documents_BT)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_the_kernel_is_asked_for_what_it_takes_only():
    assert varlen.fits(torch.device("cuda", 0), torch.bfloat16, 128)
    assert not varlen.fits(torch.device("cuda", 0), torch.float32, 128)
    assert not varlen.fits(torch.device("cuda", 0), torch.bfloat16, 512)
    assert not varlen.fits(torch.device("cpu"), torch.bfloat16, 128)
