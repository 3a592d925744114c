"""Norm and SwiGLU as single operations against autograd of their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optune import kernels
from optune.models import fused

EPS = 1e-5


def plain_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(hidden.dtype)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


CASES = {
    "rms_norm": (lambda x, w: fused.rms_norm(x, w, EPS), plain_norm, [(3, 5, 16), (16,)]),
    "rms_norm of heads": (lambda x, w: fused.rms_norm(x, w, EPS), plain_norm, [(2, 5, 3, 8), (8,)]),
    "swiglu": (fused.swiglu, plain_swiglu, [(3, 5, 16), (3, 5, 16)]),
}


def run(function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def make(shapes, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("part", [1, 40, 2**18])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula_and_gradients_those_of_autograd(monkeypatch, name, part):
    monkeypatch.setattr(fused, "_PART_ON_CPU", part)
    ours, plain, shapes = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        inputs = make(shapes, dtype)
        for mine, expected in zip(run(ours, inputs), run(plain, inputs), strict=True):
            torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_in_bf16_values_are_the_formulas_bit_for_bit_and_gradients_no_worse(name):
    ours, plain, shapes = CASES[name]
    inputs = make([(40, *shape[1:]) if len(shape) > 1 else shape for shape in shapes], torch.bfloat16)
    exact = run(plain, [tensor.double() for tensor in inputs])
    mine, autograds = run(ours, inputs), run(plain, inputs)
    assert torch.equal(mine[0], autograds[0])
    for my, their, true in zip(mine[1:], autograds[1:], exact[1:], strict=True):
        assert (my.double() - true).norm() <= 1.05 * (their.double() - true).norm()


def test_what_is_no_leaf_of_a_row_is_taken_as_it_lies():
    """Queries of one head are strided views."""
    hidden = make([(2, 3, 5, 8)], torch.float64)[0].transpose(1, 2)
    weight = make([(8,)], torch.float64)[0]
    for mine, expected in zip(
        run(CASES["rms_norm"][0], [hidden, weight]), run(plain_norm, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_torch_can_trace_and_compile_them():
    torch.library.opcheck(
        torch.ops.optune.rms_norm.default,
        (*(tensor.requires_grad_() for tensor in make([(3, 5, 16), (16,)], torch.float32)), EPS),
    )
    torch.library.opcheck(
        torch.ops.optune.swiglu.default,
        (*(tensor.requires_grad_() for tensor in make([(3, 5, 16), (3, 5, 16)], torch.float32)), False),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_an_owned_gradient_gives_its_memory_and_the_same_numbers(dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(6, 70, generator=generator).to(dtype) for _ in range(3))
    if layout == "transposed":
        grad = grad.T.contiguous().T
    elif layout == "expanded":
        grad = grad[:1].expand(6, 70)
    before, found = grad.clone(), []
    for owned in (False, True):
        inputs = gate.clone().requires_grad_(), up.clone().requires_grad_()
        out = fused.swiglu(*inputs, owned=owned)
        found.append(torch.autograd.grad(out, inputs, grad, retain_graph=True))
        if not owned:
            assert torch.equal(grad, before)
        elif grad.data_ptr() == found[-1][0].data_ptr():
            assert layout == "contiguous"
            again = torch.autograd.grad(out, inputs, before)  # what was kept is as it was
            assert all(map(torch.equal, again, found[0]))
        else:
            assert layout != "contiguous" or kernels.find(gate) is None
            assert torch.equal(grad, before)
    assert all(map(torch.equal, *found))


def test_a_remade_product_is_not_kept_and_its_layers_gradient_is_the_same_bit_for_bit():
    layer = nn.Linear(16, 4, bias=False, dtype=torch.bfloat16)
    gate, up = (tensor.requires_grad_() for tensor in make([(3, 5, 16), (3, 5, 16)], torch.bfloat16))

    def product_is_kept(remakes: bool) -> bool:
        inner = fused.swiglu(gate, up)
        if remakes:
            with fused.remaking(inner, fused.swiglu, gate, up):
                out = layer(inner)
        else:
            out = layer(inner)
        storage = torch.multiprocessing.reductions.StorageWeakRef(inner.untyped_storage())
        del inner
        is_kept = not storage.expired()
        out.float().pow(2).sum().backward()
        return is_kept

    assert product_is_kept(remakes=False)
    expected = [tensor.grad for tensor in (layer.weight, gate, up)]
    layer.weight.grad = gate.grad = up.grad = None
    assert not product_is_kept(remakes=True)
    for mine, other in zip((layer.weight, gate, up), expected, strict=True):
        assert torch.equal(mine.grad, other)
