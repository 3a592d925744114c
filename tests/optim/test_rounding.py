"""Stochastic rounding: right in the mean, by random numbers that only seed, step, name and place decide.

Judges: float64 arithmetic, torch's own splitting of tensors, and the fp32 run. Every seed is fixed, so bounds of five
standard deviations either hold or do not.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from optune import checkpoint, optim
from optune.errors import CheckpointError, ConfigError
from optune.optim.rounding import Rounding, _mix_, draw, draw_at, round_
from tests.checkpoint.test_shards_parts import MESH, runs_for, torch_splits
from tests.optim.small import SmallModel, assert_same, make_rows, run, snapshot
from tests.optim.test_equal_modes import EXACT, train

CPU = torch.device("cpu")


def bits_of(count: int, *, name: str = "weight", step: int = 0, seed: int = 0) -> Tensor:
    pieces = draw(torch.empty(count), Rounding(name, seed).keys(step))
    return torch.cat([bits for _, bits in pieces])


def round_values(values: Tensor, *, step: int = 0, name: str = "weight") -> Tensor:
    rounded = values.clone()
    round_(rounded, bits_of(values.numel(), name=name, step=step).view(values.shape))
    return rounded


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 numbers around each value, by float64 arithmetic: bf16 has 8 bits and no exponent below -126."""
    wide = values.double()
    exponent = torch.floor(torch.log2(wide.abs().clamp(min=2.0**-126)))
    spacing = torch.exp2(exponent - 7)
    return torch.floor(wide / spacing) * spacing, torch.ceil(wide / spacing) * spacing


def sample_values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-30, 30, (512,), generator=generator).float())
    some = torch.randn(512, generator=generator) * sizes
    return torch.cat([some, torch.tensor([1 + 2.0**-20, -1 - 2.0**-9, 3e-39, -1e-40, 1.99999, 255.7])])


def test_the_mean_is_the_value_itself() -> None:
    values, draws = sample_values(), 2000
    low, high = neighbours(values)
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(draws):
        rounded = round_values(values, step=step).double()
        assert ((rounded == low) | (rounded == high)).all()
        total += rounded
    share = (values.double() - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / draws).sqrt()
    distance = (total / draws - values.double()).abs()
    # 16 random bits: shares are multiples of 2^-16, of which fp32 values have no finer ones.
    assert (distance <= 5 * deviation).all(), (distance / deviation).max()
    z = ((total / draws - values.double()) / deviation).nan_to_num(0.0)
    assert 0.9 < z.std() < 1.1 and abs(z.mean()) < 0.2


def test_numbers_that_bf16_has_stay_and_what_is_not_finite_stays_so() -> None:
    exact = torch.cat([torch.randn(4096).bfloat16().float(), torch.tensor([0.0, 1.0, 3.3895e38]).bfloat16().float()])
    for step in range(20):
        assert torch.equal(round_values(exact, step=step), exact)
    words = torch.tensor([0x7F800000, 0xFF800000 - 2**32, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, -(2**31)])
    special = words.to(torch.int32).view(torch.float32).repeat(1000)
    rounded = round_values(special).view(1000, -1)
    assert (rounded[:, 0] == math.inf).all() and (rounded[:, 1] == -math.inf).all()
    assert rounded[:, 2:6].isnan().all()
    assert (rounded[:, 6] == 0).all() and torch.signbit(rounded[:, 6]).all()


def test_random_bits_are_uniform() -> None:
    bits = bits_of(2**20)
    for shift in range(0, 16, 4):  # every group of four bits, and all of the upper byte
        counts = torch.bincount(bits.int() >> shift & 15, minlength=16).double()
        chi = ((counts - 2**16) ** 2 / 2**16).sum()
        assert 15 - 5 * math.sqrt(30) < chi < 15 + 5 * math.sqrt(30)
    counts = torch.bincount(bits.int() + 2**15, minlength=2**16).double()
    chi, freedom = ((counts - 16) ** 2 / 16).sum(), 2**16 - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "other",
    [{"step": 1}, {"step": 2**20}, {"seed": 1}, {"name": "weights"}, {"name": "blocks.0.weight"}],
    ids=str,
)
def test_steps_seeds_names_and_neighbours_draw_independently(other: dict[str, Any]) -> None:
    count = 2**20
    first, second = bits_of(count).double() + 0.5, bits_of(count, **other).double() + 0.5
    variance = 2**32 / 12
    for shift in (0, 1, 2, 3, 576, 4096):
        for one, two in ((first, second), (first, first) if shift else (first, second)):
            rows = count - shift
            correlation = (one[:rows] * two[shift:]).mean() / variance
            assert abs(correlation) < 5 / math.sqrt(rows), shift
    # Neither stream is the other one shifted, as a single added key would make it.
    found = set(first[:64].tolist()) & set(second.tolist())
    assert len(found) <= 64 and not _contains(second, first[:8])


def _contains(stream: Tensor, pattern: Tensor) -> bool:
    starts = (stream[: len(stream) - len(pattern)] == pattern[0]).nonzero()[:, 0]
    return any(torch.equal(stream[start : start + len(pattern)], pattern) for start in starts.tolist())


def test_the_hash_is_the_published_permutation() -> None:
    words = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    keys = Rounding("weight", 0).keys(5)
    hashed = words.clone()
    _mix_(hashed, keys.second)

    def by_whole_numbers(word: int) -> int:
        word %= 2**32
        word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
        word = (word ^ word >> 15) ^ keys.second % 2**32
        word = word * 0xD35A2D97 % 2**32
        return word ^ word >> 15

    assert [value % 2**32 for value in hashed.tolist()] == [by_whole_numbers(word) for word in words.tolist()]


@pytest.mark.parametrize("shape", [(7,), (601, 40), (90, 7), (2, 130, 4), (13, 1), (0, 3)], ids=str)
def test_a_shard_draws_what_the_whole_parameter_draws_there(shape: tuple[int, ...]) -> None:
    keys = Rounding("weight", 0).keys(3)
    size = torch.Size(shape)
    whole = torch.zeros(size.numel(), dtype=torch.int16)
    for first, bits in draw(torch.empty(shape), keys):
        whole[first : first + len(bits)] = bits
    kinds: list[Any] = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=3)]
    for placements in itertools.product(kinds, repeat=2):
        if any(not placement.is_replicate() and placement.dim >= len(shape) for placement in placements):
            continue
        for coordinates in itertools.product(*map(range, MESH)):
            runs = runs_for(shape, placements, coordinates)
            pieces = [bits for _, bits in draw_at(size, runs, keys, CPU)]
            drawn = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int16)
            expected = torch_splits(whole.view(shape), placements, coordinates)
            assert torch.equal(drawn, expected.flatten()), (placements, coordinates)


SETTINGS: dict[str, Any] = {"dtype": torch.bfloat16, "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("optimizer", "clipping"),
    [
        ("sgd", "off"), ("momentum", "always_active"), ("adamw_loop", "never_active"), ("adamw_fused", "off"),
        ("adamw_fused", "always_active"), ("adafactor", "always_active"),
    ],
)  # fmt: skip
def test_every_mode_ends_bitwise_where_after_backward_ends(optimizer: str, clipping: str) -> None:
    settings = SETTINGS | {"optimizer": optimizer, "clipping": clipping}
    expected, losses, stats = train("after_backward", **settings)
    for stash in EXACT if clipping != "off" else ("auto",):
        got, got_losses, got_stats = train("in_backward", stash=stash, **settings)
        assert_same(expected, got)
        assert (losses, stats) == (got_losses, got_stats), stash


def test_checkpointing_and_tied_weights_change_nothing() -> None:
    for checkpointing in ("none", "block"):
        models = [SmallModel(blocks=2, tied=True, dropout=0.1) for _ in range(2)]
        settings = SETTINGS | {"clipping": "always_active", "checkpointing": checkpointing}
        expected, *_ = train("after_backward", model=models[0], **settings)
        got, *_ = train("in_backward", model=models[1], **settings)
        assert_same(expected, got)


def test_factored_differs_by_the_rounding_of_few_elements() -> None:
    expected, *_ = train("after_backward", clipping="always_active", optimizer="sgd", **SETTINGS)
    got, *_ = train("in_backward", stash="factored", clipping="always_active", optimizer="sgd", **SETTINGS)
    for key, value in expected.items():
        if key.startswith("weight"):
            assert (value != got[key]).double().mean() < 0.05, key
            assert torch.allclose(value.float(), got[key].float(), rtol=2**-6, atol=1e-3), key


def make_model(dtype: torch.dtype) -> SmallModel:
    """Weights near 1."""
    model = SmallModel(blocks=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((1 + 0.1 * parameter).bfloat16())
    return model.to(dtype)


def build(model: nn.Module, factory: Any = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    rounding = settings.pop("rounding", "stochastic")
    masters = settings.pop("masters", "none")
    seed = settings.pop("seed", 0)
    return optim.build_optimizer(
        model.named_parameters(), factory=factory, settings={"lr": 1e-5} | settings,
        master_weights=masters, update_rounding=rounding, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("when", ["after_backward", "in_backward", "immediate"])
@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.AdamW])
def test_updates_that_nearest_rounding_loses_add_up(when: str, factory: Any) -> None:
    """Half the spacing between 1 and 2 is 2^-8, an update 2^-16; the gradient is the same in every step."""
    steps, rate = 300, 2.0**-16
    moved = {}
    for rounding, dtype in (("nearest", torch.float32), ("nearest", torch.bfloat16), ("stochastic", torch.bfloat16)):
        layer = nn.Linear(64, 64, bias=False).to(dtype)
        nn.init.constant_(layer.weight, 1.5)
        optimizer = build(
            layer, factory, lr=rate, rounding=rounding, **({} if factory is torch.optim.SGD else {"weight_decay": 0.0})
        )
        stepper = optim.build_stepper(layer, optimizer, when=when)
        for _ in range(steps):
            with stepper.microbatch(True):
                layer(torch.ones(1, 64, dtype=dtype)).sum().backward()
            stepper.finish()
        moved[rounding, dtype] = layer.weight.detach().double() - 1.5
    exact, lost, kept = moved.values()
    way = steps * rate
    assert torch.allclose(exact, torch.tensor(-way, dtype=torch.float64), rtol=1e-3)
    assert (lost == 0).all()
    # A walk of jumps of 2^-7 with the right mean: each element has the variance of so many of them.
    deviation = math.sqrt(way * 2.0**-7 / exact.numel())
    assert abs(float(kept.mean()) + way) < 5 * deviation < 0.2 * way


def test_each_step_rounds_otherwise_a_skipped_one_too_and_the_seed_counts() -> None:
    model = make_model(torch.bfloat16)
    optimizer = build(model, lr=1e-4)
    stepper = optim.build_stepper(model, optimizer, max_grad_norm=1.0)
    rows = make_rows(2, [1])
    run(model, stepper, rows[:1])
    assert [group["rounding_step"] for group in optimizer.param_groups] == [1]
    with stepper.microbatch(True):
        (model(rows[1][0]).sum() * math.nan).backward()
    assert stepper.finish().skipped
    assert optimizer.param_groups[0]["rounding_step"] == 2
    ends = []
    for seed in (0, 1, 0):
        model = make_model(torch.bfloat16)
        optimizer = build(model, lr=1e-4, seed=seed)
        run(model, optim.build_stepper(model, optimizer), rows)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[1])


def test_state_is_fp32_and_no_copy_of_a_weight_lasts() -> None:
    model = make_model(torch.bfloat16)
    optimizer = build(model, torch.optim.AdamW)
    stepper = optim.build_stepper(model, optimizer, when="in_backward", max_grad_norm=1.0)
    for _ in range(2):
        run(model, stepper, make_rows(1, [1]))
        for group in optimizer.param_groups:
            for held in group["params"]:
                assert held.untyped_storage().nbytes() <= 4 and held.grad is None
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert states and {value.dtype for value in states} == {torch.float32}
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    assert optim.named_masters(model.named_parameters(), optimizer) == {}
    assert optim.warn_lost_updates(model.named_parameters(), optimizer) is None


def test_fp32_parameters_among_bf16_ones_are_stepped_as_ever() -> None:
    model = make_model(torch.float32)
    model.blocks.to(torch.bfloat16)
    optimizer = build(model, lr=0.1)
    own = dict(model.named_parameters())
    held = optim.named_optimizer_parameters(optimizer)
    assert all((held[name] is own[name]) == (not name.startswith("blocks")) for name in own)


@pytest.mark.parametrize(
    ("dtype", "settings", "words"),
    [
        (torch.bfloat16, {"masters": "fp32"}, "model.update_rounding: stochastic has nothing to round with"),
        (torch.float32, {}, "model.update_rounding: stochastic rounds bf16 weights, and every weight .* is fp32"),
        (torch.float16, {}, "model.update_rounding: stochastic rounds to bf16, not to float16"),
        (torch.bfloat16, {"rounding": "up"}, "model.update_rounding: 'up' is neither nearest nor stochastic"),
    ],
)
def test_what_it_cannot_be_is_refused(dtype: torch.dtype, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(make_model(dtype), **settings)


def test_an_optimizer_that_cannot_be_divided_is_stepped_whole_after_backward() -> None:
    class Centred(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            size = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient /= size
            return super().step(closure)

    model = make_model(torch.bfloat16)
    before = snapshot(model, build(model))
    stepper = optim.build_stepper(model, build(model, Centred, lr=1.0))
    assert "one update of all parameters" in stepper.describe()
    run(model, stepper, make_rows(1, [1]))
    moved = sum(
        float((p.detach() - before[f"weight {n}"]).double().square().sum()) for n, p in model.named_parameters()
    )
    assert math.sqrt(moved) == pytest.approx(1.0, abs=0.1)


def test_torchaos_own_rounding_is_taken_as_this_one_and_draws_nothing() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    ends = []
    for settings in ({"bf16_stochastic_round": True, "rounding": "nearest"}, {"rounding": "stochastic"}):
        layer = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        nn.init.constant_(layer.weight, 1.5)
        optimizer = build(layer, low_bit.AdamW8bit, lr=1e-3, **settings)
        stepper = optim.build_stepper(layer, optimizer)
        state = torch.get_rng_state()
        with torch.compiler.set_stance("force_eager"), stepper.microbatch(True):
            layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            stepper.finish()
        assert torch.equal(torch.get_rng_state(), state)
        ends.append(layer.weight.detach())
    assert torch.equal(*ends)
    assert len(ends[0].unique()) == 2


def test_a_checkpoint_keeps_the_count_of_steps_and_tells_rounding_apart(tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    optimizer = build(model, torch.optim.AdamW)
    run(model, optim.build_stepper(model, optimizer), make_rows(3, [1]))
    saved = checkpoint.save(
        tmp_path,
        step=3,
        write_model=lambda folder: (folder / "weights").write_text("elsewhere"),
        optimizer=optimizer,
        named_parameters=model.named_parameters(),
        progress={},
    )
    assert not [name for name in load_file(saved / "optune/optimizer.safetensors") if name.endswith("master")]
    fresh = build(model, torch.optim.AdamW)
    checkpoint.load_optimizer(fresh, model.named_parameters(), saved)
    assert fresh.param_groups[0]["rounding_step"] == 3
    assert_same(snapshot(model, optimizer), snapshot(model, fresh))
    nearest = build(model, torch.optim.AdamW, rounding="nearest")
    with pytest.raises(CheckpointError, match="were rounded stochastically, the run rounds 0"):
        checkpoint.load_optimizer(nearest, model.named_parameters(), saved)
