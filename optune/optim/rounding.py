"""Stochastic rounding: bf16 weights that keep small updates without a lasting copy of higher precision.

An update smaller than half of bf16's spacing rounds away to nothing, every time that it comes. Rounded up or down by
chance, with the probability that its distance to either neighbour gives, it is right in the mean: E[round(x)] = x
(Gupta et al. 2015, arXiv 1502.02551; for training in bf16 alone: Zamirai et al. 2020, arXiv 2010.06192).

The optimizer holds a *transient* in place of each bf16 weight. While a part is stepped, its transients are fp32 copies
of the weights; the result is rounded into the weights, and the copies are given back. So the optimizer computes, and
keeps its state, in fp32.

The 16 random bits of an element are a pure function of (seed, step, parameter name, place in the whole parameter).
Neither the order in which parameters are updated, nor a resume, nor the number of processes or the kind of device
changes them. They come from a counter: the place is hashed with two keys, which are a digest of the rest. The hash is
Chris Wellons' 32-bit permutation of two multiplications (https://github.com/skeeto/hash-prospector), with one key
before it and one inside it; each of its values serves two neighbours.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optune.optim.kinds import local_part
from optune.shards import is_sharded, make_dtensor
from optune.shards.parts import Runs, runs_of, spans

STEP_KEY = "rounding_step"
"""The setting of each group that counts steps, so that a checkpoint keeps it."""
_CHUNK_ON_CPU = 2**17
_CHUNK = 2**24
"""Elements that are rounded at once: on a CPU as many as its caches hold, elsewhere as many as keep a device busy."""
_MOST_SPANS = 64


class Keys(NamedTuple):
    """Two 32-bit numbers, in torch's signed spelling."""

    first: int
    second: int


@dataclass(frozen=True)
class Rounding:
    """How the update of one parameter is rounded: what, beside the step, decides its random bits."""

    name: str
    seed: int

    def keys(self, step: int) -> Keys:
        digest = hashlib.sha256(f"{self.seed}/{step}/{self.name}".encode()).digest()
        return Keys(*(int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4)))


def make_transient(name: str, parameter: Tensor, seed: int) -> nn.Parameter:
    """What the optimizer holds in place of the bf16 `parameter`: of its shape and layout, in fp32, without memory."""
    values = _empty(local_part(parameter.detach()))
    if is_sharded(parameter):
        values = make_dtensor(values, parameter.device_mesh, parameter.placements, parameter.shape)
    made = nn.Parameter(values)
    made.rounding = Rounding(name, seed)  # pyright: ignore[reportAttributeAccessIssue]
    return made


def rounding_of(held: Tensor) -> Rounding | None:
    """How what the optimizer holds is rounded into its weight; None for a weight of its own, and for a master."""
    return getattr(held, "rounding", None)


@torch.no_grad()
def fill(held: Tensor, weight: Tensor) -> None:
    """Gives a transient the values of its weight, for the time of a step."""
    values = local_part(weight).to(torch.float32, memory_format=torch.contiguous_format)
    _inner(held).set_(values)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def settle(held: Tensor, weight: Tensor, step: int) -> None:
    """Rounds the values of a transient into its weight, and gives their memory back."""
    rounding = rounding_of(held)
    assert rounding is not None
    target = local_part(weight)
    rounded = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    values = _inner(held).view(-1)
    for first, bits in draw(weight, rounding.keys(step)):
        piece = values[first : first + len(bits)]
        round_(piece, bits)
        rounded.view(-1)[first : first + len(bits)] = piece
    if rounded is not target:
        target.copy_(rounded)
    empty(held)


@torch.no_grad()
def empty(held: Tensor) -> None:
    """Gives the memory of a transient back."""
    values = _inner(held)
    values.set_(_empty(values))  # pyright: ignore[reportArgumentType]


def _inner(held: Tensor) -> Tensor:
    """The tensor that holds the memory of a transient; `to_local` hands out another one over the same memory."""
    return held._local_tensor if is_sharded(held) else held


def _empty(tensor: Tensor) -> Tensor:
    """One zero, seen as a tensor of the given shape."""
    return tensor.new_zeros((), dtype=torch.float32).expand(tensor.shape)


def round_(values: Tensor, bits: Tensor) -> None:
    """Rounds fp32 `values` in place to numbers that bf16 has, by random `bits` (int16, of the same shape).

    Away from zero where the lower half of the number and the bits, both as 16-bit numbers, add up to more than 16 bits
    hold. Infinite values stay, and NaN stays NaN: the sum would carry into its sign.
    """
    # To look costs a tenth of what it costs to fill; on an accelerator it would make the host wait.
    has_nan = values.device.type != "cpu" or bool(values.amax().isnan())
    not_a_number = values.isnan() if has_nan else None
    words = values.view(torch.int32)
    words.add_(bits).add_(2**15).bitwise_and_(-(2**16))
    if not_a_number is not None:
        values.masked_fill_(not_a_number, torch.nan)


def draw(weight: Tensor, keys: Keys) -> Iterator[tuple[int, Tensor]]:
    """Random bits for what this process holds of `weight`: (first element, int16 bits of it and those after it)."""
    runs = runs_of(weight) if is_sharded(weight) else tuple(((0, length),) for length in weight.shape)
    return draw_at(weight.shape, runs, keys, weight.device)


def draw_at(
    shape: torch.Size, runs: tuple[Runs, ...], keys: Keys, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The same for the places at `runs`, see `optune.shards.parts`, of a tensor of `shape`."""
    chunk = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK
    stretches = list(itertools.islice(spans(shape, runs), _MOST_SPANS + 1))
    if len(stretches) > _MOST_SPANS:  # columns of a matrix
        yield from _draw_scattered(shape, runs, keys, device)
        return
    longest = max((count for _, count in stretches), default=0)
    counter = torch.arange(min(chunk, longest) // 2 + 1, dtype=torch.int32, device=device)
    done = 0
    for first, count in stretches:
        for at in range(first, first + count, chunk):
            bits = _bits(at, min(chunk, first + count - at), keys, counter)
            yield done, bits
            done += len(bits)


def _bits(first: int, count: int, keys: Keys, counter: Tensor) -> Tensor:
    """The bits of `count` places from `first` on; `counter` are the numbers from 0, as many as pairs have places."""
    start = first // 2
    hashed = counter[: (first + count + 1) // 2 - start] + _signed(start + keys.first)
    _mix_(hashed, keys.second)
    return hashed.view(torch.int16)[first - 2 * start :][:count]


def _draw_scattered(
    shape: torch.Size, runs: tuple[Runs, ...], keys: Keys, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The same bits for places that do not lie together."""
    strides = torch.empty(shape, device="meta").stride()
    held = [torch.cat([torch.arange(*run, device=device) for run in each]) for each in runs]
    inner = torch.zeros(1, dtype=torch.int64, device=device)
    for indices, stride in zip(held[1:], strides[1:], strict=True):
        inner = (inner[:, None] + indices * stride).flatten()
    rows = max(1, (_CHUNK_ON_CPU if device.type == "cpu" else _CHUNK) // len(inner))
    for at in range(0, len(held[0]), rows):
        places = (held[0][at : at + rows, None] * strides[0] + inner).flatten()
        hashed = (places // 2).to(torch.int32) + keys.first
        _mix_(hashed, keys.second)
        yield at * len(inner), hashed.view(torch.int16).view(-1, 2).gather(1, (places % 2)[:, None])[:, 0]


def _mix_(words: Tensor, key: int) -> None:
    """Replaces int32 numbers by their hashes. Shifts of signed numbers drag the sign along, hence the masks."""
    scratch = torch.empty_like(words)
    _fold_(words, 16, scratch)
    words.mul_(0x21F0AAAD)
    _fold_(words, 15, scratch)
    words.bitwise_xor_(key)
    words.mul_(_signed(0xD35A2D97))
    _fold_(words, 15, scratch)


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def _fold_(words: Tensor, shift: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(words, shift, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - shift) - 1))
