"""The same run in every mode: weights, optimizer state, losses and norms of in_backward are those of after_backward.

The product of optimizer, clipping, accumulation and activation checkpointing is whole. The stash policies rotate
through it so that each of them meets each value of every other axis, and each pair of values of two other axes is met
by at least two policies; `test_policies_meet_every_value` holds that.

Dropout is on, the rate follows warm-up and cosine, parameter groups have rates of their own, one parameter is used by
some microbatches only, and rows per microbatch differ: a run in which little is the same from step to step.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch

from optune import optim
from tests.optim.small import LENGTH, SmallModel, assert_same, loss_sum, make_rows, run, snapshot

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw_loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}
CLIPPING = {"off": None, "never_active": 1e6, "always_active": 1e-2}
ACCUMULATION = {"1": [1], "4": [4], "ragged": [4, 4, 2]}
GROUPS = [{"match": "*norm*", "lr": 3e-3, "weight_decay": 0.0}, {"match": r"re:blocks\.0\.[kv]\.", "lr": 2e-2}]
STEPS = 4
EXACT = ("hold", "cpu", "two_pass", "auto")


def train(
    when: str,
    *,
    optimizer: str = "adamw_fused",
    clipping: str = "off",
    accumulation: str = "ragged",
    checkpointing: str = "none",
    stash: str = "auto",
    dtype: torch.dtype = torch.float32,
    masters: str = "none",
    rounding: str = "nearest",
    model: SmallModel | None = None,
    **settings: Any,
) -> tuple[dict[str, Any], list[float], list[Any]]:
    factory, keywords = OPTIMIZERS[optimizer]
    model = model or SmallModel(blocks=2, dropout=0.1)
    model = model.to(dtype)
    model.activation_checkpointing = checkpointing
    built = optim.build_optimizer(
        model.named_parameters(),
        factory=factory,
        settings=keywords,
        parameter_groups=GROUPS,
        master_weights=masters,
        update_rounding=rounding,
    )
    stepper = optim.build_stepper(model, built, when=when, stash=stash, max_grad_norm=CLIPPING[clipping], **settings)
    schedule = optim.build_schedule(name="cosine", total_steps=STEPS, warmup_steps=2, min_lr_ratio=0.1)
    rows = make_rows(STEPS, ACCUMULATION[accumulation])
    # The last microbatch of each other step is longer and uses a parameter that the others do not.
    rows = [[*step[:-1], _lengthen(step[-1], 2 * (index % 2))] for index, step in enumerate(rows)]
    losses, stats = run(
        model, stepper, rows, before_step=lambda step: optim.set_learning_rate(built, schedule, step), loss=loss_sum
    )
    stepper.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    return snapshot(model, built), losses, stats


def _lengthen(tokens: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.cat([tokens, tokens], dim=1)[:, : LENGTH + extra]


AXES = list(itertools.product(OPTIMIZERS, CLIPPING, ACCUMULATION, ["none", "block"]))
SIZES = (len(OPTIMIZERS), len(CLIPPING), len(ACCUMULATION), 2)


def choose_policy(cell: tuple[str, ...]) -> str:
    """The policy of a cell of the product: the coordinates' sum, with weights under which no two axes move together."""
    positions = [
        index // math.prod(SIZES[axis + 1 :]) % SIZES[axis] for axis in range(4) for index in [AXES.index(cell)]
    ]
    return EXACT[sum(weight * position for weight, position in zip((1, 3, 2, 2), positions, strict=True)) % len(EXACT)]


def test_policies_meet_every_value() -> None:
    clipped = [cell for cell in AXES if cell[1] != "off"]
    for axis in range(4):
        for value in {cell[axis] for cell in clipped}:
            assert {choose_policy(cell) for cell in clipped if cell[axis] == value} == set(EXACT)
    for first, second in itertools.combinations(range(4), 2):
        for pair in {(cell[first], cell[second]) for cell in clipped}:
            met = {choose_policy(cell) for cell in clipped if (cell[first], cell[second]) == pair}
            assert len(met) >= 2, pair


@pytest.mark.parametrize("cell", AXES, ids="-".join)
def test_in_backward_ends_bitwise_where_after_backward_ends(cell: tuple[str, ...]) -> None:
    axes = dict(zip(("optimizer", "clipping", "accumulation", "checkpointing"), cell, strict=True))
    expected, losses, stats = train("after_backward", **axes)
    factors = [entry.clip_factor for entry in stats]
    assert all(factor < 1 for factor in factors) == (axes["clipping"] == "always_active")
    assert all(factor == 1 for factor in factors) == (axes["clipping"] != "always_active")
    got, got_losses, got_stats = train("in_backward", stash=choose_policy(cell), **axes)
    assert_same(expected, got)
    assert (losses, stats) == (got_losses, got_stats)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw_loop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("clipping", ["never_active", "always_active"])
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_factored_equals_after_backward_to_rounding(
    optimizer: str, clipping: str, accumulation: str, checkpointing: str
) -> None:
    # In float64 the factors' own rounding is far below the bound; in fp32 Adam blows up the rounding of tiny gradients.
    axes = {
        "optimizer": optimizer,
        "clipping": clipping,
        "accumulation": accumulation,
        "checkpointing": checkpointing,
        "dtype": torch.float64,
    }
    expected, losses, stats = train("after_backward", **axes)
    got, got_losses, got_stats = train("in_backward", stash="factored", **axes)
    assert_same(expected, got, rtol=1e-6)
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert [s.grad_norm for s in got_stats] == pytest.approx([s.grad_norm for s in stats], rel=1e-6)


def test_factored_equals_after_backward_in_fp32() -> None:
    expected, losses, _ = train("after_backward", optimizer="sgd", clipping="always_active")
    got, got_losses, _ = train("in_backward", optimizer="sgd", clipping="always_active", stash="factored")
    assert_same(expected, got, rtol=1e-6)
    assert got_losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw_fused", "adafactor"])
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_bf16_with_masters_is_bitwise_equal_in_every_mode(optimizer: str, clipping: str, checkpointing: str) -> None:
    axes = {
        "optimizer": optimizer,
        "clipping": clipping,
        "checkpointing": checkpointing,
        "dtype": torch.bfloat16,
        "masters": "fp32",
    }
    expected, losses, stats = train("after_backward", **axes)
    for stash in (*EXACT, "alias") if clipping != "off" else ("auto",):
        got, got_losses, got_stats = train("in_backward", stash=stash, **axes)
        assert_same(expected, got)
        assert losses == got_losses, stash
        assert stats == got_stats, stash


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize(
    ("tied", "frozen"), [(True, ()), (False, ("embed",)), (False, ("blocks.1", "head")), (True, ("blocks.1",))]
)
def test_tied_and_frozen_parameters_are_bitwise_equal(clipping: str, tied: bool, frozen: tuple[str, ...]) -> None:
    def make() -> SmallModel:
        return SmallModel(blocks=2, tied=tied, frozen=frozen, dropout=0.1)

    untouched = dict(make().named_parameters())
    expected, losses, stats = train("after_backward", clipping=clipping, model=make())
    for name, parameter in untouched.items():
        is_same = torch.equal(parameter, expected[f"weight {name}"])
        assert is_same == (not parameter.requires_grad), name
    for stash in EXACT if clipping != "off" else ("auto",):
        got, got_losses, got_stats = train("in_backward", clipping=clipping, stash=stash, model=make())
        assert_same(expected, got)
        assert (losses, stats) == (got_losses, got_stats), stash


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["off", "always_active"])
def test_blocks_compiled_one_by_one_are_bitwise_equal(clipping: str) -> None:
    def make() -> SmallModel:
        torch.compiler.reset()
        model = SmallModel(blocks=2)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    expected, losses, _ = train("after_backward", clipping=clipping, model=make(), accumulation="4")
    got, got_losses, _ = train("in_backward", clipping=clipping, model=make(), accumulation="4")
    assert_same(expected, got)
    assert losses == got_losses


@pytest.mark.parametrize(
    ("package", "name", "settings"),
    [
        ("torchao.optim", "AdamW8bit", {"block_size": 128}),
        ("torchao.optim", "AdamW4bit", {"block_size": 128}),
        ("bitsandbytes.optim", "AdamW8bit", {}),
        ("bitsandbytes.optim", "Lion", {}),
    ],
)
def test_low_bit_optimizers_are_bitwise_equal(package: str, name: str, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(package)
    OPTIMIZERS[name] = (getattr(module, name), {"lr": 1e-2} | settings)

    def make() -> SmallModel:
        model = SmallModel(blocks=1, dropout=0.1)
        model.embed = torch.nn.Embedding(256, 16)  # 4,096 elements: enough to be quantised
        torch.nn.init.normal_(model.embed.weight, generator=torch.Generator().manual_seed(0))
        return model

    # torchao compiles its steps; uncompiled they are the same arithmetic.
    with torch.compiler.set_stance("force_eager"):
        for clipping in CLIPPING:
            expected, losses, stats = train("after_backward", optimizer=name, clipping=clipping, model=make())
            got, got_losses, got_stats = train("in_backward", optimizer=name, clipping=clipping, model=make())
            assert_same(expected, got)
            assert (losses, stats) == (got_losses, got_stats)
