"""Rotary position embeddings: every scaling of the Llama line, read from `config.json` and turned into cos/sin tables.

Formulas and their order of rounding follow transformers (`modeling_rope_utils.py`), the judge in the tests.
Papers: RoPE 2104.09864, YaRN 2309.00071, LongRoPE 2402.13753; `linear` and `dynamic` come from the NTK posts of 2023,
`llama3` from Meta's Llama 3.1 release.

Shapes: B rows, T positions, F = head_dim / 2 frequencies, H = head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optune import kernels

_EVERYWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# What each scaling must and may be told. Any other key is refused: it would be read by nobody.
REQUIRED = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
OPTIONAL = {
    "default": {"original_max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "dynamic": set(),
    "llama3": {"original_max_position_embeddings"},
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    },
    "longrope": {"original_max_position_embeddings", "attention_factor", "factor"},
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """The rotation of one model. `original_length` and `max_length` are tokens; factors are plain numbers."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    max_length: int = 2048
    original_length: int = 2048
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def needs_lengths(self) -> bool:
        """Whether the frequencies depend on how long the sequence is."""
        return self.kind in ("dynamic", "longrope")


def inverse_frequencies(rope: Rope, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Radians per position: shape (F), or `lengths.shape` + (F) where they depend on the length of the sequence."""
    exponents_F = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    if rope.kind == "dynamic":
        assert lengths is not None
        return 1.0 / _dynamic_theta(rope, lengths)[..., None] ** exponents_F
    if rope.kind == "longrope":
        assert lengths is not None
        long_F, short_F = (torch.tensor(f, device=device) for f in (rope.long_factor, rope.short_factor))
        is_long = (lengths > rope.original_length)[..., None]
        return 1.0 / (torch.where(is_long, long_F, short_F) * rope.theta**exponents_F)
    if rope.kind == "yarn":
        return _yarn(rope, rope.theta**exponents_F)
    inverse_F = 1.0 / rope.theta**exponents_F
    if rope.kind == "linear":
        return inverse_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse_F)
    return inverse_F


def tables(rope: Rope, positions_BT: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape (B, T, 1, H), computed in float32 and rounded once to `dtype`.

    The first half of sin is negated, so that a rotation is `x * cos + swap_halves(x) * sin`. `lengths`, broadcastable
    to (B, T), is the length of the sequence that a position belongs to; see `Rope.needs_lengths`.
    """
    angles_BTF = positions_BT[..., None].float() * inverse_frequencies(rope, lengths, positions_BT.device)
    cos_BTF = (angles_BTF.cos() * rope.attention_factor).to(dtype)
    sin_BTF = (angles_BTF.sin() * rope.attention_factor).to(dtype)
    return torch.cat((cos_BTF, cos_BTF), dim=-1)[:, :, None], torch.cat((-sin_BTF, sin_BTF), dim=-1)[:, :, None]


def rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys by `tables`."""
    if kernels.covers(x_BTNH) if torch.compiler.is_compiling() else kernels.find(x_BTNH, cos, sin):
        return torch.ops.optune.rotate(x_BTNH, cos, sin, False)
    first, second = x_BTNH.chunk(2, dim=-1)
    return x_BTNH * cos + torch.cat((second, first), dim=-1) * sin


@torch.library.custom_op("optune::rotate", mutates_args=())
def _rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    out_BTNH = torch.empty_like(x_BTNH, memory_format=torch.contiguous_format)
    rows, length, heads, width = x_BTNH.shape
    native = kernels.find(x_BTNH, cos, sin)
    assert native is not None
    inputs = (tensor.contiguous() for tensor in (x_BTNH, cos, sin))
    native.rotate(*inputs, out_BTNH, rows * length, len(cos) * length, heads, width, int(transposed))
    return out_BTNH


@_rotate.register_fake
def _(x_BTNH: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    return torch.empty_like(x_BTNH, memory_format=torch.contiguous_format)


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.transposed = inputs
    ctx.save_for_backward(*tables)


def _rotate_back(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.optune.rotate(grad_BTNH, *ctx.saved_tensors, not ctx.transposed), None, None, None


_rotate.register_autograd(_rotate_back, setup_context=_keep_tables)


def _dynamic_theta(rope: Rope, lengths: Tensor) -> Tensor:
    grown = (rope.factor * lengths / rope.max_length) - (rope.factor - 1)
    theta = rope.theta * grown ** (rope.dim / (rope.dim - 2))
    return torch.where(lengths > rope.max_length, theta, rope.theta)


def _llama3(rope: Rope, inverse_F: Tensor) -> Tensor:
    wavelength_F = 2 * math.pi / inverse_F
    longest, shortest = rope.original_length / rope.low_freq_factor, rope.original_length / rope.high_freq_factor
    scaled_F = torch.where(wavelength_F > longest, inverse_F / rope.factor, inverse_F)
    smooth_F = (rope.original_length / wavelength_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend_F = (1 - smooth_F) * scaled_F / rope.factor + smooth_F * scaled_F
    return torch.where((wavelength_F >= shortest) & (wavelength_F <= longest), blend_F, scaled_F)


def _yarn(rope: Rope, wave_F: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # No division by zero.
    ramp_F = torch.arange(rope.dim // 2, dtype=torch.float32, device=wave_F.device)
    keep_F = 1 - ((ramp_F - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wave_F) * (1 - keep_F) + 1.0 / wave_F * keep_F


def read_rope(raw: Mapping[str, Any], *, head_dim: int, max_length: int) -> tuple[Rope | None, list[str]]:
    """The rotation that a `config.json` asks for, in its old (`rope_scaling`) or new (`rope_parameters`) spelling.

    Returns the rotation, or None with everything that is wrong.
    """
    problems: list[str] = []
    settings = _merge_spellings(raw, problems)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in REQUIRED:
        problems.append(f"rope_type is {kind!r}; known are {', '.join(REQUIRED)}")
        return None, problems
    if settings.get("type") not in (None, kind):
        problems.append(f"rope_type is {kind!r} and its old spelling, type, is {settings['type']!r}; they must agree")
    if settings.get("partial_rotary_factor") not in (None, 1):
        problems.append(
            f"partial_rotary_factor is {settings['partial_rotary_factor']!r}; only whole heads are rotated (1.0)"
        )
    allowed = _EVERYWHERE | REQUIRED[kind] | OPTIONAL[kind]
    given = {key for key, value in settings.items() if value is not None}
    problems += [
        f"RoPE setting {key} = {settings[key]!r} is not one that {kind!r} reads" for key in sorted(given - allowed)
    ]
    # In YaRN a null factor means: as the two lengths say.
    needed = REQUIRED[kind] - (set(settings) & {"factor"} if kind == "yarn" else set())
    problems += [f"RoPE setting {key} is missing; {kind!r} needs it" for key in sorted(needed - given)]
    if kind == "dynamic" and head_dim < 4:
        problems.append(f"head_dim is {head_dim}; dynamic RoPE needs at least 4")
    for key in sorted(given & allowed - {"rope_type", "type", "partial_rotary_factor"}):
        if rule := _broken_rule(key, settings[key], head_dim):
            problems.append(f"RoPE setting {key} is {settings[key]!r}; {rule}")
    if not problems and kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        problems.append(
            f"RoPE setting high_freq_factor is {settings['high_freq_factor']!r}; it must exceed low_freq_factor"
        )
    return (None, problems) if problems else (_build(kind, settings, head_dim, max_length), [])


def _merge_spellings(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        part = raw.get(name)
        if part is not None and not isinstance(part, Mapping):
            problems.append(f"{name} is {part!r}; it must be a mapping")
            continue
        _merge(found, part or {}, name, problems)
    outside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    _merge(found, {key: raw[key] for key in outside if raw.get(key) is not None}, "config.json", problems)
    return found


def _merge(found: dict[str, Any], part: Mapping[str, Any], name: str, problems: list[str]) -> None:
    for key, value in part.items():
        if found.get(key) is not None and value is not None and found[key] != value:
            problems.append(f"{key} is {found[key]!r} in one place and {value!r} in {name}; they must agree")
        if found.get(key) is None:
            found[key] = value


def _broken_rule(key: str, value: Any, head_dim: int) -> str | None:
    """What a setting must be, where it is not that."""
    if key == "truncate":
        return None if isinstance(value, bool) else "it must be true or false"
    if key in ("short_factor", "long_factor"):
        fits = isinstance(value, list) and len(value) == head_dim // 2 and all(map(_is_positive, value))
        return None if fits else f"it must be a list of {head_dim // 2} positive numbers"
    may_be_zero = key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    return None if _is_positive(value) or (may_be_zero and value == 0) else "it must be a positive number"


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _build(kind: str, settings: Mapping[str, Any], head_dim: int, max_length: int) -> Rope:
    def number(key: str, default: float) -> float:
        return default if settings.get(key) is None else float(settings[key])

    original = int(number("original_max_position_embeddings", max_length))
    # Without a factor, YaRN and LongRoPE go by the two lengths, as Phi-3 and DeepSeek files do.
    factor = number("factor", max_length / original if kind in ("yarn", "longrope") else 1.0)
    return Rope(
        dim=head_dim,
        theta=number("rope_theta", 10000.0),
        kind=kind,
        factor=factor,
        max_length=max_length,
        original_length=original,
        attention_factor=_attention_factor(kind, settings, factor, original),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0) or 32.0,
        beta_slow=number("beta_slow", 1.0) or 1.0,
        truncate=bool(settings.get("truncate", True)),
        short_factor=tuple(float(f) for f in settings.get("short_factor") or ()),
        long_factor=tuple(float(f) for f in settings.get("long_factor") or ()),
    )


def _attention_factor(kind: str, settings: Mapping[str, Any], factor: float, original: int) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if kind == "longrope" and factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if kind != "yarn":
        return 1.0

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    top, bottom = settings.get("mscale"), settings.get("mscale_all_dim")
    return mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)
