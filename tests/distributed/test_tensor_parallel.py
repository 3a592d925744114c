"""A decoder split over a tensor group is the decoder of one process: logits, loss, every gradient, every weight.

Four gloo ranks are spawned once and compute everything; rank 0 compares it with the model that it runs whole, and what
it found apart is told by claim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optune import distributed, lora, optim, train
from optune.distributed.processes import make_mesh
from optune.errors import ConfigError
from optune.loss import next_token_loss
from optune.models.decoder import Decoder
from optune.models.families import read_config
from optune.types import IGNORE, Microbatch
from tests import fixtures
from tests.distributed_ranks import join, run_ranks

ODD = {"vocab_size": 83, "intermediate_size": 45, "num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 2}
"""Neither vocabulary nor inner width divides by 2 or 4."""
FEW_KEYS = ODD | {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ODD,
    "llama, tied": ODD | {"tie_word_embeddings": True},
    "llama, biases": FEW_KEYS | {"attention_bias": True, "mlp_bias": True},
    "mistral": ODD | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    "qwen2": ODD | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": None},
    "qwen3": FEW_KEYS | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
CLIPPED = {"max_grad_norm": 0.05}
MODES: dict[str, dict[str, Any]] = {
    "after_backward": CLIPPED | {"when": "after_backward"},
    "in_backward": {"when": "in_backward"},
    "hold": CLIPPED | {"when": "in_backward", "stash": "hold"},
    "two_pass": CLIPPED | {"when": "in_backward", "stash": "two_pass"},
    "breadth_first": CLIPPED | {"when": "in_backward", "stash": "hold"},
}


def make_config(family: str, **overrides: Any) -> Any:
    raw = fixtures.model_config(**FAMILIES[family] | overrides)
    config, problems = read_config(raw if raw["model_type"] == "llama" else {**raw, "mlp_bias": None})
    assert config is not None, problems
    return config


def make_model(family: str, **overrides: Any) -> Any:
    model = Decoder(make_config(family, **overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + name.endswith("norm.weight"))
    return model


def add_adapters(model: Any, dropout: float = 0.2) -> Any:
    torch.manual_seed(3)
    lora.apply(model, rank=4, alpha=8, dropout=dropout, targets=LINEAR)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def make_microbatch(seed: int, length: int, packed: bool = False) -> Microbatch:
    """Two padded rows with weights, or two packs."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, 83, (2, length + 1), generator=generator)
    labels_BT = tokens_BT[:, 1:].clone()
    labels_BT[:, ::3] = IGNORE
    positions_BT = torch.arange(length).repeat(2, 1)
    if packed:
        documents_BT = (positions_BT >= 4).long() + (positions_BT >= 6).long()
        positions_BT = positions_BT - torch.tensor([0, 4, 6])[documents_BT]
        return Microbatch(tokens_BT[:, :-1], labels_BT, positions_BT, documents_BT)
    labels_BT[0, -2:] = IGNORE
    weights_BT = torch.rand(labels_BT.shape, generator=generator)
    return Microbatch(tokens_BT[:, :-1], labels_BT, positions_BT, weights_BT=weights_BT)


def whole(tensor: Any) -> Tensor:
    """A copy of all of it, on every rank."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().clone()


def run_pass(model: Any, microbatch: Microbatch) -> dict[str, Tensor]:
    """Logits, loss and gradients."""
    arguments = (microbatch.tokens_BT, microbatch.positions_BT, microbatch.documents_BT)
    with torch.no_grad():
        results = {"logits": whole(model(*arguments))}
    loss = next_token_loss(model, model.hidden(*arguments), microbatch)
    (loss / 7).backward()
    results["loss"] = whole(loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert getattr(parameter.grad, "placements", None) == getattr(parameter, "placements", None), name
            results[f"gradient of {name}"] = whole(parameter.grad)
    model.zero_grad(set_to_none=True)
    return results


def run_training(
    model: Any,
    mode: str,
    rows_of: Callable[[int], list[Microbatch]],
    sum_over_ranks: Callable[..., list[float]] = list,
) -> dict[str, Tensor]:
    """Three steps: their losses, their norms, and the weights at the end."""
    # Adam makes much of gradients that are mostly rounding; with a large eps the comparison is of the method.
    optimizer = optim.build_optimizer(
        model.named_parameters(), factory=torch.optim.AdamW, settings={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2}
    )
    model.activation_checkpointing = "block" if mode == "hold" else "none"
    stepper = optim.build_stepper(model, optimizer, **MODES[mode])
    accumulation = "breadth_first" if mode == "breadth_first" else "depth_first"
    numbers = []
    for step in range(3):
        done = train.train_step(
            model, next_token_loss, stepper, rows_of(step),
            seed=5, step=step, accumulation=accumulation, sum_over_ranks=sum_over_ranks,
        )  # fmt: skip
        numbers += [done.loss, done.grad_norm or 0.0]
    stepper.close()
    return {"losses and norms": torch.tensor(numbers)} | {n: whole(p) for n, p in model.named_parameters()}


def run_generation(model: Any) -> dict[str, Tensor]:
    """Logits of a prompt, then of one token after the other."""
    tokens_BT, cache = make_microbatch(0, 7).tokens_BT, model.new_cache(2, 7)
    with torch.no_grad():
        logits = [whole(model(part_BT, cache=cache)) for part_BT in tokens_BT.split([5, 1, 1], dim=1)]
    return {"logits": torch.cat(logits, dim=1)}


class Findings:
    """Compares what ranks made together with what one process makes, on rank 0."""

    def __init__(self) -> None:
        self.is_judge = join() == 0
        self.checked: defaultdict[str, int] = defaultdict(int)
        self.apart: defaultdict[str, list[str]] = defaultdict(list)

    def compare(
        self, claim: str, where: str, split: dict[str, Tensor], expect: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Within 1e-6 relative in float32 (gradients: of the whole gradient, small ones are mostly rounding), and
        1e-12, each by itself, in float64."""
        if not self.is_judge:
            return
        expected = expect()
        if expected.keys() != split.keys():
            self.apart[claim].append(f"{where}: {expected.keys() ^ split.keys()}")
        gradients = [torch.linalg.vector_norm(value) for name, value in expected.items() if "gradient" in name]
        for name in expected.keys() & split.keys():
            value = expected[name].double()
            distance = float(torch.linalg.vector_norm(split[name].double() - value))
            scale, tolerance = float(torch.linalg.vector_norm(value)), 1e-12
            if expected[name].dtype is torch.float32:
                scale, tolerance = float(torch.stack(gradients).norm()) if "gradient" in name else scale, 1e-6
            self.checked[claim] += 1
            if not distance <= tolerance * scale + 1e-15:
                self.apart[claim].append(f"{where}: {name} by {distance:.2g} of {scale:.2g}")


def work() -> tuple[dict[str, int], dict[str, list[str]]]:
    findings = Findings()
    mesh = make_mesh(torch.device("cpu"), distributed.Layout(shard=2, tensor=2))
    two, four = (
        mesh["tensor"],
        make_mesh(torch.device("cpu"), distributed.Layout(tensor=4))["tensor"],
    )
    for family in FAMILIES:
        for size, dtype in ((two, torch.float32), (four, torch.float64)):
            _check_passes(findings, family, size, dtype)
    for mode in MODES:
        _check_training(findings, mode, two, adapters=False)
    for mode in ("after_backward", "hold"):
        _check_training(findings, mode, two, adapters=True)
    _check_generation(findings, two)
    stranger = make_model("llama")
    stranger.blocks[1].gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"no rule says how to split model.layers.1.gain of llama"):
        _split(stranger, two)
    with distributed.start("cpu", shard=2, tensor=2) as processes:
        _check_shards(findings, processes, "after_backward", adapters=False)
        _check_shards(findings, processes, "hold", adapters=True)
    return dict(findings.checked), dict(findings.apart)


def _split(model: Any, mesh: Any) -> Any:
    from optune.distributed import tensor_parallel

    tensor_parallel.apply(model, mesh)
    return model


def _check_passes(findings: Findings, family: str, mesh: Any, dtype: torch.dtype) -> None:
    whole_model, model = make_model(family).to(dtype), _split(make_model(family).to(dtype), mesh)
    for length, packed in ((7, False), (9, True), (1, False))[: 3 if dtype is torch.float32 else 2]:
        microbatch = make_microbatch(length, length, packed)
        model.activation_checkpointing = "block" if packed else "none"
        where = f"{family}, {mesh.size()} ranks, length {length}"
        findings.compare("passes", where, run_pass(model, microbatch), partial(run_pass, whole_model, microbatch))


def _check_training(findings: Findings, mode: str, mesh: Any, adapters: bool) -> None:
    prepare = add_adapters if adapters else lambda model: model
    rows_of = lambda step: [make_microbatch(step, 7), make_microbatch(step + 9, 9, packed=True)]  # noqa: E731
    trained = run_training(_split(prepare(make_model("qwen3")), mesh), mode, rows_of)
    findings.compare(
        "training", f"{mode}, adapters {adapters}", trained,
        lambda: run_training(prepare(make_model("qwen3")), mode, rows_of),
    )  # fmt: skip


def _check_generation(findings: Findings, mesh: Any) -> None:
    generated = run_generation(_split(make_model("qwen3"), mesh))
    findings.compare("generation", "qwen3", generated, lambda: run_generation(make_model("qwen3")))
    findings.compare("transformers", "qwen3", generated, _transformers_logits)


def _transformers_logits() -> dict[str, Tensor]:
    import transformers

    raw = fixtures.model_config(**FAMILIES["qwen3"])
    judge = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**raw))
    judge.load_state_dict(make_model("qwen3").state_dict())
    with torch.no_grad():
        return {"logits": judge(make_microbatch(0, 7).tokens_BT).logits}


def _check_shards(findings: Findings, processes: Any, mode: str, adapters: bool) -> None:
    """Two shards of two parts, each shard with rows of its own, against one process with all rows."""
    prepare = partial(add_adapters, dropout=0.0) if adapters else lambda model: model

    def rows_of(step: int, data_ranks: tuple[int, ...] = (processes.data_rank,)) -> list[Microbatch]:
        return [make_microbatch(step + 20 * rank + 5 * part, 7 + rank) for part in (0, 1) for rank in data_ranks]

    model = prepare(make_model("llama, biases"))
    distributed.spread(model, processes)
    findings.compare(
        "shards", f"{mode}, adapters {adapters}", run_training(model, mode, rows_of, processes.sum),
        lambda: run_training(prepare(make_model("llama, biases")), mode, partial(rows_of, data_ranks=(0, 1))),
    )  # fmt: skip


@pytest.fixture(scope="module")
def findings() -> Any:
    checked, apart = run_ranks(work, 4, timeout_s=900)[0]
    return SimpleNamespace(checked=checked, apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "comparisons"),
    [("passes", 600), ("training", 150), ("generation", 1), ("transformers", 1), ("shards", 50)],
    ids=[
        "logits_loss_and_gradients_are_those_of_one_process_for_every_family_and_length",
        "three_steps_of_every_mode_end_where_one_process_ends_with_and_without_adapters",
        "generation_with_a_cache_gives_the_logits_of_one_process",
        "logits_are_those_of_transformers",
        "shards_of_parts_end_where_one_process_with_all_rows_ends",
    ],
)
def test_a_split_decoder_is_the_decoder(findings: Any, claim: str, comparisons: int) -> None:
    assert findings.apart.get(claim, []) == []
    assert findings.checked[claim] >= comparisons


@pytest.mark.parametrize(
    ("size", "overrides", "texts"),
    [
        (3, {}, ["num_attention_heads is 8", "num_key_value_heads is 4", "1, 2, 4, 8"]),
        (8, {"num_attention_heads": 24, "num_key_value_heads": 12}, ["num_key_value_heads is 12", "1, 2, 3, 4, 6, 12"]),
        (4, {"intermediate_size": 5}, ["intermediate_size is 5"]),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_numbers(size: int, overrides: Any, texts: list[str]) -> None:
    from optune.distributed import tensor_parallel

    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check(make_config("llama", **overrides), size)
    assert caught.value.where == "parallel.tensor"
    assert all(text in f"{caught.value} {caught.value.hint}" for text in texts), caught.value
