"""The gradient norm is right, whatever the size and the dtype, and does not depend on how parameters are grouped."""

from __future__ import annotations

import pytest
import torch

from optune.optim.norms import CHUNK, ROW, clip_factor, combine_norms, parameter_norms

SIZES = [(), (1,), (7, 3), (4 * ROW,), (4 * ROW + 1,), (5 * ROW,), (CHUNK,), (3 * CHUNK + ROW + 17,), (2000, 1500)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(size).mul(0.01).to(dtype) for size in SIZES]
    gradients.append(gradients[-1].t())
    norms = parameter_norms(gradients)
    assert all(norm.dtype is torch.float32 and norm.dim() == 0 for norm in norms)
    for norm, gradient in zip(norms, gradients, strict=True):
        assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=2e-6)


def test_the_norm_of_an_embedding_sized_gradient_is_right_where_one_fp32_sum_is_not() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(12_000_000)
    exact = float(gradient.double().norm())
    assert float(parameter_norms([gradient])[0]) == pytest.approx(exact, rel=1e-6)
    assert float(parameter_norms([gradient.bfloat16()])[0]) == pytest.approx(
        float(gradient.bfloat16().double().norm()), rel=1e-6
    )


def test_norms_do_not_depend_on_the_company() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(size) for size in SIZES]
    together = parameter_norms(gradients)
    alone = [parameter_norms([gradient])[0] for gradient in gradients]
    assert all(torch.equal(left, right) for left, right in zip(together, alone, strict=True))


def test_the_norm_and_the_factor_are_those_of_torch() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES[:6]]  # larger ones torch sums less exactly
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    norm = combine_norms(parameter_norms([p.grad for p in parameters if p.grad is not None]))
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    for limit in (1e-3, 1.0, norm, 1e9):
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, limit)
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert clip_factor(norm, limit) == pytest.approx(min(1.0, limit / (float(expected) + 1e-6)), rel=1e-5)
        assert clip_factor(norm, limit) <= 1.0


def test_missing_gradients_add_nothing() -> None:
    assert combine_norms([None, torch.tensor(3.0), None, torch.tensor(4.0)]) == 5.0
    assert combine_norms([None, None]) == 0.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(123.0, None) == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [3, 5 * ROW, 2 * CHUNK])
def test_one_bad_element_shows_in_the_norm(bad: float, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.ones(size, dtype=dtype)
        gradient[size // 2] = bad
        assert not torch.isfinite(parameter_norms([gradient])[0])
