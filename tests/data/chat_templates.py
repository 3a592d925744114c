"""Chat templates of many families, and a tokenizer that knows their tokens.

The templates, in `templates/`, are short originals that use the constructs of the real ones: slices and namespaces,
trims and splits, macros, tool calls through `tojson`, dates, reversed loops, errors, generation prompts that differ
from the turn.
"""

from __future__ import annotations

import atexit
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from optune import data
from optune.data.tokenizer_files import SHIPPED

TEMPLATES = Path(__file__).parent / "templates"

_SPECIAL = """
<|endoftext|> <|im_start|> <|im_end|> <s> </s> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|eom_id|> <|python_tag|> <|user|> <|assistant|> <|system|> <|end|> <|return|> <|call|> <|start|> <|message|>
<|channel|> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
<bos> <start_of_turn> <end_of_turn> <|begin▁of▁sentence|> <|end▁of▁sentence|> <|User|> <|Assistant|> <pad>
<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>
<|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> [gMASK] <sop> <|observation|> <|tool|> <|/tool|>
<|tool▁calls▁begin|> <|tool▁call▁begin|> <|tool▁sep|> <|tool▁call▁end|> <|tool▁calls▁end|>
<|tool▁outputs▁begin|> <|tool▁output▁begin|> <|tool▁output▁end|> <|tool▁outputs▁end|>
"""
SPECIAL = tuple(_SPECIAL.split())
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that the tokenizer does not call special, as Qwen has them."""


@dataclass(frozen=True)
class Family:
    """`end`: what closes an answer (`last_end`: the last one); `trims`: the template strips contents. `frame`: what the
    model has to write in front of its words (`last_frame`: of the last answer)."""

    bos: str | None
    eos: str
    end: str
    trims: bool = False
    takes_system: bool = True
    takes_tools: bool = False
    takes_parts: bool = False
    last_end: str | None = None
    frame: str = ""
    last_frame: str | None = None


FAMILIES = {
    "llama2": Family("<s>", "</s>", " </s>", trims=True),
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", trims=True),
    "llama31": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", trims=True, takes_tools=True),
    "smollm2": Family("<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "chatml_without_prompt": Family(None, "<|im_end|>", "<|im_end|>"),
    "mistral": Family("<s>", "</s>", "</s>"),
    "mistral_tools": Family("<s>", "</s>", "</s>", trims=True, takes_system=False, takes_tools=True),
    "qwen25": Family(None, "<|im_end|>", "<|im_end|>", takes_tools=True),
    "qwen3": Family(None, "<|im_end|>", "<|im_end|>", takes_tools=True, last_frame="<think>\n\n</think>\n\n"),
    "gemma": Family("<bos>", "<end_of_turn>", "<end_of_turn>", trims=True, takes_system=False),
    "phi3": Family("<s>", "<|endoftext|>", "<|end|>"),
    "zephyr": Family("<s>", "</s>", "</s>"),
    "deepseek": Family("<|begin▁of▁sentence|>", "<|end▁of▁sentence|>", "<|end▁of▁sentence|>"),
    "harmony": Family(
        None, "<|return|>", "<|end|>", last_end="<|return|>", takes_tools=True, frame="<|channel|>final<|message|>"
    ),
    "cohere": Family("<s>", "<|end|>", "<|return|><|end|>"),
    "tagged": Family("<s>", "<|im_end|>", "<|im_end|>", trims=True),
    "gemma3": Family("<bos>", "<end_of_turn>", "<end_of_turn>", trims=True, takes_parts=True),
    "granite": Family(None, "<|end_of_text|>", "<|end_of_text|>", takes_tools=True),
    "command_r": Family("<s>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", trims=True),
    "glm4": Family(None, "<|endoftext|>", "", takes_tools=True, frame="\n"),
    "hermes": Family("<|begin_of_text|>", "<|im_end|>", "<|im_end|>", takes_tools=True),
    "deepseek_tools": Family("<|begin▁of▁sentence|>", "<|end▁of▁sentence|>", "<|end▁of▁sentence|>", takes_tools=True),
    "vicuna": Family("<s>", "</s>", "</s>", trims=True, frame=" "),
    "smollm3": Family(None, "<|im_end|>", "<|im_end|>", frame="<|im_start|>assistant\n"),
    "olmo2": Family("<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "phi4_mini": Family("<|endoftext|>", "<|endoftext|>", "<|end|>"),
    "nemotron": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", trims=True, takes_tools=True),
    # The named templates that are shipped.
    "named_chatml": Family(None, "<|im_end|>", "<|im_end|>", takes_tools=True),
    "named_llama3": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", trims=True, takes_tools=True),
    "named_mistral": Family("<s>", "</s>", "</s>", trims=True),
    "named_gemma": Family("<bos>", "<end_of_turn>", "<end_of_turn>", trims=True),
    "named_phi3": Family("<s>", "<|end|>", "<|end|>"),
    "named_zephyr": Family("<s>", "</s>", "</s>"),
    "named_alpaca": Family("<s>", "</s>", "</s>"),
}

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello world to the system user assistant tool model",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} \n\n\n what is the weather today?',
    "<|im_end|> <|im_start|>user [INST] </s> plain text of markers, seen in documents about chats",
]


@cache
def make_backend() -> Tokenizer:
    """A byte-level BPE tokenizer of a few hundred tokens that knows every marker above."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    backend.train_from_iterator(_CORPUS * 4, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    return backend


def source_of(name: str) -> Path:
    """The file of a family's template."""
    named = name.removeprefix("named_")
    return TEMPLATES / f"{name}.jinja" if named == name else SHIPPED / f"{named}.jinja"


@cache
def folder(name: str) -> Path:
    """A tokenizer folder with the template of a family, made once a test run."""
    family, path = FAMILIES[name], Path(mkdtemp(prefix=f"optune-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    make_backend().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    settings |= {"bos_token": family.bos} if family.bos else {}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.copy(source_of(name), path / "chat_template.jinja")
    return path


@cache
def load_ours(name: str) -> data.Tokenizer:
    return data.load_tokenizer(folder(name))


@cache
def load_judge(name: str) -> PreTrainedTokenizerBase:
    """transformers' reading of the same folder."""
    return AutoTokenizer.from_pretrained(folder(name))
