"""Bad input: each is one clear error before weights load, with exit code 2, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fixtures
from tests.cases.place import CONFIG, Place


def nothing(folder: Path) -> None: ...


def break_yaml(folder: Path) -> None:
    (folder / "config.yaml").write_text(CONFIG + "seed: 1\nmodel: path: m0\n", encoding="utf-8")


def hold_a_run(folder: Path) -> None:
    (folder / "out/checkpoints/step-000002").mkdir(parents=True)
    (folder / "out/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def raise_in_template(folder: Path) -> None:
    (folder / "m0/chat_template.jinja").write_text("{{ raise_exception('only poems, please') }}")


def fail_in_template(folder: Path) -> None:
    (folder / "m0/chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content.nope.deeper }}{% endfor %}")


def break_template(folder: Path) -> None:
    (folder / "m0/chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }}\n{% endif %}")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change_model(**entries: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "m0/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def make_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("{}")


BAD: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...], str | None]] = {
    # name: (what is wrong with the folder, an override, what the error says, what the hint says)
    "unknown key": (nothing, "data.trian=x", ("unknown key 'data.trian'",), "data.train"),
    "wrong type": (nothing, "batch_size=four", ("batch_size", "'four'", "whole number"), None),
    "out of bounds": (nothing, "optimizer.lr=-1", ("optimizer.lr", "-1"), None),
    "missing data file": (nothing, "data.train=trian.jsonl", ("{folder}/trian.jsonl", "no such"), "train.jsonl"),
    "missing validation file": (nothing, "data.validation=b.jsonl", ("{folder}/b.jsonl", "no such"), None),
    "missing model": (nothing, "model.path=./m1", ("{folder}/m1", "no such folder"), "optune download"),
    "missing template": (nothing, "data.chat_template=a.jinja", ("{folder}/a.jinja", "no such file"), None),
    "missing checkpoint": (nothing, "resume=runs/x", ("{folder}/runs/x",), None),
    "a hub id without a network": (nothing, "model.path=owner/name", ("owner/name", "hub"), "folder"),
    "unreadable YAML": (break_yaml, "seed=1", ("config.yaml:10", "YAML"), None),
    "another run": (hold_a_run, "output_dir=out", ("output_dir", "already holds a run"), "optune resume"),
    "output folder is a file": (make_file("busy"), "output_dir=busy", ("output_dir", "is a file"), "output_dir"),
    "output folder below a file": (
        make_file("busy"),
        "output_dir=busy/a",
        ("output_dir", "busy is a file"),
        "output_dir",
    ),
    "a target outside": (
        nothing,
        "optimizer._target_=os.system",
        ("os.system", "optimizer._target_"),
        "--allow-target",
    ),
    "a target of another kind": (nothing, "optimizer._target_=torch.optim.lr_scheduler.StepLR", ("optimizer",), None),
    "a target that is not there": (nothing, "optimizer._target_=torch.optim.AdmaW", ("AdmaW",), "AdamW"),
    "a keyword that it does not take": (nothing, "optimizer.beta=0.9", ("beta",), None),
    "a template that raises": (
        raise_in_template,
        "seed=1",
        ("train.jsonl:1", "only poems, please"),
        "m0/chat_template.jinja",
    ),
    "a template that fails": (
        fail_in_template,
        "seed=1",
        ("train.jsonl:1", "line 2", "'str object' has no attribute"),
        "m0/chat_template.jinja",
    ),
    "a template that is none": (break_template, "seed=1", ("m0/chat_template.jinja:3",), None),
    "no template": (remove("m0/chat_template.jinja"), "seed=1", ("chat template",), "data.chat_template"),
    "a device that is not there": (nothing, "device=cuda:7", ("device", "'cuda:7'", "not there"), "device=auto"),
    "a device that is none": (nothing, "device=gpu", ("device", "'gpu'"), "cuda"),
    "no config.json": (remove("m0/config.json"), "seed=1", ("{folder}/m0/config.json", "missing"), None),
    "no tokenizer": (remove("m0/tokenizer.json"), "seed=1", ("{folder}/m0", "tokenizer.json"), None),
    "no weights": (remove("m0/model.safetensors"), "seed=1", ("{folder}/m0", "model.safetensors"), None),
    "cut weights": (truncate("m0/model.safetensors"), "seed=1", ("model.safetensors",), "again"),
    "a broken config.json": (truncate("m0/config.json"), "seed=1", ("m0/config.json",), None),
    "a broken tokenizer": (truncate("m0/tokenizer.json"), "seed=1", ("m0/tokenizer.json",), None),
    "a model of another size": (change_model(hidden_size=64), "seed=1", ("misshapen tensor",), None),
    "a model of another kind": (change_model(model_type="mamba"), "seed=1", ("mamba",), None),
    "a model with what is not honoured": (change_model(hidden_act="relu6"), "seed=1", ("hidden_act", "relu6"), None),
    "a length of time that is none": (nothing, "max_time=soon", ("max_time", "'soon'"), "90s"),
    "a logger whose package is not there": (
        nothing,
        "loggers=[{_target_: optune.metrics.WandB, mode: sometimes}]",
        ("WandB", "'sometimes'"),
        None,
    ),
    "a format that is none": (nothing, "data.format=chat", ("data.format", "'chat'"), None),
    "a format for another recipe": (nothing, "data.format=preference", ("data.format", "preference"), "single answers"),
    "a table without a row": (make_file("a.csv"), "data.train=a.csv", ("a.csv", "no rows"), None),
    "packing without a length": (nothing, "data={packing: true, max_length: null}", ("data.max_length",), None),
    "a step that is not there": (nothing, "schedule.name=cosin", ("schedule.name", "'cosin'"), "cosine"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_bad_input_is_one_error_before_weights_load(
    place: Place, no_weights: None, no_network: None, recipe: str, name: str
) -> None:
    """The list of issue 2, and its kin."""
    place.write(fixtures.numbered_rows(4))
    prepare, override, said, hinted = BAD[name]
    prepare(place.folder)
    result = place.refuse(override, recipe=recipe)
    for part in said:
        assert part.format(folder=place.folder) in result.errors[0] or part in result.err, result.err
    assert part_of_error(result.err, said[0].format(folder=place.folder)), result.err
    hints = [line for line in result.err.splitlines() if line.startswith("hint: ")]
    assert len(hints) <= 1
    if hinted is not None:
        assert hinted in hints[0]


def part_of_error(text: str, wanted: str) -> bool:
    """Whether it stands in the error itself, which may have several lines, and not in the hint."""
    return wanted in text.split("\nhint: ")[0]


@pytest.mark.parametrize(
    ("words", "said", "hinted"),
    [
        (("full_finetun", "--config", "config.yaml"), "unknown recipe 'full_finetun'", "full_finetune"),
        (("./mine.py", "--config", "config.yaml"), "mine.py", None),
        (("full_finetune", "--config", "other.yaml"), "other.yaml", None),
        (("full_finetune", "--config", "smollm2/135m_ful"), "smollm2/135m_ful", "smollm2/135m_full"),
        (("full_finetune",), "--config is missing", None),
        (("--config", "config.yaml"), "RECIPE is missing", None),
        (("full_finetune", "--config", "config.yaml", "--nonsense"), "--nonsense", None),
        (("full_finetune", "--config", "config.yaml", "seed"), "seed", "key=value"),
        (("full_finetune", "--config", "config.yaml", "data.train=[a"), "data.train", None),
    ],
)
def test_a_command_that_names_what_is_not_there_is_one_error(
    place: Place, no_weights: None, words: tuple[str, ...], said: str, hinted: str | None
) -> None:
    """Unknown recipe and config, and arguments that cannot be read."""
    before = place.listing()
    for command in ("run", "validate"):
        result = place.call(command, *words)
        assert result.code == 2
        assert len(result.errors) == 1
        assert said in result.errors[0]
        assert "Traceback" not in result.err
        assert hinted is None or hinted in result.err
    assert place.listing() == before


def test_everything_that_is_wrong_with_a_config_is_said_at_once(place: Place, no_weights: None) -> None:
    """A user corrects a config once."""
    place.write(fixtures.numbered_rows(4))
    place.configure(CONFIG + "epochs: many\nsede: 1\n")
    result = place.run("optimizer.lr=fast", "lora.rank=2")
    assert result.code == 2
    assert len(result.errors) == 4
    for word in ("epochs", "sede", "optimizer.lr", "lora"):
        assert sum(word in error for error in result.errors) == 1


def test_debug_shows_where_an_error_came_from(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--debug` alone shows a traceback."""
    result = place.run("device=cuda:7", "--debug")
    assert "Traceback" in result.err
    assert result.errors
