"""The 4-bit format. Judges: torchao's NF4 tensor, and a slow reference that follows the paper one weight at a time."""

from __future__ import annotations

import statistics

import pytest
import torch
from torchao.quantization import to_nf4

from optune.lora import nf4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.03


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def test_the_values_are_quantiles_of_a_normal_distribution() -> None:
    """Section 3 of the paper, with the offset of its own code: 8 quantiles above zero, 7 below, and zero."""
    cut = statistics.NormalDist().inv_cdf
    offset = 0.9677083
    above = [cut(offset - (offset - 0.5) * i / 8) for i in range(8)]
    below = [-cut(offset - (offset - 0.5) * i / 7) for i in range(7)]
    wanted = sorted([*above, 0.0, *below])
    assert [value / max(wanted) for value in wanted] == pytest.approx(nf4.VALUES, abs=2e-6)


@pytest.mark.parametrize("shape", [(256, 64), (3, 7), (192, 576), (1, 1)], ids=str)
def test_codes_and_values_are_those_of_a_slow_reference(shape: tuple[int, int]) -> None:
    """Shapes that fill neither a block nor a group among them."""
    weight = normal(*shape) + normal(shape[0], 1, seed=1)
    packed = nf4.quantize(weight)
    flat = [float(value) for value in weight.flatten()]
    blocks = [flat[first : first + 64] for first in range(0, len(flat), 64)]
    scales = [max(map(abs, block)) for block in blocks]
    mean = sum(scales) / len(scales)
    wanted = []
    for index, block in enumerate(blocks):
        group = [scale - mean for scale in scales[index // 256 * 256 : index // 256 * 256 + 256]]
        step = max(map(abs, group)) / 127
        scale = mean + (round((scales[index] - mean) / step) * step if step else 0.0)
        for value in block:
            nearest = min(nf4.VALUES, key=lambda each: abs(each - value / scales[index]))
            wanted.append(nearest * scale)
    found = nf4.dequantize(packed, weight.shape, torch.float32)
    assert found.shape == weight.shape
    torch.testing.assert_close(found.flatten(), torch.tensor(wanted), rtol=1e-4, atol=1e-7)


def test_codes_are_torchaos_and_the_error_is_no_larger() -> None:
    weight = normal(512, 1024)
    packed, judge = nf4.quantize(weight), to_nf4(weight)
    # Its table has four digits, so weights half way between two values may fall to either side.
    assert (packed.codes != judge.quantized_data).float().mean() < 1e-3
    ours = nf4.dequantize(packed, weight.shape, torch.float32)
    theirs = judge.get_original_weight()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.3 * weight.abs().max().item())
    assert relative_error(ours, theirs) < 0.01
    assert relative_error(ours, weight) <= 1.001 * relative_error(theirs, weight)
    assert relative_error(ours, weight) == pytest.approx(0.092, abs=0.003)


def test_bf16_weights_are_rounded_once_where_torchaos_are_three_times() -> None:
    weight = normal(512, 1024).bfloat16()
    ours = nf4.dequantize(nf4.quantize(weight), weight.shape, torch.float32)
    once = nf4.dequantize(nf4.quantize(weight), weight.shape, torch.bfloat16)
    assert torch.equal(once, ours.bfloat16())
    theirs = to_nf4(weight).get_original_weight()
    assert relative_error(once.float(), weight.float()) < relative_error(theirs.float(), weight.float())


def test_a_weight_takes_4_127_bits() -> None:
    packed = nf4.quantize(normal(1024, 1024))
    bits = 8 * sum(part.nbytes for part in packed) / 1024**2
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)
    for part, size in zip(packed, nf4.packed_sizes(1024**2), strict=True):
        assert (part.shape, part.dtype) == (size.shape, size.dtype)


def test_blocks_of_zeros_and_equal_scales_stay_exact() -> None:
    weight = torch.zeros(4, 64)
    weight[1] = 0.25
    weight[3, ::2] = -0.25
    found = nf4.dequantize(nf4.quantize(weight), weight.shape, torch.float32)
    torch.testing.assert_close(found, weight, rtol=0, atol=2e-3)
    assert torch.equal(
        nf4.dequantize(nf4.quantize(torch.zeros(2, 64)), torch.Size((2, 64)), torch.float32), weight[:2] * 0
    )
    same = torch.full((256, 64), 0.5)
    assert torch.equal(nf4.dequantize(nf4.quantize(same), same.shape, torch.float32), same)
