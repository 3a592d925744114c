"""LoRA adapters as a layer swap: put in, trained, written and read in PEFT's format, merged.

names = lora.apply(model, rank=8, alpha=16, dropout=0.0, targets=["q_proj", "v_proj"])
…train `lora.trainable(model)`…
lora.save(model, folder, base="HuggingFaceTB/SmolLM2-135M-Instruct")
"""

from optune.lora.adapter import apply, layers, merge, quantize, start, state, trainable
from optune.lora.files import WEIGHTS_FILE, load, read_metadata, read_quantization, read_tensors, save, write_tensors
from optune.lora.layer import LoraLinear
from optune.lora.peft_config import CONFIG_FILE, AdapterConfig
from optune.lora.peft_config import read as read_config
from optune.lora.quantized import Nf4Linear, Nf4Weight, is_quantized

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "AdapterConfig",
    "LoraLinear",
    "Nf4Linear",
    "Nf4Weight",
    "apply",
    "is_quantized",
    "layers",
    "load",
    "merge",
    "quantize",
    "read_config",
    "read_metadata",
    "read_quantization",
    "read_tensors",
    "save",
    "start",
    "state",
    "trainable",
    "write_tensors",
]
