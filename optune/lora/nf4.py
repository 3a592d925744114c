"""Matrices in 4-bit NormalFloat with quantized scales: the format of QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

A matrix is read row after row in blocks of 64 weights. A block is divided by its largest magnitude, its *scale*, and
each weight becomes the number of the nearest of 16 values, quantiles of a normal distribution. The scales, less their
mean over the matrix, are quantized in turn: to 8-bit integers, in groups of 256 with an fp32 step each. That makes
4 + 8/64 + 32/(64·256) = 4.127 bits a weight.

Codes are those of torchao and bitsandbytes. torchao's own tensor (0.18) is not used: it wants a multiple of 256 blocks,
which many key projections are not, and keeps values and scales in the weight's dtype, so a bf16 weight is rounded
three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Weights that share a scale."""
GROUP = 256
"""Scales that share a step."""
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers of NF4, from appendix E of the paper."""

_AT_ONCE = {"cpu": 2**18}
"""Weights dequantized at a time: on CPUs as many as stay in the second-level cache."""
_AT_ONCE_ELSEWHERE = 2**24


class Packed(NamedTuple):
    """A matrix in NF4. Flat tensors, in the order of the matrix's rows; the last block is filled up with zeros.

    - `codes` uint8, two weights each, the first in the high bits;
    - `scales` int8, one a block; `steps` fp32, one a group; `mean` fp32, one element.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor
    mean: Tensor


def packed_sizes(numel: int) -> Packed:
    """Empty tensors on the meta device of the sizes that `numel` weights have."""
    blocks = math.ceil(numel / BLOCK)
    groups = math.ceil(blocks / GROUP)
    kinds = ((blocks * BLOCK // 2, torch.uint8), (blocks, torch.int8), (groups, torch.float32), (1, torch.float32))
    return Packed(*(torch.empty(size, dtype=dtype, device="meta") for size, dtype in kinds))


@torch.no_grad()
def quantize(weight: Tensor) -> Packed:
    """`weight`, of any floating dtype, in NF4 on its own device. Beside the result: a few MiB of fp32 at a time."""
    flat = weight.detach().reshape(-1)
    blocks = math.ceil(flat.numel() / BLOCK)
    codes = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(blocks, dtype=torch.float32, device=flat.device)
    midpoints = _values(flat.device)[:-1].lerp(_values(flat.device)[1:], 0.5)
    for first, last in _runs(blocks, 2**20 // BLOCK):
        part = flat[first * BLOCK : last * BLOCK].float()
        part = F.pad(part, (0, (last - first) * BLOCK - part.numel())).view(-1, BLOCK)
        largest = part.abs().amax(1)
        scales[first:last] = largest
        numbers = torch.bucketize(part / largest.where(largest > 0, 1)[:, None], midpoints).view(-1, 2)
        codes[first * BLOCK // 2 : last * BLOCK // 2] = numbers[:, 0] * 16 + numbers[:, 1]
    mean = scales.mean(dim=0, keepdim=True)
    groups = F.pad(scales - mean, (0, -blocks % GROUP)).view(-1, GROUP)
    steps = groups.abs().amax(1) / 127
    rounded = (groups / steps.where(steps > 0, 1)[:, None]).round().to(torch.int8)
    return Packed(codes, rounded.view(-1)[:blocks].clone(), steps, mean)


def dequantize(packed: Packed, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: value · scale in fp32, rounded once to `dtype`.

    Beside the result: about 12 bytes for each of the weights that are done at a time.
    """
    codes, device = packed.codes, packed.codes.device
    blocks = packed.scales.numel()
    steps = packed.steps.repeat_interleave(GROUP)[:blocks]
    scales = torch.addcmul(packed.mean, packed.scales.float(), steps)
    flat = torch.empty(blocks * BLOCK, dtype=dtype, device=device)
    pairs = _pairs(device)
    for first, last in _runs(blocks, _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE) // BLOCK):
        found = pairs.index_select(0, codes[first * BLOCK // 2 : last * BLOCK // 2].int())
        found = found.view(torch.float32).view(-1, BLOCK)
        flat[first * BLOCK : last * BLOCK].view(-1, BLOCK).copy_(found.mul_(scales[first:last, None]))
    return flat[: shape.numel()].view(shape)


def _runs(count: int, at_once: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + at_once, count)) for first in range(0, count, at_once))


def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


def _pairs(device: torch.device) -> Tensor:
    """The two weights of each byte of codes, side by side in the bits of one number: so they are found in one go."""
    values = _values(device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), 1).view(torch.int64).view(-1)
