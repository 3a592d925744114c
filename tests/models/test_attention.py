"""Attention by tiles against torch's own under an explicit mask, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optune.models import attention
from optune.models.attention import causal_attention


def make_inputs(rows: int, heads: int, key_heads: int, length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as the decoder has them, views of (B, T, heads, H), and a gradient for the output."""
    generator = torch.Generator().manual_seed(rows * length + width)
    made = [
        torch.randn(rows, length, count, width, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for count in (heads, key_heads, key_heads, heads)
    ]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def visible(length: int, documents_BT: Tensor | None, window: int | None) -> Tensor:
    positions = torch.arange(length)
    seen = positions <= positions[:, None]
    if window is not None:
        seen &= positions > positions[:, None] - window
    return seen if documents_BT is None else seen & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])


def number_documents(rows: int, length: int, cuts: list[int] | None) -> Tensor | None:
    """Of a pack that is cut there, moved on by one in each further row."""
    if cuts is None:
        return None
    return sum(
        ((torch.arange(length) >= cut + torch.arange(rows)[:, None]).long() for cut in cuts),
        torch.zeros(rows, length, dtype=torch.long),
    )


def run(function, inputs: list[Tensor]) -> list[Tensor]:
    query, key, value, grad = inputs
    out = function(query, key, value)
    return [out, *torch.autograd.grad(out, (query, key, value), grad)]


def reference(inputs: list[Tensor], documents_BT: Tensor | None, window: int | None) -> list[Tensor]:
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    mask = visible(inputs[0].shape[2], documents_BT, window)
    return run(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        [*wide, inputs[3].double()],
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    length=st.one_of(st.integers(1, 20), st.integers(60, 140)),
    window=st.none() | st.integers(1, 150),
    cuts=st.none() | st.lists(st.integers(1, 139), max_size=4),
    tile=st.sampled_from([1, 2**12, 2**20]),
)
def test_output_and_gradients_are_those_of_attention_under_a_mask(rows, key_heads, groups, length, window, cuts, tile):
    inputs = make_inputs(rows, key_heads * groups, key_heads, length, 8, torch.float64)
    documents_BT = number_documents(rows, length, cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE_ELEMENTS", tile)
        ours = run(lambda q, k, v: causal_attention(q, k, v, documents_BT, window), inputs)
    for mine, expected in zip(ours, reference(inputs, documents_BT, window), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_in_bf16_it_is_nearer_to_the_truth_than_torchs_own(spread):
    """Gradients of torch's kernel are summed in bf16 here; the spread is that of the scores."""
    inputs = make_inputs(2, 6, 2, 300, 64, torch.bfloat16)
    inputs[0] = (inputs[0].detach() * spread).requires_grad_()
    exact = reference(inputs, None, None)

    def errors(results: list[Tensor]) -> list[float]:
        return [((mine.double() - true).norm() / true.norm()).item() for mine, true in zip(results, exact, strict=True)]

    ours = errors(run(lambda q, k, v: causal_attention(q, k, v, None, None), inputs))
    torchs = errors(
        run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), inputs)
    )
    assert max(ours) < 0.004
    for mine, theirs in zip(ours, torchs, strict=True):
        assert mine < 1.3 * theirs
    assert sum(ours) < sum(torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 16])  # by tiles, and by a native kernel where there is one
def test_rows_of_a_pack_never_meet(width, dtype):
    """Not even as a product with zero: what is not a number in one row leaves the others and their gradients alone."""
    query, key, value, grad = make_inputs(1, 2, 1, 12, width, dtype)
    documents_BT = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    broken = [tensor.detach().clone() for tensor in (query, key, value, grad)]
    for tensor in broken:
        tensor[:, :, 5:9] = torch.nan
    together = run(
        lambda q, k, v: causal_attention(q, k, v, documents_BT, None),
        [*(tensor.requires_grad_() for tensor in broken[:3]), broken[3]],
    )
    alone = run(lambda q, k, v: causal_attention(q, k, v, documents_BT, None), [query, key, value, grad])
    for spoilt, whole in zip(together, alone, strict=True):
        assert torch.equal(spoilt[:, :, :5], whole[:, :, :5])
        assert torch.equal(spoilt[:, :, 9:], whole[:, :, 9:])
        assert spoilt[:, :, 5:9].isnan().all()


def test_a_document_whose_positions_stand_apart_is_refused():
    query, key, value, _ = make_inputs(1, 2, 1, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=r"stand apart in row 0: \[0, 1, 0\]"):
        causal_attention(query, key, value, torch.tensor([[0, 1, 1, 0]]), None)


def test_torch_can_trace_compile_and_count_it():
    inputs = make_inputs(2, 4, 2, 70, 8, torch.float32)[:3]
    torch.library.opcheck(torch.ops.optune.causal_attention.default, (*inputs, None, None))
    for dtype, width in itertools.product((torch.float32, torch.bfloat16), (8, 64)):  # with and without a native kernel
        *three, grad = make_inputs(2, 4, 2, 70, width, dtype)
        operation = torch.ops.optune.causal_attention_backward.default
        torch.library.opcheck(operation, (grad, *three, None, None), test_utils="test_faketensor")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        causal_attention(*inputs, None, None).sum().backward()
    scores = 64 * 64 + 6 * 70  # of the two tiles
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * 8 * scores
