from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from optune import lora, models
from optune.errors import ConfigError
from tests import fixtures
from tests.lora import judges

BLOCKS = ("model.layers.0", "model.layers.1")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return judges.base_model(tmp_path / "base")


def apply(model: Any, targets: Any, **settings: Any) -> list[str]:
    return lora.apply(model, **({"rank": 2, "alpha": 4} | settings), targets=targets)


def names(*patterns: str) -> list[str]:
    return [f"{block}.{name}" for block in BLOCKS for name in patterns]


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("q_proj", names("self_attn.q_proj")),
        (["q_proj"], names("self_attn.q_proj")),
        (["v_proj", "q_proj", "v_proj"], names("self_attn.q_proj", "self_attn.v_proj")),
        (["self_attn.o_proj"], names("self_attn.o_proj")),
        (["layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["model.layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj"]),
        (["lm_head"], ["lm_head"]),
        (["layers.0.mlp.*"], [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]),
        (["*.layers.[1]*.?_proj"], [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]),
        ([r"layers\.1\..*(q|v)_proj"], ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        ([".*q_proj"], names("self_attn.q_proj")),
        (["(q|k)_proj"], names("self_attn.q_proj", "self_attn.k_proj")),
        (["up_proj", "layers.0.*k_proj"], ["model.layers.0.self_attn.k_proj", *names("mlp.up_proj")]),
    ],
    ids=str,
)
def test_a_target_selects_exactly_these_layers(model: Any, targets: Any, wanted: list[str]) -> None:
    assert apply(model, targets) == wanted
    assert list(lora.layers(model)) == wanted


def test_all_linear_selects_every_linear_layer_but_the_head_as_peft_does(model: Any, tmp_path: Path) -> None:
    theirs = judges.peft_model(tmp_path / "base", target_modules="all-linear")
    wanted = {re.sub(r"^base_model\.model\.|\.lora_A\.default$", "", n) for n, _ in theirs.named_modules()
              if n.endswith("lora_A.default")}  # fmt: skip
    assert set(apply(model, "all-linear")) == wanted
    assert len(wanted) == 14


def test_the_head_may_join_all_linear(model: Any) -> None:
    assert apply(model, ["all-linear", "lm_head"])[-1] == "lm_head"


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "v_porj"], ["'v_porj' matches no layer (did you mean 'v_proj'?)"]),
        (["nope"], ["'nope' matches no layer", "linear layers are q_proj, k_proj"]),
        (["self_atn.q_proj"], ["did you mean 'self_attn.q_proj'?"]),
        (["embed_tokens"], ["'embed_tokens' selects model.embed_tokens (Embedding), which is not a linear layer"]),
        (["self_attn"], ["model.layers.0.self_attn", "not a linear layer", "k_proj, o_proj, q_proj, v_proj"]),
        (["*norm"], ["'*norm' selects", "not a linear layer"]),
        (["nope", "v_porj", "model.norm"], ["'nope'", "'v_porj'", "'model.norm'"]),
        (["q_proj,v_proj"], ["'q_proj,v_proj' matches no layer", "[q_proj,v_proj]"]),
        (["(q_proj"], ["'(q_proj' matches no layer"]),
        (["[q_proj"], ["'[q_proj' matches no layer"]),
        ([""], ["'' is not the name"]),
        ([["q_proj"]], ["['q_proj'] is not the name"]),
        ([3], ["3 is not the name"]),
        ([], ["empty"]),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_adapted_is_named_and_nothing_changes(
    model: Any, targets: Any, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(model, targets)
    assert caught.value.where == "lora.targets"
    for text in said:
        assert text in f"{caught.value} {caught.value.hint}"
    assert not lora.layers(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("targets", ["lm_head", "*", "lm_*"])
def test_a_tied_head_is_refused_with_the_reason(tmp_path: Path, targets: str) -> None:
    model = judges.base_model(fixtures.write_model(tmp_path, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match=r"lm_head, which shares its weight with model\.embed_tokens"):
        apply(model, targets)
    assert len(apply(model, "all-linear")) == 14


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "lora.rank is 0"),
        ({"rank": 1.5}, "lora.rank is 1.5"),
        ({"rank": True}, "lora.rank is True"),
        ({"alpha": 0}, "lora.alpha is 0"),
        ({"alpha": float("nan")}, "lora.alpha is nan"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
        ({"dropout": -0.1}, "lora.dropout is -0.1"),
        ({"rank": -1, "dropout": 2}, "lora.rank is -1 and must be an integer of at least 1; lora.dropout is 2"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(model: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        apply(model, "q_proj", **settings)


def test_a_second_set_of_adapters_is_refused(model: Any) -> None:
    apply(model, "q_proj")
    with pytest.raises(ConfigError, match="has adapters already"):
        apply(model, "v_proj")


def test_start_depends_on_the_seed_and_the_layers_not_on_the_order_of_targets(tmp_path: Path) -> None:
    states = []
    for targets, seed in ((["q_proj", "v_proj"], 1), (["v_proj", "q_proj"], 1), ("(v|q)_proj", 1), ("[qv]_proj", 2)):
        model = judges.base_model(tmp_path)
        torch.manual_seed(seed)
        apply(model, targets)
        states.append(lora.state(model))
    first, *same, other = states
    for one in same:
        assert list(one) == list(first)
        assert all(torch.equal(one[key], first[key]) for key in first)
    assert not torch.equal(first["model.layers.0.self_attn.q_proj.lora_A.weight"],
                           other["model.layers.0.self_attn.q_proj.lora_A.weight"])  # fmt: skip


def test_start_is_distributed_as_pefts(tmp_path: Path) -> None:
    """A is uniform within ±1/√in_features, B is zero."""
    model = judges.base_model(tmp_path)
    apply(model, "down_proj", rank=32)
    theirs = judges.peft_model(tmp_path, target_modules=["down_proj"], r=32).state_dict()
    ours = lora.state(model)["model.layers.0.mlp.down_proj.lora_A.weight"]
    judge = theirs["base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight"]
    assert ours.abs().max() <= 64**-0.5
    assert abs(ours.std() / judge.std() - 1) < 0.05
    assert not lora.state(model)["model.layers.0.mlp.down_proj.lora_B.weight"].any()


def test_targets_can_be_checked_before_weights_are_read(tmp_path: Path) -> None:
    outline = models.outline(models.check(fixtures.write_model(tmp_path)))
    with pytest.raises(ConfigError, match="did you mean 'v_proj'"):
        apply(outline, ["v_porj"])
    assert len(apply(outline, "all-linear")) == 14
    assert {tensor.device.type for tensor in lora.state(outline).values()} == {"meta"}


def test_base_names_stay_and_only_adapters_train(model: Any) -> None:
    before = dict(model.named_parameters())
    apply(model, ["q_proj", "lm_head"])
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(after) - set(before) == set(lora.trainable(model)) == set(lora.state(model))
    assert all(parameter.dtype == torch.float32 for parameter in lora.trainable(model).values())


@pytest.mark.parametrize(
    ("targets", "listed"),
    [
        ("q_proj", ["q_proj"]),
        (["v_proj", "q_proj", "q_proj"], ["q_proj", "v_proj"]),
        (["layers.1.*q_proj", "o_proj"], ["model.layers.1.self_attn.q_proj", "o_proj"]),
        ("lm_head", ["lm_head"]),
    ],
    ids=str,
)
def test_adapter_config_lists_exactly_the_adapted_modules(
    model: Any, tmp_path: Path, targets: Any, listed: list[str]
) -> None:
    apply(model, targets)
    lora.save(model, tmp_path / "adapter", base="some/base")
    config = json.loads((tmp_path / "adapter" / lora.CONFIG_FILE).read_text())
    assert config["target_modules"] == sorted(listed)
