from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from optune import lora
from optune.lora import nf4, operations


def adapted(dtype: torch.dtype = torch.float32, **settings: float | bool) -> lora.LoraLinear:
    torch.manual_seed(0)
    options = {"rank": 4, "alpha": 8, "dropout": 0.0, "use_rslora": False} | settings
    layer = lora.LoraLinear(nn.Linear(16, 12).to(dtype), dtype=torch.float32, **options)  # type: ignore[arg-type]
    nn.init.normal_(layer.lora_B.weight)
    return layer.requires_grad_(False)


def trained(layer: lora.LoraLinear) -> lora.LoraLinear:
    layer.lora_A.requires_grad_(True)
    layer.lora_B.requires_grad_(True)
    return layer


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_output_is_base_plus_scaled_low_rank_product(use_rslora: bool, scale: float) -> None:
    layer = adapted(use_rslora=use_rslora)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    weight, bias = layer.weight.double(), layer.bias.double()  # type: ignore[union-attr]
    wanted = x @ weight.T + bias + scale * (x @ layer.lora_A.weight.double().T @ layer.lora_B.weight.double().T)
    torch.testing.assert_close(layer(x.float()).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_equal_those_of_a_float64_chain(dropout: float) -> None:
    layer = trained(adapted(dropout=dropout)).double()
    layer.lora_A.double(), layer.lora_B.double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)  # the same mask at every evaluation
        layer.lora_A.weight.data.copy_(a.detach())
        return torch.func.functional_call(layer, {"lora_A.weight": a, "lora_B.weight": b}, (x,))

    a, b = (w.detach().clone().requires_grad_() for w in (layer.lora_A.weight, layer.lora_B.weight))
    assert torch.autograd.gradcheck(run, (x, a, b))


def test_an_fp32_adapter_over_a_bf16_base_is_exact_but_for_bf16_s_rounding_and_has_fp32_gradients() -> None:
    """Against float64: each of the roundings (base, hidden, A, B, sum) is of half a unit in bf16's eighth bit."""
    layer = trained(adapted(torch.bfloat16))
    x = torch.randn(64, 16).bfloat16().requires_grad_()
    direction = torch.randn(64, 12).bfloat16()
    a, b, w = (t.detach().double() for t in (layer.lora_A.weight, layer.lora_B.weight, layer.weight))
    output = layer(x)
    output.backward(direction)
    assert output.dtype == torch.bfloat16 and x.grad is not None
    rows, out = x.detach().double(), direction.double()
    sizes = rows.abs() @ w.abs().T + layer.scale * (rows.abs() @ a.abs().T @ b.abs().T)
    wanted = rows @ w.T + layer.bias.double() + layer.scale * (rows @ a.T @ b.T)  # type: ignore[union-attr]
    assert ((output.double() - wanted).abs() <= 2**-8 * (sizes + wanted.abs())).all()
    pairs = [
        (x.grad, out @ w + layer.scale * (out @ b @ a), out.abs() @ (w.abs() + layer.scale * b.abs() @ a.abs())),
        (
            layer.lora_A.weight.grad,
            layer.scale * (out @ b).T @ rows,
            layer.scale * (out.abs() @ b.abs()).T @ rows.abs(),
        ),
        (
            layer.lora_B.weight.grad,
            layer.scale * out.T @ (rows @ a.T),
            layer.scale * out.abs().T @ (rows.abs() @ a.abs().T),
        ),
    ]
    for grad, wanted, sizes in pairs:
        assert grad is not None
        assert ((grad.double() - wanted).abs() <= 2**-7 * sizes).all()
    assert layer.lora_A.weight.grad.dtype == layer.lora_B.weight.grad.dtype == torch.float32  # type: ignore


def test_frozen_base_keeps_one_copy_of_the_input_for_all_layers_that_read_it() -> None:
    """Autograd holds the input as it came, once, and nothing of a size of out_features."""
    layers = [trained(adapted(torch.bfloat16)) for _ in range(3)]
    x = torch.randn(64, 16).bfloat16().requires_grad_()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    parameters = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
    activations = sum(size for pointer, size in saved.items() if pointer not in parameters)
    assert activations == x.untyped_storage().nbytes() + 3 * 64 * 4 * 2  # x, and 3 hidden of rank 4
    assert outputs[0].requires_grad


def test_dropout_is_torchs_own_draw() -> None:
    """The mask that nn.Dropout would draw from the same seed, on the adapter's input alone."""
    layer = adapted(dropout=0.3)
    x = torch.randn(4, 9, 16)
    torch.manual_seed(7)
    dropped = torch.nn.functional.dropout(x, 0.3)
    wanted = layer.eval()(x) + layer.scale * ((dropped - x) @ layer.lora_A.weight.T @ layer.lora_B.weight.T)
    torch.manual_seed(7)
    torch.testing.assert_close(layer.train()(x), wanted, rtol=1e-5, atol=1e-5)


def test_a_function_mode_sees_plain_linear_layers_with_the_same_result() -> None:
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if any(isinstance(argument, nn.Parameter) for argument in args):
                seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    layer = trained(adapted())
    x = torch.randn(5, 16)
    with Watch():
        watched = layer(x)
    assert [name for name in seen if name not in ("dtype", "__get__")] == ["linear"] * 3
    torch.testing.assert_close(watched, layer(x), rtol=1e-6, atol=1e-6)


class NormAndThreeLayers(nn.Module):
    """As in attention: several adapted layers read what a norm makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 12, bias=bias) for bias in (True, False, False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.cat([torch.nn.functional.silu(layer(x)) for layer in self.layers], -1)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_layers_equal_eager_ones(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    import torch._inductor.config as inductor

    torch.manual_seed(0)
    block = NormAndThreeLayers()
    lora.apply(block, rank=4, alpha=8, dropout=dropout, targets="all-linear")
    for layer in lora.layers(block).values():
        nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(3, 5, 16)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(4)
        block.zero_grad()
        output = block(x * 1)
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in lora.trainable(block).values() if p.grad is not None)]

    # The draw that compiled code makes, from eager torch's generator in both.
    monkeypatch.setattr("optune.lora.layer.draw_keep", lambda x, share: torch.rand_like(x, dtype=torch.float32) < share)
    eager = gradients()
    monkeypatch.undo()
    with inductor.patch(fallback_random=True):
        block.compile(fullgraph=True)
        compiled = gradients()
    assert len(eager) == 7
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_torch_finds_nothing_to_object_to_in_the_operations(dtype: torch.dtype, packed: bool, dropout: float) -> None:
    """torch's own check of custom operations: schema, shapes and strides on fake tensors, no output shares an input."""
    layer = trained(adapted(dtype, dropout=dropout))
    weight = (layer.weight,) if not packed else nf4.quantize(layer.weight)
    x, shape, scale = torch.randn(2, 5, 16).to(dtype), list(layer.weight.shape), layer.scale
    keep = torch.rand(2, 5, 16) > dropout if dropout else None
    down, up = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
    tests = ("test_schema", "test_faketensor")
    frozen = [part.detach() for part in weight]
    forward = (x, frozen, shape, layer.bias, down, up, keep, scale)
    torch.library.opcheck(operations._lora_forward, forward, test_utils=tests)
    output, hidden = operations._lora_forward(*forward)
    for needs_input, needs_adapter in ((True, True), (False, True), (True, False)):
        backward = (output, x, frozen, shape, down, up, keep, hidden, scale, needs_input, needs_adapter)
        torch.library.opcheck(operations._lora_backward, backward, test_utils=tests)
    torch.library.opcheck(operations._frozen_forward, (x, frozen, shape, layer.bias), test_utils=tests)
    torch.library.opcheck(operations._frozen_backward, (output, frozen, shape), test_utils=tests)
