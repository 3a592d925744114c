"""`optune generate MODEL --prompt TEXT`: text from a model, a checkpoint or an adapter."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optune.errors import ConfigError
from tune_cli import folders
from tune_cli.arguments import Parser

if TYPE_CHECKING:
    from optune.data import Tokenizer
    from optune.generation import Settings

MAX_NEW_TOKENS = 256
"""Where neither the command line nor the model's generation_config.json says."""


def run(words: list[str]) -> int:
    """Prints what the model says: as it comes for one prompt, text after text for several."""
    parser = _make_parser()
    options, others = parser.split(words)
    (name,) = parser.take(others, "MODEL")
    if not options.prompt:
        parser.error("--prompt is missing")
    if options.raw and options.system is not None:
        raise ConfigError("--system is part of a chat, and --raw leaves the chat template out")

    from optune import data, distributed, generation

    device = distributed.find_device(options.device)
    folder = folders.find(name)
    tokenizer = data.load_tokenizer(folder.holder_of("tokenizer.json"))
    prompts = [_encode(prompt, tokenizer, options) for prompt in options.prompt]
    settings = _choose_settings(generation.read_settings(folder.holder_of("generation_config.json")), options)
    stop_ids = generation.read_stop_ids(folder.holder_of("generation_config.json"), tokenizer)
    if not options.raw:
        stop_ids |= tokenizer.end_ids()
    model = folders.load(folder, options.dtype or folders.read_dtype(folder.base), device)

    is_single = len(prompts) == 1
    stream = generation.TextStream(lambda ids: tokenizer.decode(ids, skip_special=True))

    def show(row: int, token: int) -> None:
        _write(stream.push(token))

    texts = generation.generate(
        model,
        prompts,
        max_new_tokens=MAX_NEW_TOKENS if settings.max_new_tokens is None else settings.max_new_tokens,
        stop_ids=stop_ids,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        seed=options.seed,
        on_token=show if is_single else None,
    )
    if is_single:
        _write(f"{stream.finish()}\n")
        return 0
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(f"> {prompt}", file=sys.stderr, flush=True)
        _write(f"{tokenizer.decode(text, skip_special=True)}\n")
    return 0


def _make_parser() -> Parser:
    parser = Parser(
        "generate",
        "MODEL --prompt TEXT [options]",
        "Lets a model go on with a text. MODEL is a folder (a model, a checkpoint, an adapter, a run) or a hub id.\n"
        "The model's generation_config.json decides how tokens are chosen, unless an option here does.",
    )
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="given several times, all are answered")
    parser.add_argument("--raw", action="store_true", help="go on with the text itself, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help=f"at most so many ({MAX_NEW_TOKENS})")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", metavar="X", type=float, help="0 is greedy; higher is more random")
    parser.add_argument("--top-k", metavar="N", type=int, help="choose among the N likeliest tokens")
    parser.add_argument("--top-p", metavar="X", type=float, help="choose among the likeliest that together reach X")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of what is random (0)")
    parser.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="of the weights; otherwise they keep theirs")
    return parser


def _encode(prompt: str, tokenizer: Tokenizer, options: argparse.Namespace) -> list[int]:
    if options.raw:
        return tokenizer.encode(prompt, special=True)
    if tokenizer.template_name is None:
        raise ConfigError(
            f"the model has no chat template ({tokenizer.folder})", hint="--raw goes on with the text itself"
        )
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return tokenizer.encode_chat(messages, add_generation_prompt=True)[0]


def _choose_settings(settings: Settings, options: argparse.Namespace) -> Settings:
    """The model's settings with the options on top."""
    samples = options.top_k is not None or options.top_p is not None
    if options.greedy and (samples or options.temperature):
        raise ConfigError("--greedy takes the likeliest token; --temperature, --top-k and --top-p have no say then")
    if settings.unsupported:
        listed = ", ".join(f"{key}={value!r}" for key, value in settings.unsupported.items())
        print(f"warning: generation_config.json asks for {listed}, which is not done here", file=sys.stderr)
    named = ("temperature", "top_k", "top_p", "max_new_tokens")
    changes: dict[str, Any] = {key: getattr(options, key) for key in named if getattr(options, key) is not None}
    if options.greedy:
        changes["temperature"] = 0.0
    elif samples and options.temperature is None and settings.temperature == 0:
        changes["temperature"] = 1.0  # a greedy model's filters would have no say
    return replace(settings, **changes)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
