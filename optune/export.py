"""A checkpoint as a folder that other tools load: copied, cast to another dtype, or an adapter merged into its base.

This is the one module that stands above its peers: it imports `models` and `lora`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from optune import files, lora, models
from optune.errors import ConfigError, ModelError, OptuneError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

EXACT = 1e-4
"""Largest difference of logits, as a share of the largest, where only the order of fp32 sums differs (3e-6 seen)."""

ROUNDED = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: EXACT}
"""The same where weights were rounded to this dtype. It is wide, because rounding is chaotic at single positions
(SmolLM2-135M, every layer adapted: 0.025 and 0.003 seen); mistakes are caught before and after it, by `EXACT`."""

ONTO = ("stored", "trained")
"""What `export` may add an adapter to."""

SAMPLE = (2, 32)
"""Rows and tokens on which logits are compared."""


@dataclass(frozen=True)
class Proof:
    """What the comparison of logits found, in fp32. Differences and effect are largest absolute values of logits."""

    layers: int
    merged: float
    """Between the merged weights, before they are rounded, and base + adapter."""
    tolerance: float
    """What `merged` may be: the order of fp32 sums."""
    difference: float
    """Between the merged model, read from the written files, and base + adapter."""
    effect: float
    """Between base + adapter and the base alone."""
    lost: float
    """The difference as a share of the effect, by root mean squares. Near 1, rounding has taken the adapter away."""


@dataclass(frozen=True)
class Report:
    """What `export` wrote. `lines` say it to a person."""

    folder: Path
    kind: str
    """`model`, `adapter` or `merged`."""
    dtype: str
    asked: bool
    """Whether the dtype was asked for; otherwise it is the source's, or for a merged model the base's."""
    base: str | None = None
    proof: Proof | None = None
    quantization: str | None = None
    """How the base was held while the adapter was trained."""
    as_trained: bool = False
    """Whether the adapter was added to what the quantized weights stood for, not to the base's own."""

    def lines(self) -> list[str]:
        owner = "" if self.asked else f", the {'base' if self.proof else self.kind}'s dtype"
        if self.proof is None:
            return [f"wrote the {self.kind} to {self.folder} in {self.dtype}{owner}"]
        proof = self.proof
        count = f"{proof.layers} layer{'s' if proof.layers > 1 else ''}"
        said = [
            f"merged {count} into {self.base} and wrote {self.folder} in {self.dtype}{owner}",
            f"logits of base + adapter and of the merged fp32 weights differ by at most {proof.merged:.2g} (allowed "
            f"{proof.tolerance:.2g}), where the adapter changes the base's by up to {proof.effect:.2g}",
            f"rounded to {self.dtype}, read back from the files, they differ by at most {proof.difference:.2g}",
        ]
        if self.quantization is not None and self.as_trained:
            said.append(f"the base's weights are those that it had in {self.quantization}, as in training")
        elif self.quantization is not None:
            said.append(
                f"the adapter was trained over the base in {self.quantization}, and is added to the base's own "
                "weights: --onto trained keeps the quantized ones"
            )
        if proof.lost > 0.5:
            said.append(
                f"rounding to {self.dtype} blurs {min(proof.lost, 1):.0%} of what the adapter changes: "
                "use --dtype fp32, or keep the adapter unmerged"
            )
        return said


def export(
    checkpoint: str | Path,
    dest: str | Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    onto: str | None = None,
) -> Report:
    """Writes `checkpoint` to `dest` as a folder that transformers, PEFT and vLLM load.

    `checkpoint`: a model or adapter folder of optune, a run folder (its `model/` is taken), or an adapter that PEFT
    wrote. A model is copied without what only optune reads. An adapter is copied, or with `merge` added to its base:
    every weight `W32 + s · (B32 @ A32)`, rounded once; then logits read back from the written files are compared with
    base + adapter in fp32. `dtype` (`bf16`, `fp16`, `fp32`): of the result; None keeps each tensor's, merged ones as in
    the base. `base`: where the adapter's base is, instead of what its adapter_config.json says. `onto`, where the base
    was quantized in training: what the adapter is added to, the weights as they are `stored` (None: these), or what the
    quantized ones stood for when it was `trained`.

    `dest` must not exist or be empty; it appears when it is whole. Raises ConfigError for arguments that do not fit,
    ModelError for folders that cannot be used, OptuneError where the comparison or the disk fails; `dest` is not made.
    """
    source, dest = _find_source(Path(checkpoint).expanduser()), Path(dest).expanduser().absolute()
    is_adapter = (source / lora.CONFIG_FILE).exists()
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not one of {', '.join(DTYPES)}", where="--dtype")
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError("it exists and is not an empty folder", where=str(dest), hint="choose another name")
    if not is_adapter and (merge or base is not None):
        argument = "--merge" if merge else "--base"
        raise ConfigError(f"{source} is a whole model, not an adapter", where=argument, hint=f"leave out {argument}")
    if onto is not None and (onto not in ONTO or not merge):
        rule = "goes with --merge" if not merge else f"is one of {', '.join(ONTO)}, not {onto!r}"
        raise ConfigError(f"it {rule}", where="--onto")
    asked = None if dtype is None else DTYPES[dtype]
    with _written_aside(dest) as aside:
        if not is_adapter:
            return Report(dest, "model", _copy_model(source, aside, asked), asked is not None)
        if not merge:
            return Report(dest, "adapter", _copy_adapter(source, aside, asked, base), asked is not None)
        folder = _find_base(source, base)
        quantization = lora.read_quantization(source)
        if quantization is None and onto == "trained":
            raise ConfigError(
                "the adapter was trained over its base as it is stored",
                where="--onto",
                hint="leave --onto out: it chooses for adapters whose base was quantized in training",
            )
        written, proof = _merge(source, folder, aside, asked, quantization if onto == "trained" else None)
        return Report(dest, "merged", written, asked is not None, str(folder), proof, quantization, onto == "trained")


def _find_source(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError("there is no such folder", where=str(folder.absolute()))
    if (folder / "model").is_dir() and not (folder / "config.json").exists():
        folder = folder / "model"
    if (folder / "config.json").exists() or (folder / lora.CONFIG_FILE).exists():
        return folder
    saved = sorted(str(path) for path in folder.glob("checkpoints/step-*"))
    hint = f"give one of its checkpoints: {saved[-1]}" if saved else None
    raise ModelError(f"there is neither config.json nor {lora.CONFIG_FILE}", where=str(folder.absolute()), hint=hint)


def _find_base(source: Path, base: str | None) -> Path:
    """The folder of the adapter's base."""
    said = lora.read_config(source).base
    where = "--base" if base is not None else str(source / lora.CONFIG_FILE)
    wanted = base if base is not None else said
    hint = "say where the base model is: --base PATH (a folder, or a hub id)"
    if wanted is None:
        raise ModelError("base_model_name_or_path is not set", where=where, hint=hint)
    try:
        return models.resolve(wanted)
    except ModelError as error:
        key = "" if base is not None else f"base_model_name_or_path is {wanted!r}: "
        raise ModelError(f"{key}{error}", where=where, hint=hint) from None


@contextmanager
def _written_aside(dest: Path) -> Iterator[Path]:
    """A folder beside `dest` that takes its name when the block ends, and is removed when it fails."""
    aside = dest.with_name(f"{files.ASIDE}{dest.name}-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        files.sync_tree(aside)
        files.replace_folder(aside, dest)
    except OSError as error:
        raise OptuneError(f"the export failed: {error}", where=str(dest)) from error
    finally:
        files.remove_tree(aside)


def _copy_model(source: Path, aside: Path, dtype: torch.dtype | None) -> str:
    models.check(source)
    stored = _stored_dtypes(source)
    if dtype is not None:
        models.save(models.load(source, dtype=dtype), aside, source=source, dtype=dtype)
        return NAMES[dtype]
    for path in [source / "config.json", *_weight_files(source), *source.glob("model.safetensors.index.json")]:
        shutil.copyfile(path, aside / path.name)
    models.copy_companions(source, aside)
    return _name(set(stored.values()))


def _copy_adapter(source: Path, aside: Path, dtype: torch.dtype | None, base: str | None) -> str:
    lora.read_config(source)
    config = json.loads((source / lora.CONFIG_FILE).read_text(encoding="utf-8"))
    if base is not None:
        config["base_model_name_or_path"] = str(Path(base).resolve()) if Path(base).is_dir() else base
    (aside / lora.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {key: tensor.to(dtype or tensor.dtype) for key, tensor in lora.read_tensors(source).items()}
    lora.write_tensors(tensors, aside, lora.read_metadata(source))
    models.copy_companions(source, aside)
    return _name({tensor.dtype for tensor in tensors.values()})


@torch.no_grad()
def _merge(
    source: Path, base: Path, aside: Path, dtype: torch.dtype | None, quantization: str | None
) -> tuple[str, Proof]:
    """Merges in fp32, rounds, writes, reads back; each of the three is held to the logits before it."""
    model = load_base(base, torch.float32, quantization).eval()
    _check_vocabulary(source, base, model.config.vocab_size)
    plain = _logits(model)
    layers = lora.load(model, source)
    wanted = _logits(model)
    lora.merge(model)
    merged = _logits(model)
    _compare("the merged weights", merged, wanted, EXACT)

    stored = _stored_dtypes(base)
    dtypes = {name: dtype or stored.get(name, stored["*"]) for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.copy_(parameter.to(dtypes[name]))
    kinds = set(dtypes.values())
    tolerance = max(ROUNDED.get(kind, EXACT) for kind in kinds)
    rounded = _logits(model)
    _compare(f"the weights rounded to {_name(kinds)}", rounded, wanted, tolerance)

    if len(kinds) == 1:
        models.save(model, aside, source=base, dtype=kinds.pop())
    else:
        tensors = {name: parameter.to(dtypes[name]) for name, parameter in model.named_parameters()}
        models.save(tensors, aside, source=base)
        del tensors
    models.copy_companions(source, aside)
    del model
    written = _logits(models.load(aside, dtype=torch.float32).eval())
    _compare("the written files", written, rounded, EXACT)
    changed = _rms(wanted - plain)
    proof = Proof(
        layers=len(layers),
        merged=(merged - wanted).abs().max().item(),
        tolerance=EXACT * wanted.abs().max().item(),
        difference=(written - wanted).abs().max().item(),
        effect=(wanted - plain).abs().max().item(),
        lost=_rms(written - wanted) / changed if changed else 0.0,
    )
    return _name(set(dtypes.values())), proof


def load_base(
    folder: Path, dtype: torch.dtype, quantization: str | None, device: torch.device | str = "cpu"
) -> models.Decoder:
    """The model in `folder`, frozen and with its linear weights quantized where `quantization` is not None."""
    if quantization is None:
        return models.load(folder, dtype=dtype, device=device)
    model = models.outline(models.check(folder)).to(dtype).requires_grad_(False)
    lora.quantize(model)
    models.fill(model, folder, device=device)
    return model


def _check_vocabulary(source: Path, base: Path, rows: int) -> None:
    """Tokens that were added for the adapter need rows in the base's embedding."""
    needed, known = _count_tokens(source), _count_tokens(base)
    if needed > max(rows, known):
        raise ModelError(
            f"the tokenizer beside the adapter has token ids up to {needed - 1}, the base's embedding {rows} rows",
            where=str(source),
            hint="resize the base model's embedding first, save it, train on that, and give it as the base",
        )


def _count_tokens(folder: Path) -> int:
    """The largest token id and 1; 0 without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return 0
    return 1 + max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values(), default=-1)


def _logits(model: models.Decoder) -> Tensor:
    """fp32 logits of the same random tokens at each call."""
    generator = torch.Generator().manual_seed(0)
    return model(torch.randint(0, model.config.vocab_size, SAMPLE, generator=generator)).float()


def _compare(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    difference, allowed = (found - wanted).abs().max().item(), tolerance * wanted.abs().max().item()
    if not difference <= allowed:  # a NaN fails too
        raise OptuneError(
            f"nothing was exported: {what} give logits that differ by {difference:.3g} from those before, "
            f"where at most {allowed:.3g} is rounding"
        )


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the files; under `*` that of the most, for a tied head stored under another name."""
    dtypes: dict[str, torch.dtype] = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            dtypes |= {name: file.get_slice(name)[:0].dtype for name in file.keys()}  # noqa: SIM118
    found = list(dtypes.values())
    return dtypes | {"*": max(found, key=found.count)}


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _name(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes))
