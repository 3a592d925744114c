"""A folder in which the command line is run, and what can be read off a run from outside.

Oracles: exit code and stderr (`Place.refuse`), logged losses and counts of targets, weights (`moved`, `assert_equal`),
one plain-SGD step at rate 1 (its change is minus the gradient), a run at rate 0 with one row a step (its losses are a
fingerprint of the rows), and transformers (`reference_loss`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import fixtures, forked
from tests.recipes.running import Finished, read_tensors
from tune_cli.main import main

CONFIG = """\
model: {path: m0, dtype: fp32}
data: {train: train.jsonl, shuffle: false}
batch_size: 1
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
max_grad_norm: null
schedule: {name: constant}
output_dir: out
device: cpu
"""
FINGERPRINT = ("optimizer.lr=0", "batch_size=1", "gradient_accumulation_steps=1", "epochs=1")
NO_LAUNCHER = ("RANK", "WORLD_SIZE", "OPTUNE_DEBUG", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


class Place:
    """The current directory, with M0 in `m0`, T0 and C0 in it, and `config.yaml`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self._runs = 0
        self.said = ""
        """What the last run told on stderr, in one line."""
        fixtures.write_model(folder / "m0")
        self.configure(CONFIG)

    def configure(self, text: str, name: str = "config.yaml") -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def write(self, rows: Iterable[Any], name: str = "train.jsonl") -> Path:
        return fixtures.write_rows(self.folder / name, rows)

    def call(self, *words: str) -> Result:
        """`optune …` in this process."""
        self._capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = self._capsys.readouterr()
        return Result(code, out, err)

    def run(self, *overrides: str, recipe: str = "full_finetune", config: str = "config.yaml") -> Result:
        """`optune run` in `out`, unless `overrides` name another folder."""
        return self.call("run", recipe, "--config", config, *overrides)

    def train(self, *overrides: str, recipe: str = "full_finetune", config: str = "config.yaml") -> Finished:
        """A run that must succeed, in a folder of its own unless `overrides` name one."""
        self._runs += 1
        named = [word.removeprefix("output_dir=") for word in overrides if word.startswith("output_dir=")]
        folder = named[-1] if named else f"runs/{self._runs}"
        result = self.run(*overrides, *(() if named else (f"output_dir={folder}",)), recipe=recipe, config=config)
        assert result.code == 0, result.err
        assert "Traceback" not in result.err
        self.said = " ".join(result.err.split())
        return Finished(self.folder / folder)

    def preview(
        self, *words: str, recipe: str = "full_finetune", config: str = "config.yaml", rows: int = 100
    ) -> dict[str, Any]:
        """What `optune data --json` tells; the first `rows` rows, unless `words` choose others."""
        chosen = () if {"--row", "--step"} & set(words) else ("--rows", str(rows))
        result = self.call("data", recipe, "--config", config, "--json", *chosen, *words)
        assert result.code == 0, result.err
        assert result.err == ""
        return json.loads(result.out)

    def fingerprint(self, rows: Sequence[Any], *overrides: str) -> list[float]:
        """The loss of every row alone; a row that is left out has none."""
        self.write(rows, "fingerprint.jsonl")
        return self.train("data.train=fingerprint.jsonl", *FINGERPRINT, *overrides).losses

    def refuse(self, *overrides: str, recipe: str = "full_finetune", config: str = "config.yaml") -> Result:
        """A run that must be refused with one cause, nothing being written; the same from `validate`."""
        before = self.listing()
        results = [self.call(name, recipe, "--config", config, *overrides) for name in ("validate", "run")]
        for result in results:
            assert result.code == 2, result.err
            assert len(result.errors) == 1, result.err
            assert "Traceback" not in result.err
            assert result.out == ""
        assert self.listing() == before
        return results[1]

    def listing(self) -> list[str]:
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return sorted(path for path in paths if "__pycache__" not in path)

    def stop_at(self, step: int, *overrides: str, recipe: str = "full_finetune", output: str = "out") -> Finished:
        """A run that SIGTERM ends after so many steps; it must save and exit with 143."""
        stopper = f"loggers=[{{_target_: tests.cases.place.StopAt, step: {step}}}]"
        words = (*overrides, f"output_dir={output}", stopper, "--allow-target", "tests")
        result = self.run(*words, recipe=recipe)
        assert result.code == 143, result.err
        finished = Finished(self.folder / output)
        assert finished.checkpoints[-1].name == f"step-{step:06d}"
        return finished

    def resume(self, output: str = "out", *overrides: str) -> Finished:
        result = self.call("resume", output, "loggers=[]", *overrides)
        assert result.code == 0, result.err
        self.said = " ".join(result.err.split())
        return Finished(self.folder / output)

    def shell(self, line: str, **environment: str) -> Result:
        """A bash line in which `optune` is the program, in a process of its own, with pipefail."""
        program = f'optune() {{ "{forked.python()}" -m tune_cli.main "$@"; }}\nset -o pipefail\n{line}'
        inherited = {key: value for key, value in os.environ.items() if key not in NO_LAUNCHER}
        done = subprocess.run(
            ["bash", "-c", program],
            capture_output=True, text=True, check=False, cwd=self.folder, env=inherited | environment,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr)


class StopAt:
    """A logger that sends SIGTERM to its own process after a step, as a batch queue does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, succeeded: bool) -> None: ...


def turns(roles: str, *contents: str) -> dict[str, Any]:
    """A conversation; `roles` are first letters (s, u, a), `contents` what each says."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return {
        "messages": [
            {"role": names[letter], "content": content} for letter, content in zip(roles, contents, strict=True)
        ]
    }


def alpaca(instruction: str, output: Any, **more: Any) -> dict[str, Any]:
    return {"instruction": instruction, "output": output, **more}


def encode(text: str) -> list[int]:
    """T0's ids, written independently: line ends and words."""
    words = text.replace("\n", " \n ").split(" ")
    return [fixtures.VOCABULARY.index(word) for word in words if word]


def expected(row: dict[str, Any], *, begin: str = "<s>") -> tuple[list[int], list[int]]:
    """Ids and labels (not shifted, -100 untrained) of a messages row under C0, by its definition."""
    ids, labels = encode(begin), [-100] * len(encode(begin))
    for message in row["messages"]:
        head, said = encode(f"<turn> {message['role']} \n"), encode(f"{message['content']} <end>")
        ids += [*head, *said, *encode("\n")]
        trained = message["role"] == "assistant"
        labels += [*[-100] * len(head), *(said if trained else [-100] * len(said)), -100]
    return ids, labels


def columns(unit: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and labels (not shifted, -100 untrained) of a unit without its padding, as `expected` has them."""
    ids = [token for token, is_padding in zip(unit["ids"], unit["padding"], strict=True) if not is_padding]
    trained = unit["trained"][: len(ids)]
    shifted = [None, *unit["labels"][: len(ids) - 1]]
    assert [label is not None for label in shifted] == trained
    assert all(label in (None, token) for label, token in zip(shifted, ids, strict=True))
    return ids, [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]


def reference_loss(folder: Path, rows: Iterable[tuple[list[int], list[int]]]) -> float:
    """The mean loss over all targets of `rows` (ids, labels), computed with transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loss_of(model, rows)


@torch.no_grad()
def loss_of(model: Any, rows: Iterable[tuple[list[int], list[int]]]) -> float:
    """The mean loss over all targets of `rows` under a transformers or PEFT model."""
    total, count = 0.0, 0
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
        shifted = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, shifted, reduction="sum").item()
        count += int((shifted != -100).sum())
    return total / count


def shows(text: str, path: Path) -> bool:
    """Whether a message holds `path`, absolute, with or without `..` on the way."""
    return str(path) in {os.path.normpath(word.strip("():,")) for word in text.split()}


def targets(finished: Finished) -> list[float]:
    return [line["targets"] for line in finished.metrics]


def moved(finished: Finished, base: Path) -> dict[str, Tensor]:
    """How far each weight went from the base."""
    before = read_tensors(base)
    return {name: tensor - before[name] for name, tensor in finished.weights.items()}


def largest(tensors: Mapping[str, Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def assert_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor], tolerance: float = 0.0) -> None:
    """The same tensors, bit for bit or to `tolerance`."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        difference = float((tensor.double() - second[name].double()).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"
