"""transformers and PEFT over the tiny model, as judges."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests import fixtures

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT calls what transformers has deprecated, and says that it saves a head beside its adapter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers.*")
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        yield


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of `folder`, written there first if it is not; eager attention, evaluation mode."""
    if not (folder / "config.json").exists():
        fixtures.write_model(folder, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def peft_model(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 3, **settings: Any) -> Any:
    """A PEFT model whose B is random too, so that the adapter does something."""
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"} | settings))
    with quiet():
        model = get_peft_model(base_model(folder, dtype), config)
    randomise(model, seed)
    return model


def randomise(model: nn.Module, seed: int = 3) -> None:
    """Fills every B, in the order of the parameters, with small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def open_in_peft(base: Path, adapter: Path, **settings: Any) -> Any:
    """PeftModel.from_pretrained, which must find every adapter tensor and no other."""
    with quiet():
        model = PeftModel.from_pretrained(base_model(base), str(adapter), **settings)
        result = model.load_adapter(str(adapter), adapter_name="again")
    assert not [key for key in result.missing_keys if "lora_" in key]
    assert not result.unexpected_keys
    model.set_adapter("default")
    return model


def tokens(rows: int = 3, length: int = 12, seed: int = 5) -> Tensor:
    return torch.randint(0, len(fixtures.VOCABULARY), (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, tokens_BT: Tensor | None = None) -> Tensor:
    output = model.eval()(tokens() if tokens_BT is None else tokens_BT)
    return (output if isinstance(output, Tensor) else output.logits).float()


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
