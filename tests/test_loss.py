"""The fused loss against torch's own cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optune import loss
from optune.types import IGNORE, Microbatch


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocabulary, bias=bias, dtype=dtype)


def make_case(dtype: torch.dtype, weighted: bool):
    torch.manual_seed(0)
    hidden_BTD = torch.randn(3, 7, 16, dtype=dtype, requires_grad=True)
    labels_BT = torch.randint(0, 50, (3, 7))
    labels_BT[0, :4] = IGNORE
    labels_BT[2] = IGNORE
    weights_BT = torch.rand(3, 7, dtype=torch.promote_types(dtype, torch.float32)) if weighted else None
    microbatch = Microbatch(
        torch.zeros(3, 7, dtype=torch.long), labels_BT, torch.arange(7).expand(3, 7), weights_BT=weights_BT
    )
    return hidden_BTD, microbatch


def reference(model, hidden_BTD, microbatch):
    logits_BTV = model.lm_head(hidden_BTD).double()
    losses = F.cross_entropy(
        logits_BTV.flatten(0, 1), microbatch.labels_BT.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.sum() if microbatch.weights_BT is None else (losses * microbatch.weights_BT.flatten()).sum()


@pytest.mark.parametrize(("chunk_bytes", "part"), [(1, 1), (600, 16), (600, 2**20), (2**24, 120), (2**24, 2**20)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_loss_and_both_gradients_equal_torchs_for_any_chunk_size(
    monkeypatch, chunk_bytes, part, weighted, dtype, tolerance
):
    monkeypatch.setattr("optune.loss.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("optune.cross_entropy.PART_ON_CPU", part)
    model = Head(16, 50, dtype)
    hidden_BTD, microbatch = make_case(dtype, weighted)
    value = loss.next_token_loss(model, hidden_BTD, microbatch)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    (value * 0.3).backward()
    ours = value.item(), hidden_BTD.grad.clone(), model.lm_head.weight.grad.clone()
    hidden_BTD.grad = model.lm_head.weight.grad = None
    expected = reference(model, hidden_BTD, microbatch)
    (expected * 0.3).backward()
    assert ours[0] == pytest.approx(expected.item(), rel=tolerance)
    torch.testing.assert_close(ours[1], hidden_BTD.grad, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours[2], model.lm_head.weight.grad, atol=tolerance, rtol=tolerance)


def test_a_head_with_a_bias_takes_the_open_path_and_trains_its_bias():
    model = Head(16, 50, torch.float32, bias=True)
    hidden_BTD, microbatch = make_case(torch.float32, weighted=True)
    loss.next_token_loss(model, hidden_BTD, microbatch).backward()
    assert model.lm_head.bias.grad.abs().sum() > 0


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_right_one():
    model = Head(16, 50, torch.float32)
    hidden_BTD, microbatch = make_case(torch.float32, weighted=False)
    loss.next_token_loss(model, hidden_BTD, microbatch).backward()
    expected = hidden_BTD.grad.clone()
    hidden_BTD.grad = model.lm_head.weight.grad = None
    model.lm_head.weight.requires_grad_(False)
    loss.next_token_loss(model, hidden_BTD, microbatch).backward()
    assert model.lm_head.weight.grad is None
    assert torch.equal(hidden_BTD.grad, expected)


def test_a_microbatch_without_targets_has_loss_zero_and_zero_gradients():
    model = Head(16, 50, torch.float32)
    hidden_BTD, microbatch = make_case(torch.float32, weighted=False)
    microbatch.labels_BT.fill_(IGNORE)
    value = loss.next_token_loss(model, hidden_BTD, microbatch)
    value.backward()
    assert value.item() == 0.0
    assert model.lm_head.weight.grad.abs().sum() == 0
    assert hidden_BTD.grad.abs().sum() == 0


def test_no_tensor_of_the_full_logits_size_is_ever_made(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    monkeypatch.setattr("optune.loss.CHUNK_BYTES", 8000)
    model = Head(4, 1000, torch.float32)
    hidden_ND = torch.randn(64, 4, requires_grad=True)
    with Largest() as largest:
        loss.linear_cross_entropy_sum(hidden_ND, model.lm_head, torch.arange(64), None).backward()
    assert largest.elements == 1000 * 4  # the head's gradient; a chunk of logits is 2,000, all of them 64,000
