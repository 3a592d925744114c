"""Text from a decoder: greedy or sampled, in batches, with a cache, stopping at any of several tokens.

A row of a batch gives what it gives alone: rows are padded on the right, each has positions and, when sampling, random
numbers of its own. Settings mean what they mean in transformers' `generate`.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optune.errors import ConfigError, ModelError, OptuneError

_FILE = "generation_config.json"
# Keys of generation_config.json that do not say which token comes next, or only together with beams.
_SILENT = {
    "_from_model_config", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
    "decoder_start_token_id", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "cache_implementation", "length_penalty", "early_stopping", "num_beam_groups",
    "diversity_penalty", "num_return_sequences", "renormalize_logits", "disable_compile", "max_length",
    "trust_remote_code", "chat_format", "max_window_size",
}  # fmt: skip
# Keys that do, at the values at which they do nothing.
_OFF = {
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "min_length": 0,
    "remove_invalid_values": False,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How the next token is chosen. `temperature` 0 is greedy; None switches a filter off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    unsupported: Mapping[str, Any] = field(default_factory=dict)
    """Keys of generation_config.json that ask for something else; whoever generates should say that it is not done."""


def read_settings(folder: Path) -> Settings:
    """The settings that a model brings in `generation_config.json`, with transformers' defaults; greedy without one."""
    raw = {key: value for key, value in _read(folder / _FILE).items() if value is not None}
    known = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}
    unsupported = {k: v for k, v in raw.items() if k not in known | _SILENT and not (k in _OFF and v == _OFF[k])}
    sampling: dict[str, Any] = {}
    if raw.get("do_sample", False):
        sampling = {"temperature": raw.get("temperature", 1.0), "top_k": raw.get("top_k", 50)}
        sampling |= {"top_p": raw.get("top_p"), "min_p": raw.get("min_p")}
    settings = Settings(
        **sampling,
        repetition_penalty=raw.get("repetition_penalty", 1.0),
        max_new_tokens=raw.get("max_new_tokens"),
        unsupported=unsupported,
    )
    _check_settings(settings, where=str(folder / _FILE))
    return settings


def read_stop_ids(folder: Path, tokenizer: Any = None) -> set[int]:
    """Every token that ends a text: by `generation_config.json`, by `config.json`, and the tokenizer's `eos_id`."""
    found = {getattr(tokenizer, "eos_id", None)}
    for name in (_FILE, "config.json"):
        value = _read(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not all(i is None or (isinstance(i, int) and not isinstance(i, bool)) for i in ids):
            raise ModelError(
                f"eos_token_id is {value!r}; it must be a token id or a list of them", where=str(folder / name)
            )
        found.update(ids)
    return {i for i in found if i is not None and i >= 0}


class Generator(Protocol):
    """What `generate` needs of a model; `optune.models.Decoder` has it."""

    lm_head: nn.Module
    training: bool
    config: Any

    @property
    def device(self) -> torch.device: ...
    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None = ..., *, cache: Any) -> Tensor: ...
    def new_cache(self, rows: int, length: int) -> Any: ...
    def train(self, mode: bool = ...) -> Any: ...


def generate(
    model: Generator,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the stop token that ended it.

    `temperature` 0 takes the likeliest token. `on_token(row, token)` is called for each token as it comes; `TextStream`
    turns tokens into text at whole characters. Raises `ConfigError` for an empty prompt or a setting out of range.
    """
    settings = Settings(temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens)
    _check_settings(settings)
    _check_prompts(prompts, model.config.vocab_size)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            return _generate(model, prompts, max_new_tokens, set(stop_ids), settings, seed, on_token)
    finally:
        model.train(was_training)


def _generate(
    model: Generator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: set[int],
    settings: Settings,
    seed: int,
    on_token: Callable[[int, int], None] | None,
) -> list[list[int]]:
    device, rows = model.device, len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    tokens_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    last_B = torch.tensor(lengths, device=device) - 1
    cache = model.new_cache(rows, longest + max_new_tokens)
    positions_BT = torch.arange(longest, device=device)[None].minimum(last_B[:, None])
    hidden_BD = model.hidden(tokens_BT, positions_BT, cache=cache)[torch.arange(rows, device=device), last_B]
    cache.forget_padding(lengths)
    # A generator a row: what a prompt gets must not depend on its neighbours.
    generators = [torch.Generator(device).manual_seed(seed + 1_000_003 * row) for row in range(rows)]
    seen_BV = _seen(prompts, model.config.vocab_size, device) if settings.repetition_penalty != 1 else None
    texts: list[list[int]] = [[] for _ in prompts]
    running = set(range(rows))
    for count in range(1, max_new_tokens + 1):
        logits_BV = model.lm_head(hidden_BD).float()
        # NaN would win every argmax, and is the maximum of its row; a single -inf is just a token ruled out.
        if not bool(logits_BV.amax(-1).isfinite().all()):
            raise OptuneError(
                f"the logits are not finite at new token {count}",
                where="generate",
                hint="the weights hold NaN or infinity, or the dtype is too small for them: try bf16 or fp32",
            )
        logits_BV = penalise(logits_BV, seen_BV, settings.repetition_penalty)
        tokens_B = _choose(logits_BV, settings, generators)
        for row, token in enumerate(tokens_B.tolist()):
            if row not in running:
                continue
            if token in stop_ids:
                running.remove(row)
                continue
            texts[row].append(token)
            if on_token is not None:
                on_token(row, token)
        if not running or count == max_new_tokens:
            break
        if seen_BV is not None:
            seen_BV.scatter_(1, tokens_B[:, None], True)
        hidden_BD = model.hidden(tokens_B[:, None], cache=cache)[:, 0]
    return texts


def penalise(logits_BV: Tensor, seen_BV: Tensor | None, penalty: float) -> Tensor:
    """Makes tokens that were seen less likely (arXiv 1909.05858): positive logits are divided, negative multiplied."""
    if seen_BV is None:
        return logits_BV
    lowered_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def filter_logits(logits_BV: Tensor, settings: Settings) -> Tensor:
    """Logits at the temperature, with -inf for every token that top-k, top-p or min-p leaves out, in that order."""
    logits_BV = logits_BV / settings.temperature
    if settings.top_k:
        least_B1 = logits_BV.topk(min(settings.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if settings.top_p is not None and settings.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=False)
        left_out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        left_out_BV[:, -1] = False
        logits_BV = logits_BV.masked_fill(left_out_BV.scatter(1, order_BV, left_out_BV), -torch.inf)
    if settings.min_p:
        probabilities_BV = logits_BV.softmax(-1)
        too_small_BV = probabilities_BV < settings.min_p * probabilities_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(too_small_BV, -torch.inf)
    return logits_BV


def _choose(logits_BV: Tensor, settings: Settings, generators: list[torch.Generator]) -> Tensor:
    if settings.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = filter_logits(logits_BV, settings).softmax(-1)
    drawn = [torch.multinomial(p_V, 1, generator=g) for p_V, g in zip(probabilities_BV, generators, strict=True)]
    return torch.cat(drawn)


def _seen(prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> Tensor:
    seen_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen_BV[row, torch.tensor(list(prompt), device=device)] = True
    return seen_BV


class TextStream:
    """Turns tokens that come one by one into text, holding back what is not yet a whole character.

    `decode` maps tokens to text. Joined, the pieces are what `decode` makes of all tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # Text before `_shown` is out. Decoding starts a little earlier, at `_start`, because some tokenizers write the
        # first token of a text differently.
        self._start = self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` completes, or nothing."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """What is still held back; at the end of a text, halves of characters are shown as such."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        out = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(out) :]


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the file cannot be read: {error}", where=str(file)) from None
    if not isinstance(content, dict):
        raise ModelError("the file must hold a JSON object", where=str(file))
    return content


def _check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError("the prompt has no tokens", where=f"prompt {row + 1}", hint="give at least one word")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ModelError(
                f"token ids run from {min(prompt)} to {max(prompt)}, the model knows 0 to {vocabulary - 1}",
                where=f"prompt {row + 1}",
                hint="the tokenizer belongs to another model, or the embedding was not resized for added tokens",
            )


def _check_settings(settings: Settings, where: str | None = None) -> None:
    rules: list[tuple[str, Callable[[Any], bool], str]] = [
        ("temperature", lambda v: v >= 0, "a number from 0 up; 0 is greedy"),
        ("top_k", lambda v: isinstance(v, int) and v >= 0, "a whole number from 1 up, or null (or 0) for off"),
        ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
        ("min_p", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("repetition_penalty", lambda v: v > 0, "above 0; 1 is off"),
        ("max_new_tokens", lambda v: isinstance(v, int) and v >= 0, "a whole number from 0 up"),
    ]
    for key, holds, rule in rules:
        value = getattr(settings, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and holds(value)):
            message = f"{value!r} is not allowed; it must be {rule}"
            if where is not None:
                raise ModelError(f"{key}: {message}", where=where)
            raise ConfigError(message, where=key)
