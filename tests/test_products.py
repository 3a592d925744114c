"""Products on a CPU by the native kernel: against float64, wherever numbers lie, and in torch's place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from optune import kernels, products

DTYPES = [torch.float32, torch.bfloat16]
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 129, 191, 257, 300, 577]))
LENGTHS = st.one_of(SIZES, st.sampled_from([575, 768, 769, 1153, 1537, 2500]))


def find(dtype: torch.dtype) -> kernels.Kernels:
    native = kernels.find(torch.ones(1, dtype=dtype))
    if native is None or not native.has("multiply_matrices"):
        pytest.skip(f"this processor has no products of {dtype}")
    return native


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """For products in torch's place."""
    find(request.param)
    with products.native():
        if products._library is None:
            pytest.skip("this processor's products are torch's")
        yield request.param


def lay(rows: int, columns: int, dtype: torch.dtype, by_rows: bool, spare: int, seed: int) -> Tensor:
    """Numbers with NaN all around them; rows, or columns, are neighbours in memory."""
    size = (rows, columns) if by_rows else (columns, rows)
    around = torch.full((size[0] + 1, size[1] + spare), torch.nan, dtype=dtype)
    inside = around[:-1, spare // 2 : spare // 2 + size[1]]
    inside.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
    return inside if by_rows else inside.T


def bits(made: Tensor) -> Tensor:
    return made.contiguous().view(torch.int32 if made.dtype == torch.float32 else torch.int16)


def multiply(native: kernels.Kernels, made: Tensor, a: Tensor, b: Tensor, threads: int, adds: bool | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        arguments = products._arguments(made, a, b)
        native.multiply_matrices(*arguments) if adds is None else native.sum_matrices(*arguments, int(adds))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=120, deadline=None)
@given(
    M=SIZES, N=SIZES, K=LENGTHS, dtype=st.sampled_from(DTYPES), adds=st.sampled_from([None, False, True]),
    by_rows=st.tuples(st.booleans(), st.booleans()), spare=st.sampled_from([0, 1, 5, 64]),
)  # fmt: skip
def test_they_are_those_of_float64_on_any_number_of_threads_and_for_each_row_alone(
    M: int, N: int, K: int, dtype: torch.dtype, adds: bool | None, by_rows: tuple[bool, bool], spare: int
) -> None:
    native = find(dtype)
    a, b = lay(M, K, dtype, by_rows[0], spare, seed=1), lay(K, N, dtype, by_rows[1], spare, seed=2)
    kind = dtype if adds is None else torch.float32
    around = torch.full((M + 1, N + spare), 7.0, dtype=kind)
    around[:M, :N] = torch.randn(M, N, generator=torch.Generator().manual_seed(3)) if adds else torch.nan
    made = []
    for threads in (1, 2, 3, 70):
        made.append(around.clone())
        multiply(native, made[-1][:M, :N], a, b, threads, adds)
    for other in made[1:]:
        assert torch.equal(bits(other), bits(made[0]))
    assert (made[0][M:] == 7).all() and (made[0][:, N:] == 7).all(), "what lies beside it is left alone"
    begin = around[:M, :N].double() if adds else torch.zeros(M, N, dtype=torch.float64)
    scale = a.double().abs() @ b.double().abs() + begin.abs()
    error = (made[0][:M, :N].double() - (a.double() @ b.double() + begin)).abs()
    assert (error <= scale * ((K + 2) * 2.0**-24 + (2.0**-8 if kind == torch.bfloat16 else 0))).all()
    rng = random.Random(M * N * K)
    for row in {0, M - 1, rng.randrange(M)}:
        count, column = min(rng.choice([1, 8, 40]), M - row), rng.choice([0, rng.randrange(N)])
        alone = around[row : row + count, column:N].clone()
        multiply(native, alone, a[row : row + count], b[:, column:], 2, adds)
        assert torch.equal(bits(alone), bits(made[0][row : row + count, column:N]))


def test_a_sum_is_one_chain_in_the_order_of_its_terms() -> None:
    native, terms = find(torch.float32), 1700
    a, b = lay(3, terms, torch.float32, True, 0, seed=4), lay(terms, 5, torch.float32, True, 0, seed=5)
    made, chain = torch.empty(3, 5), torch.zeros(3, 5, dtype=torch.float64)
    multiply(native, made, a, b, 1, None)
    for k in range(terms):  # a fused multiply-add; what is rounded to double before changes a bit seldom
        chain = (chain + a[:, k : k + 1].double() * b[k : k + 1].double()).float().double()
    assert (made != chain.float()).sum() <= 1


def test_a_linear_layer_and_its_gradients_are_made_by_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    tell = products._arguments
    monkeypatch.setattr(products, "_arguments", lambda *three: made.append(tuple(three[0].shape)) or tell(*three))
    layer = torch.nn.Linear(48, 80, bias=False, dtype=dtype)
    x = lay(2 * 50, 48, dtype, True, 0, seed=6).view(2, 50, 48).requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))
    assert sorted(made) == [(80, 48), (100, 48), (100, 80)]
    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    exact = wide @ weight.T
    limit = 1e-5 if dtype == torch.float32 else 2**-7
    for mine, true in zip([y, *grads], [exact, *torch.autograd.grad(exact.sum(), [wide, weight])], strict=True):
        assert mine.dtype == dtype and (mine.double() - true).norm() < limit * true.norm()
    assert torch.equal(layer(x[:1]), y[:1]), "a row's result does not depend on the others"


def test_where_torch_is_asked_for_something_else_it_answers(dtype: torch.dtype) -> None:
    x, y = lay(64, 40, dtype, True, 0, seed=7), lay(40, 64, dtype, True, 0, seed=8)
    product = x @ y
    out = torch.empty(64, 64, dtype=dtype)
    assert torch.mm(x, y, out=out) is out and torch.equal(out, product)
    assert torch.equal(torch.mm(x, y, out=torch.empty(0, dtype=dtype)), product)
    assert torch.equal(torch.mm(x, y, out=torch.empty(64, 64, dtype=dtype).T), product)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(x, x)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(x, y.double())
    with pytest.raises(RuntimeError):
        torch.mm(x, y, out=torch.empty(64, 64, dtype=torch.float64))
    assert (x[:, :0] @ y[:0]).eq(0).all() and (x[:0] @ y).shape == (0, 64)
    spread = x[:1].expand(64, 40)
    assert torch.equal(spread @ y, (x[:1] @ y).expand(64, 64)) or dtype == torch.float32
    with kernels.turned_off():
        of_torch = [x @ y, x[:31] @ y, spread @ y]
    assert torch.equal(x[:31] @ y, of_torch[1]), "small ones are torch's"
    assert torch.equal(spread @ y, of_torch[2])
    with FakeTensorMode():
        assert (torch.empty(64, 40, dtype=dtype) @ torch.empty(40, 64, dtype=dtype)).shape == (64, 64)


def test_torchs_own_come_back_when_the_last_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_amd_without_tiles", lambda: True)
    kernel = torch.library.get_kernel("aten::mm", "CPU")
    asked: list[Tensor] = []
    monkeypatch.setattr(products, "_multiply", lambda a, b: asked.append(a))
    x = torch.eye(40)
    for _ in range(2):
        with products.native():
            with products.native():
                assert torch.equal(x @ x, x)
            assert torch.equal(x @ x, x)
        assert torch.equal(x @ x, x) and len(asked) == 2
        asked.clear()
    assert repr(torch.library.get_kernel("aten::mm", "CPU")) == repr(kernel)
    with pytest.raises(KeyError), products.native():
        raise KeyError
    assert torch.equal(x @ x, x) and not asked


def test_a_processor_that_torch_serves_better_keeps_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_amd_without_tiles", lambda: False)
    with products.native():
        assert products._library is None
    monkeypatch.undo()
    for vendor, flags, is_ours in (
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx512f amx_tile", False),
        ("GenuineIntel", "avx512f", False),
    ):
        told = {"vendor_id": vendor, "flags": flags}
        monkeypatch.setattr("optune.native.build._ask_processor", lambda *names, told=told: told[names[0]])
        assert products.is_amd_without_tiles() == is_ours
