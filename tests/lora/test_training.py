"""Training an adapter gives PEFT's losses and weights, with activation checkpointing and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import flop_counter

from optune import lora, models
from optune.lora import operations
from tests import fixtures
from tests.lora import judges
from tests.lora.judges import ATTENTION

STEPS = 5
aten = torch.ops.aten


def train(model: Any, parameters: list[torch.nn.Parameter]) -> list[float]:
    """AdamW on one batch of random tokens; dropout's numbers come from the step."""
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)
    tokens_BT = judges.tokens(4, 16)
    losses = []
    model.train()
    for step in range(STEPS):
        torch.manual_seed(step)
        output = model(tokens_BT)
        logits_BTV = output if isinstance(output, torch.Tensor) else output.logits
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_five_steps_equal_pefts(tmp_path: Path, dropout: float, start: str) -> None:
    """The same start, losses within 1e-5 and weights within 1e-5; with dropout, the same masks too."""
    model = judges.base_model(tmp_path / "base")
    torch.manual_seed(0)
    lora.apply(model, rank=4, alpha=8, dropout=dropout, targets=[*ATTENTION, "down_proj"])
    if start == "random":
        judges.randomise(model)
    lora.save(model, tmp_path / "start", base=str(tmp_path / "base"))
    theirs = judges.open_in_peft(tmp_path / "base", tmp_path / "start", is_trainable=True)
    theirs.delete_adapter("again")

    base = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    losses, wanted = train(model, trained(model)), train(theirs, trained(theirs))
    assert losses == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert losses[-1] < losses[0]
    judged = {name.replace(".default", ""): parameter for name, parameter in theirs.named_parameters()}
    for name, tensor in lora.state(model).items():
        torch.testing.assert_close(tensor, judged[f"base_model.model.{name}"].data, rtol=0, atol=1e-5)
    assert all(torch.equal(model.get_parameter(name), parameter) for name, parameter in base.items())


def test_bf16_base_trains_fp32_adapters_as_peft_does(tmp_path: Path) -> None:
    model = judges.base_model(tmp_path / "base", torch.bfloat16)
    lora.apply(model, rank=4, alpha=8, targets=ATTENTION)
    judges.randomise(model)
    lora.save(model, tmp_path / "start", base=str(tmp_path / "base"))
    with judges.quiet():
        theirs = judges.PeftModel.from_pretrained(
            judges.base_model(tmp_path / "base", torch.bfloat16), str(tmp_path / "start"), is_trainable=True
        )
    losses, wanted = train(model, trained(model)), train(theirs, trained(theirs))
    assert {parameter.dtype for parameter in trained(model)} == {torch.float32}
    assert losses == pytest.approx(wanted, rel=1e-3)  # a bf16 model's own rounding


def decoder(folder: Path, **settings: Any) -> models.Decoder:
    if not (folder / "config.json").exists():
        fixtures.write_model(folder)
    model = models.load(folder, dtype=torch.float32)
    torch.manual_seed(0)
    lora.apply(model, **({"rank": 4, "alpha": 8, "targets": ["all-linear", "lm_head"]} | settings))
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing_and_every_adapter_learns(tmp_path: Path, dropout: float) -> None:
    plain, checkpointed = (decoder(tmp_path / "base", dropout=dropout) for _ in range(2))
    checkpointed.activation_checkpointing = "block"
    assert train(plain, trained(plain)) == train(checkpointed, trained(checkpointed))
    for name, tensor in lora.state(plain).items():
        assert torch.equal(tensor, lora.state(checkpointed)[name])
        assert tensor.any(), f"{name} did not learn"


def test_every_listed_module_has_a_non_zero_b_after_three_steps(tmp_path: Path) -> None:
    model = decoder(tmp_path / "base", targets=["q_proj", "layers.1.mlp.*", "lm_head"])
    train(model, trained(model))
    lora.save(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    written = judges.open_in_peft(tmp_path / "base", tmp_path / "adapter").state_dict()
    learnt = [name for name, tensor in written.items() if ".lora_B.default." in name and tensor.any()]
    assert len(learnt) == 2 + 3 + 1


def test_the_base_costs_no_gradient_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No frozen parameter gets a gradient, and the embedding's output needs none. Counted by torch inside of the
    layers' operations; what these say of themselves is the same."""
    model = decoder(tmp_path / "base")
    assert not model.embed(judges.tokens()).requires_grad
    model(judges.tokens()).square().sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == set(
        lora.state(model)
    )
    said = count_flops(model)
    for name in ("_lora_forward", "_lora_backward"):
        monkeypatch.setattr(operations, name, getattr(operations, name)._init_fn)
    counted = count_flops(model)
    rows, width, inner, keys, vocabulary, rank = 36, 32, 64, 16, len(fixtures.VOCABULARY), 4
    layer_sizes = 2 * [(width, width), (width, keys), (width, keys), (width, width), *[(width, inner)] * 3]
    layer_sizes.append((width, vocabulary))
    # A forward product each, and one for the input's gradient; the adapter's A and B have all three products.
    base = sum(2 * 2 * rows * i * o for i, o in layer_sizes) - 3 * 2 * rows * width * width  # the first q, k, v
    base += 2 * rows * width * (width - keys) * 2  # k and v are narrower than q
    adapters = sum(3 * 2 * rows * rank * (i + o) for i, o in layer_sizes) - 3 * 2 * rows * rank * width
    assert sum(count for op, count in counted.items() if op in (aten.mm, aten.addmm, aten.addmm_)) == base + adapters
    assert sum(said.values()) == sum(counted.values())


def count_flops(model: Any) -> dict[Any, int]:
    in_place = {aten.addmm_: lambda _, a, b, *__, **___: 2 * a[0] * a[1] * b[1]}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(judges.tokens()).square().sum().backward()
    return counter.get_flop_counts()["Global"]
