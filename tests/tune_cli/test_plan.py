"""`optune plan`: what it prints for people and for programs, what it refuses, and the line that ends a run."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optune import files, kernels
from optune.session import memory
from tests import fixtures
from tests.cases.place import Place
from tune_cli.plan import read_size

ROOT = Path(__file__).resolve().parent.parent.parent
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip


def plan(place: Place, *words: str, recipe: str = "full_finetune") -> Any:
    result = place.call("plan", recipe, "--config", "config.yaml", "--json", *words)
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_table_fits_into_80_columns_and_its_last_line_adds_up(place: Place) -> None:
    result = place.call("plan", "full_finetune", "--config", "config.yaml", "--memory", "24GiB")
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert not [line for line in result.out.splitlines() if line != line.rstrip() or len(line) > 80]
    assert "parameters  23,712, all trained" in result.out
    together = next(line for line in result.out.splitlines() if "together" in line).split()[1:]
    weights = next(line for line in result.out.splitlines() if "■ weights" in line).split()[2:]
    assert together[0] == weights[0] == f"{23_712 * 4 / 2**20:.2f}"  # load: fp32 weights, in MiB
    assert "fits into 24.0 GiB" in result.out


@pytest.mark.slow
def test_what_does_not_fit_gets_settings_that_keep_the_rows_of_a_step(place: Place) -> None:
    words = ("data.max_length=128", "batch_size=2")
    all_of_it = plan(place, *words)
    enough = all_of_it["overhead_bytes"] + all_of_it["peak_bytes"] // 2
    found = plan(place, *words, "--memory", f"{enough}B")
    assert (all_of_it["fits"], found["fits"]) == (None, False)
    assert found["settings"]
    times = [setting["time"] for setting in found["settings"]]
    assert times == sorted(times)
    for setting in found["settings"]:
        assert setting["peak_bytes"] + found["overhead_bytes"] <= enough
    # What is advised is what would be predicted for it.
    cheapest = found["settings"][0]
    assert plan(place, *words, *cheapest["overrides"])["peak_bytes"] == cheapest["peak_bytes"]


def test_rows_of_the_data_take_less_than_the_longest_that_there_could_be(place: Place) -> None:
    shown = place.call("data", "full_finetune", "--config", "config.yaml", "--json", "--rows", "0")
    longest = json.loads(shown.out)["lengths"]["longest"]
    from_data, assumed, asked = plan(place, "--data"), plan(place), plan(place, "--length", str(longest))
    assert from_data["peak_bytes"] < assumed["peak_bytes"]
    assert f"× {longest} tokens" in from_data["rows"]
    assert f"× {longest} tokens" in asked["rows"]
    assert from_data["moments"]["backward"]["weights"] == 23_712 * 4


def test_adapters_are_planned_by_their_recipe(place: Place) -> None:
    found = plan(place, recipe="lora_finetune")
    assert "trained of" in found["parameters"]
    assert found["moments"]["step"]["gradients"] < found["moments"]["step"]["weights"] / 2


def test_adapters_that_do_not_fit_are_told_of_a_base_in_nf4(place: Place) -> None:
    found = plan(place, "--memory", "420000000B", "data.max_length=1024", "batch_size=64", recipe="lora_finetune")
    assert found["fits"] is False
    assert found["adapters"]["by"] == "lora.quantize_base=nf4"
    packed = plan(place, "lora.quantize_base=nf4", "data.max_length=1024", "batch_size=64", recipe="lora_finetune")
    assert packed["peak_bytes"] == pytest.approx(found["adapters"]["peak_bytes"], rel=1e-4)
    assert packed["parameters"].split(",")[:-1] == found["parameters"].split(",")[:-1]  # packed numbers are counted too


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_each_of_two_processes_holds_half(place: Place) -> None:
    found = plan(place, "--processes", "2", "compile=true", "parallel.shard=2")
    assert found["processes"].startswith("2: ")
    assert found["moments"]["load"]["weights"] == 23_712 * 4 // 2


def test_compile_on_a_cpu_is_told_as_the_run_tells_it_and_on_a_gpu_as_what_is_not_predicted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels.is_ready():
        assert plan(place, "compile=true")["notes"] == [f"compile: {kernels.NOTHING_TO_COMPILE}"]
    uncompiled = "compile: the forecast is that of the same step uncompiled; compiled blocks keep less"
    assert plan(place, "compile=true", "device=cuda")["notes"][0] == uncompiled
    monkeypatch.setattr(kernels, "_is_off", True)
    assert plan(place, "compile=true")["notes"] == [uncompiled]
    assert plan(place)["notes"] == []


@pytest.mark.parametrize("text", ["24", "24 apples", "GiB", "0GiB", "24GiBs", "1e9", ""])
def test_amount_of_memory_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read_size(text)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (("--memory", "-1GiB"), "--memory: '-1GiB' is not an amount of memory", "--memory SIZE: what there is, such"),
        (("--memory=lots",), "--memory: 'lots' is not an amount of memory", "--memory SIZE: what there is, such"),
        (("--memory",), "--memory: a value is missing", "--memory SIZE: what there is, such"),
        (("--length", "0"), "--length: '0' is not a whole number from 2 to", "--length N: tokens of the rows"),
        (("--length", "-3"), "--length: '-3' is not a whole number from 2 to", "--length N: tokens of the rows"),
        (("--processes", "x"), "--processes: 'x' is not a whole number from 1 to", "--processes N: as each of N"),
        (("--json=3",), "--json: takes no value, and was given '3'", "--json: one JSON document"),
    ],
)
def test_value_that_an_option_does_not_take_is_named_with_what_it_takes(
    place: Place, words: tuple[str, ...], said: str, hint: str
) -> None:
    result = place.call("plan", "full_finetune", "--config", "config.yaml", *words)
    assert result.code == 2
    first, second = result.err.splitlines()
    assert first.startswith(f"error: {said}")
    assert second.startswith(f"hint: {hint}")


def test_units_of_memory_are_told_apart() -> None:
    assert read_size("24GiB") == read_size("24 gib") == 24 * 2**30
    assert (read_size("24GB"), read_size("1.5TB"), read_size("24000MiB")) == (24 * 10**9, 15 * 10**11, 24000 * 2**20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimzer.lr=1",), "optimzer"),
        (("--lenght", "3"), "did you mean '--length'"),
        (("--length", "8", "--data"), "exclude each other"),
        (("data.max_length=null",), "--length N"),
        (("--processes", "3", "parallel.shard=2"), "parallel"),
        (("optimizer_step=immediate", "gradient_accumulation_steps=2"), "gradient_accumulation_steps"),
        (("model.path=m1",), "m1"),
        (("activation_offloading=true",), "activation_offloading: is true on cpu"),
        (("activation_offloading=true", "device=cuda", "accumulation=breadth_first"), "no block keeps anything"),
        (("device=cuda:x",), "'cuda:x' is not a device"),
        (("device=cuda:1", "parallel.shard=2"), "2 processes"),
        (("max_time=soon",), "max_time: 'soon' is not a length of time"),
        (("data.streaming=true",), "max_steps: is null"),
        (("optimizer._target_=torch.optim.SparseAdam",), "optimizer: SparseAdam fails in a trial step"),
    ],
)
def test_command_that_cannot_be_planned_is_refused_with_the_reason(
    place: Place, words: tuple[str, ...], said: str
) -> None:
    result = place.call("plan", "full_finetune", "--config", "config.yaml", *words)
    assert result.code == 2
    assert result.out == ""
    assert said in result.err


def test_recipe_without_the_functions_is_told_which_one_it_lacks(place: Place, tmp_path: Path) -> None:
    own = (
        (ROOT / "recipes/full_finetune.py")
        .read_text()
        .replace("def build(", "def make(")
        .replace("= build(", "= make(")
    )
    (tmp_path / "own.py").write_text(own)
    result = place.call("plan", "./own.py", "--config", "config.yaml")
    assert result.code == 2
    assert "own.py: has no function build" in result.err


def test_run_ends_with_predicted_beside_measured(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fixtures.write_model(tmp_path / "m0")
    monkeypatch.setattr(memory, "TOY_BYTES", 0)
    result = place.call("run", "full_finetune", "--config", "config.yaml")
    assert result.code == 0, result.err
    line = " ".join(result.err.partition("predicted ")[2].split()[:12])
    found = plan(place, "--data")
    assert line.startswith(f"{files.format_bytes(found['peak_bytes'])} (in {found['peak_moment']}), measured ")


def test_run_of_a_toy_ends_without_it(place: Place, tmp_path: Path) -> None:
    fixtures.write_model(tmp_path / "m0")
    result = place.call("run", "full_finetune", "--config", "config.yaml", "max_steps=1")
    assert result.code == 0, result.err
    assert "predicted" not in result.err


@pytest.mark.slow
def test_model_of_8_billion_parameters_is_planned_in_seconds_without_its_weights(place: Place, tmp_path: Path) -> None:
    (tmp_path / "m0/config.json").write_text(json.dumps(LLAMA_3_8B))
    # What a plan has no use for takes longer to import than the plan itself.
    unused = "{'sympy', 'torch._dynamo.convert_frame', 'torch.distributed.tensor', 'transformers'}"
    program = (
        f"import sys; from tune_cli.main import main; main(); print({unused} & sys.modules.keys(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "plan", "full_finetune", "--config", "config.yaml", "--json"]
    words = ["model.dtype=bf16", "optimizer._target_=torch.optim.AdamW", "max_grad_norm=1.0", "--memory", "60GB"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 6  # 2.3 s on an idle core
    assert done.stderr == "set()\n"
    found = json.loads(done.stdout)
    assert found["moments"]["load"] == {"weights": 8_030_261_248 * 2}
    assert found["moments"]["step"]["optimizer"] == pytest.approx(8_030_261_248 * 4, rel=1e-3)
    assert "gradient_stash=two_pass" in found["settings"][0]["overrides"]
