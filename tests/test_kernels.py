"""The native kernels against float64 formulas, however many threads there are; and a machine that has none."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from optune import kernels, loss
from optune.models import fused, native_attention, rope
from optune.models.attention import causal_attention
from optune.native import build
from tests.models.test_attention import make_inputs, number_documents, reference, run

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of a result whose scale is 1: a rounding, and for fp32 the order of sums."""


@pytest.fixture
def native() -> Iterator[None]:
    if not kernels.is_ready():
        pytest.skip(f"this machine has {kernels.describe()}")
    yield


def make(*size: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(size))
    return (torch.randn(size, generator=generator, dtype=torch.float64) * spread).to(dtype).requires_grad_()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def cases(dtype: torch.dtype, rows: int, width: int) -> dict[str, Case]:
    """An operation of ours, its formula, and inputs."""
    positions = torch.arange(rows)[None]
    angles = (positions[..., None] * torch.rand(width, generator=torch.Generator().manual_seed(0)))[:, :, None]
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    x, y = make(rows, width, dtype=dtype), make(rows, width, dtype=dtype, spread=2)
    return {
        "norm": (lambda x, w: fused.rms_norm(x, w, 1e-5), norm, [x, make(width, dtype=dtype)]),
        "swiglu": (fused.swiglu, lambda gate, up: F.silu(gate) * up, [y, x]),
        "rotate": (
            lambda x: rope.rotate(x, *tables),
            lambda x: swapped(x, *(table.double() for table in tables)),
            [make(2, rows, 3, width, dtype=dtype)],
        ),
    }


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["norm", "swiglu", "rotate"])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (65, 48), (130, 578)])
def test_results_and_gradients_are_those_of_the_formula(name: str, dtype: torch.dtype, rows: int, width: int) -> None:
    ours, formula, inputs = cases(dtype, rows, width)[name]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    grad = torch.randn(ours(*inputs).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for made, exact in zip(differentiate(ours, inputs, grad), differentiate(formula, wide, grad.double()), strict=True):
        # Sums over rows grow with their number, and each rounding before a product counts once more.
        scale = exact.abs().max().item()
        assert made.dtype == dtype
        torch.testing.assert_close(made.double(), exact, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype] * scale)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["norm", "swiglu", "rotate"])
def test_in_bf16_they_round_where_torchs_operations_round(name: str) -> None:
    ours, _, inputs = cases(torch.bfloat16, 130, 578)[name]
    with kernels.turned_off():
        expected = ours(*inputs)
    assert (ours(*inputs) != expected).float().mean() < 1e-3  # a sum of squares in another order may tip one


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 70, 200])
def test_cross_entropy_and_its_gradients_are_those_of_torch_in_float64(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optune.loss.CHUNK_BYTES", 128 * 5001 * dtype.itemsize)
    head = torch.nn.Linear(32, 5001, bias=False, dtype=dtype)
    hidden, weights = make(rows, 32, dtype=dtype), torch.rand(rows)
    labels = torch.randint(0, 5001, (rows,))
    total = loss.linear_cross_entropy_sum(hidden, head, labels, weights)
    made = torch.autograd.grad(total, [hidden, head.weight])
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight))
    logits = wide @ weight.T
    if dtype == torch.bfloat16:  # rounded there too, as logits are in a model
        logits = logits + (logits.to(dtype).double() - logits).detach()
    exact = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    assert total.item() == pytest.approx(exact.item(), rel=1e-5)
    for mine, true in zip(made, torch.autograd.grad(exact, [wide, weight]), strict=True):
        assert (mine.double() - true).norm() < 2 * TOLERANCE[dtype] * true.norm()


@pytest.mark.usefixtures("native")
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 2),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    length=st.one_of(st.integers(1, 20), st.integers(60, 200)),
    width=st.sampled_from([8, 16, 64, 80, 128]),
    window=st.none() | st.integers(1, 250),
    cuts=st.none() | st.lists(st.integers(1, 199), max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_attention_is_that_of_torch_under_a_mask(rows, key_heads, groups, length, width, window, cuts, dtype) -> None:
    inputs = make_inputs(rows, key_heads * groups, key_heads, length, width, dtype)
    documents_BT = number_documents(rows, length, cuts)
    ours = run(lambda q, k, v: causal_attention(q, k, v, documents_BT, window), inputs)
    for mine, exact in zip(ours, reference(inputs, documents_BT, window), strict=True):
        scale = max(1.0, exact.abs().max().item())
        rtol = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine.double(), exact, rtol=rtol, atol=4 * TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("width", [8, 64])  # by tiles, and by the kernel where there is one
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_attention_in_fp32_is_as_near_to_the_truth_as_torchs_own(spread: float, width: int) -> None:
    inputs = make_inputs(2, 6, 2, 300, width, torch.float32)
    inputs[0] = (inputs[0].detach() * spread).requires_grad_()
    exact = reference(inputs, None, None)
    ours = run(lambda q, k, v: causal_attention(q, k, v, None, None), inputs)
    torchs = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), inputs)
    for mine, theirs, true in zip(ours, torchs, exact, strict=True):
        error, other = ((made.double() - true).norm() / true.norm() for made in (mine, theirs))
        assert error < 1e-6 and error < 1.5 * other


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86_64")
@pytest.mark.parametrize(
    ("processor", "dtypes"),
    [("haswell", []), ("skylake-avx512", ["float32"]), ("cooperlake", ["bfloat16", "float32"])],
)
def test_other_processors_get_the_kernels_that_they_have_instructions_for(
    processor: str, dtypes: list[str], tmp_path: Path
) -> None:
    try:
        compiler = build._find_compiler()
    except build.NoLibraryError as error:
        pytest.skip(str(error))
    made = tmp_path / "made.s"
    for name, function in (("attention.cpp", "causal_attention_backward"), ("matrices.cpp", "sum_matrices")):
        words = [*compiler, *build.FLAGS, f"-march={processor}", "-fopenmp", "-S", str(build.FOLDER / name)]
        subprocess.run([*words, "-o", str(made)], check=True, capture_output=True)
        found = re.findall(rf"^{function}_(\w+):", made.read_text(), re.MULTILINE)
        assert sorted(found) == dtypes


@pytest.mark.usefixtures("native")
def test_a_processor_with_the_instructions_has_attention_and_products_of_its_own() -> None:
    features = set(build._cpu_flags().split())
    for dtype, needed in ((torch.float32, {"avx512f"}), (torch.bfloat16, {"avx512f", "avx512bw", "avx512_bf16"})):
        native = kernels.find(torch.ones(1, dtype=dtype))
        assert native is not None
        for name in ("causal_attention", "causal_attention_backward", "multiply_matrices", "sum_matrices"):
            assert native.has(name) == (needed <= features)
        assert native_attention.find(torch.ones(1, 8, dtype=dtype)) is None  # heads of 8 features go by tiles


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 30])
def test_a_pack_of_many_short_documents_takes_little_memory(
    length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, make_sums = [], native_attention._Room.sums

    def measured(room: native_attention._Room) -> Tensor:
        sizes.append(make_sums(room).numel())
        return make_sums(room)

    monkeypatch.setattr(native_attention._Room, "sums", measured)
    inputs = make_inputs(2, 4, 2, 300, 16, dtype)
    if native_attention.find(inputs[0]) is None:
        pytest.skip("this machine has no native attention")
    documents_BT = (torch.arange(300) // length).expand(2, 300)
    ours = run(lambda q, k, v: causal_attention(q, k, v, documents_BT, None), inputs)
    for mine, exact in zip(ours, reference(inputs, documents_BT, None), strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(mine.double(), exact, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype] * scale)
    assert max(sizes) <= 2 * (2 * 4 * 640 * 16)  # keys and values of 4 heads and 600 positions, twice


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "width"), [(None, 64), (70, 64), (70, 16), (1, 48)])
def test_what_lay_in_the_memory_that_attention_works_in_does_not_matter(
    window: int | None, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(2, 4, 2, 150, width, dtype)
    room = native_attention._Room
    results = []
    for bits in (0, -1):  # as a float, or as numbers of 16 bits, -1 is not a number
        with monkeypatch.context() as patch:
            for name in ("packed", "scratch", "sums"):

                def make(self: Any, *rest: Any, bits: int = bits, whole: Any = room.__dict__[name]) -> Any:
                    made = whole(self, *rest)
                    (made if isinstance(made, Tensor) else made[0]).view(torch.int32).fill_(bits)
                    return made

                patch.setattr(room, name, make)
            results.append(run(lambda q, k, v: causal_attention(q, k, v, None, window), inputs))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("native")
@settings(max_examples=30, deadline=None)
@given(
    targets=st.integers(1, 1100),
    words=st.integers(1, 150),
    width=st.sampled_from([1, 16, 33, 64, 80, 144]),
    is_first=st.booleans(),
)
def test_the_heads_gradient_is_summed_in_fp32_and_by_any_number_of_threads(
    targets: int, words: int, width: int, is_first: bool
) -> None:
    native = kernels.find(torch.ones(1, dtype=torch.bfloat16))
    if native is None or not native.has("sum_matrices"):
        pytest.skip("this processor has no products of bf16 numbers")
    grads, hidden = make(targets, words, dtype=torch.bfloat16), make(targets, width, dtype=torch.bfloat16)
    start = torch.full((words, width), torch.nan) if is_first else make(words, width, dtype=torch.float32).detach()
    before, sums = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            sums.append(start.clone())
            loss._add_product_(sums[-1], grads.detach(), hidden.detach(), [slice(0, len(sums[-1]))], is_first=is_first)
    finally:
        torch.set_num_threads(before)
    exact = grads.detach().double().T @ hidden.detach().double() + (0 if is_first else start.double())
    assert torch.equal(*sums)
    assert (sums[0].double() - exact).abs().max() < 1e-6 * targets**0.5 * exact.abs().max()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    def everything() -> list[Tensor]:
        found = []
        for ours, _, inputs in cases(dtype, 130, 578).values():
            grad = torch.ones(ours(*inputs).shape)
            found += differentiate(ours, inputs, grad)
        inputs = make_inputs(2, 6, 2, 200, 64, dtype)
        documents_BT = (torch.arange(200) > 90).long().expand(2, 200)
        if native_attention.find(inputs[0]) is None:  # torch's own fp32 products may split their sums among threads
            return found
        return found + run(lambda q, k, v: causal_attention(q, k, v, documents_BT, None), inputs)

    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(everything())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for result in results[1:] for one, other in zip(results[0], result, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, bad: float) -> None:
    for ours, _, inputs in cases(dtype, 3, 32).values():
        spoilt = inputs[0].detach().clone()
        spoilt.view(-1, 32)[1, 5] = bad
        assert not ours(spoilt, *inputs[1:]).isfinite().all()
    query, key, value, _ = make_inputs(1, 2, 1, 40, 16, dtype)
    spoilt = query.detach().clone()
    spoilt[0, 0, 7, 3] = bad
    out = causal_attention(spoilt, key, value, None, None)
    assert not out[0, 0, 7].isfinite().all() and out[0, 1].isfinite().all()
    spoilt = value.detach().clone()
    spoilt[0, 0, 17, 3] = bad
    out = causal_attention(query, key, spoilt, None, None)
    assert not out[0, :, 17:, 3].isfinite().any() and out[0, :, :, 4].isfinite().all()
    if native_attention.find(query) is not None:
        assert out[0, :, :16].isfinite().all()  # no more than what is multiplied together
    head = torch.nn.Linear(16, 100, bias=False, dtype=dtype)
    hidden = torch.full((2, 16), bad, dtype=dtype)
    assert not loss.linear_cross_entropy_sum(hidden, head, torch.tensor([1, 2]), None).isfinite()


@pytest.mark.usefixtures("native")
def test_extreme_numbers_come_out_as_from_torch() -> None:
    gate = torch.tensor([-1e4, -104.0, -88.5, -87.0, -1e-30, 0.0, 1e-30, 88.5, 1e4])
    up = torch.ones_like(gate)
    torch.testing.assert_close(fused.swiglu(gate, up), F.silu(gate), rtol=1e-6, atol=1e-33)
    head = torch.nn.Linear(1, 3, bias=False)
    head.weight.data = torch.tensor([[300.0], [0.0], [-300.0]])
    total = loss.linear_cross_entropy_sum(torch.ones(1, 1), head, torch.tensor([2]), None)
    assert total.item() == 600.0


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e3, 3e7, 1e15])
def test_attention_to_one_key_alone_is_its_value_however_far_the_others_are(dtype: torch.dtype, size: float) -> None:
    query, value = torch.full((1, 1, 70, 16), size, dtype=dtype), make(1, 1, 70, 16, dtype=dtype).detach()
    key = torch.full((1, 1, 70, 16), -size, dtype=dtype)
    key[0, 0, 0] = size
    assert torch.equal(causal_attention(query, key, value, None, None), value[:, :, :1].expand_as(value))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("label", [-1, 5, 10**12])
def test_a_label_that_is_no_word_is_an_error(label: int) -> None:
    head = torch.nn.Linear(2, 5, bias=False)
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        loss.linear_cross_entropy_sum(torch.ones(2, 2), head, torch.tensor([1, label]), None)


@pytest.mark.usefixtures("native")
def test_tensors_without_values_are_left_alone_and_strided_ones_refused() -> None:
    native = kernels.find(torch.empty(1))
    assert native is not None
    with FakeTensorMode():
        tensor = torch.empty(4)
        native.swiglu(tensor, tensor, tensor, 4)
    with pytest.raises(ValueError, match="strides"):
        native.swiglu(torch.empty(4, 2).T, torch.empty(2, 4), torch.empty(2, 4), 8)


PROGRAM = """
import torch
from optune import kernels
from optune.models import fused
print(fused.swiglu(torch.ones(3), torch.ones(3)).sum().item())
print(kernels.describe())
"""


def start(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


UNUSABLE = """
import sys
from pathlib import Path
from optune.native import build
build.BUILT = Path(sys.argv[1])
(build.BUILT / build.BUILT_BY).write_text("another one")
(build.BUILT / build._name_built(build.find_level())).write_bytes(b"for another system")
import torch
from optune import kernels
print(kernels.is_ready(), kernels.describe())
"""


@pytest.mark.usefixtures("native")
def test_installed_kernels_that_cannot_be_loaded_are_compiled_here(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNUSABLE, str(tmp_path)], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.startswith("True native") and ", by " in done.stdout and "another one" not in done.stdout


@pytest.mark.slow
def test_without_a_compiler_torch_does_the_work_and_it_is_told(tmp_path: Path) -> None:
    for environment, why in [
        ({"OPTUNE_KERNELS": "0"}, "OPTUNE_KERNELS=0"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler: CXX=no-such-compiler not found"),
    ]:
        result, told = start(**environment, OPTUNE_CACHE=str(tmp_path))
        assert float(result) == pytest.approx(2.1931757)
        assert told == f"torch's ({why})"


def make_compiler(path: Path, says: str = "echo tiny 1.0") -> Path:
    """Stands for one: what it 'compiles' is empty, and it keeps a list of how it was called."""
    cases = f"*--version*) {says};; *library.so*) : > library.so;;"
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\ncase "$*" in {cases} esac\n')
    path.chmod(0o755)
    return path


def test_a_compiler_may_have_arguments_and_say_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path / "cache"))
    compiler = make_compiler(tmp_path / "wrapper", says=":")
    monkeypatch.setenv("CXX", f"{compiler} real -m64")
    assert build.make_kernels()[1] == "a compiler without a name"
    calls = Path(f"{compiler}.calls").read_text().splitlines()
    assert len(calls) == 5 and all(call.startswith("real -m64 ") for call in calls)
    make_compiler(compiler, says="printf 'na\\357me'")
    assert build.make_kernels()[1] == "na\ufffdme"
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(build.NoLibraryError, match="cannot be read"):
        build.make_kernels()


def test_installed_kernels_need_no_compiler_and_give_way_to_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built"
    built.mkdir()
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "BUILT", built)
    monkeypatch.setattr(build, "COMPILERS", [str(make_compiler(tmp_path / "c++"))])
    build.build(built, [build.find_level()])
    monkeypatch.setattr(build, "COMPILERS", [])
    path, made_by = build.make_kernels()
    assert path.parent == built and path.exists() and made_by == "tiny 1.0"
    with pytest.raises(build.NoLibraryError, match="no C\\+\\+ compiler"):
        build.make_kernels(anew=True)
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path / "other", says="echo other 2.0")))
    path, made_by = build.make_kernels()
    assert path.parent == tmp_path / "cache" / "kernels" and made_by == "other 2.0"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "KERNEL_FLAGS", [*build.KERNEL_FLAGS, "-g"])
    with pytest.raises(build.NoLibraryError, match="no C\\+\\+ compiler"):
        build.make_kernels()  # The installed ones were made otherwise.


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path / "c++")))
    path, _ = build.make_kernels()
    path.unlink()
    (path.parent / f"{path.stem}-left").mkdir()
    build.make_kernels()
    assert sorted(path.parent.iterdir()) == [path.with_suffix(".lock"), path]


UNWRITABLE = """
import threading
from optune.native import build
threads = [threading.Thread(target=build.make_kernels) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
path, _ = build.make_kernels()
print(path.exists(), path.parent)
"""


def test_without_a_cache_they_are_made_once_in_a_folder_that_ends_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    compiler = make_compiler(tmp_path / "c++")
    environment = {"OPTUNE_CACHE": str(tmp_path / "taken"), "TMPDIR": str(tmp_path), "CXX": str(compiler)}
    done = subprocess.run(
        [sys.executable, "-c", UNWRITABLE], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    exists, folder = done.stdout.split()
    assert exists == "True" and Path(folder).parent == tmp_path and not Path(folder).exists() and done.stderr == ""
    assert sum("library.so" in call for call in Path(f"{compiler}.calls").read_text().splitlines()) == 1


def test_a_compiler_that_fails_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo broken 1.0 && exit\necho 'error: no header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.NoLibraryError, match=r"c\+\+ cannot compile them: error: no header"):
        build.make_kernels()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_compiler_is_asked_for_its_version_once_for_both_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler(tmp_path / "c++", says="sleep 0.1; echo tiny 1.0")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path / "cache"))
    build.start_making()
    assert [build.make_memory()[1], build.make_kernels()[1]] == ["tiny 1.0", "tiny 1.0"]
    assert Path(f"{compiler}.calls").read_text().count("--version") == 1


@pytest.mark.usefixtures("native")
def test_they_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "BUILT", tmp_path / "none")
    build.start_making()
    path, _ = build.make_kernels()  # waits for the one in the background
    made = path.stat().st_mtime_ns
    assert build.make_kernels()[0] == path and path.stat().st_mtime_ns == made
    assert path.parent == tmp_path / "kernels"
    monkeypatch.setenv("OPTUNE_KERNELS", "0")
    with pytest.raises(build.NoLibraryError, match="OPTUNE_KERNELS=0"):
        build.make_kernels()
