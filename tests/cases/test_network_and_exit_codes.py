"""Cases A07 and A08, in processes of their own: no network for local runs, and no success that is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import fixtures
from tests.cases.place import CONFIG, Place, shows, turns
from tests.recipes.running import Finished

WATCHED = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        os.write(2, f"NETWORK {event} {arguments[1:]}\\n".encode())
sys.addaudithook(watch)
from tune_cli.main import main
sys.exit(main())
"""
"""The command line with a line on stderr for every network call, whether it is answered or not."""

ONLINE = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "2"}


@cache
def without_network() -> str:
    """The command that takes the network away, empty where this machine does not allow it."""
    for command in ("unshare -n", "unshare -rn"):
        if shutil.which("unshare") and subprocess.run([*command.split(), "true"], capture_output=True).returncode == 0:
            return command
    return ""


def watched(words: str) -> str:
    return f"{without_network()} {sys.executable} -c '{WATCHED}' {words}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["full_finetune", "lora_finetune"])
def test_a_local_run_needs_no_network_and_does_not_try_it(place: Place, recipe: str) -> None:
    """A07."""
    place.write(fixtures.numbered_rows(2))
    result = place.shell(watched(f"run {recipe} --config config.yaml"), **ONLINE)
    assert result.code == 0, result.err
    assert "NETWORK" not in result.err


def test_a_local_run_makes_no_network_call(place: Place, no_network: None) -> None:
    """A07: the quick half, in this process."""
    place.write(fixtures.numbered_rows(2))
    place.train()


@pytest.mark.slow
def test_a_typo_in_a_data_path_is_told_at_once_without_a_network(place: Place) -> None:
    """A07."""
    place.write(fixtures.numbered_rows(2))
    began = time.monotonic()
    result = place.shell(watched("run full_finetune --config config.yaml data.train=owner/trian"), **ONLINE)
    assert time.monotonic() - began < 30  # 3 s on a machine that does nothing else
    assert (result.code, "NETWORK" in result.err) == (2, False)
    assert str(place.folder / "owner/trian") in result.err


@pytest.mark.slow
def test_a_hub_id_without_a_network_is_told_soon_with_what_to_do(place: Place) -> None:
    """The list of issue 2: the hub is asked, and that it does not answer is the one error."""
    if not without_network():
        pytest.skip("this machine does not let a process give up its network")
    place.write(fixtures.numbered_rows(2))
    began = time.monotonic()
    result = place.shell(watched("run full_finetune --config config.yaml model.path=owner/name"), **ONLINE)
    assert time.monotonic() - began < 60  # 12 s on a machine that does nothing else
    assert (result.code, len(result.errors)) == (2, 1), result.err
    assert result.errors[0].startswith("owner/name: the hub could not be reached")
    assert "hint: without a network, give the path of a folder" in result.err
    assert not (place.folder / "out").exists()


@pytest.mark.parametrize("key", ["data.train", "data.validation", "data.chat_template"])
@pytest.mark.parametrize("value", ["data/trian.jsonl", "trian.jsonl", "owner/rows", "./owner/rows", "a/b/c", "rows"])
def test_a_file_that_is_absent_is_only_looked_up_on_disk(
    place: Place, no_weights: None, no_network: None, key: str, value: str
) -> None:
    """A07."""
    place.write(fixtures.numbered_rows(2))
    assert str(place.folder / value) in place.refuse(f"{key}={value}").err


@pytest.mark.parametrize("value", ["./m1", "../m1", "/nowhere/m1", "models/deep/m1", "~/m1", "m1", "m0/missing"])
def test_a_model_path_that_is_absent_is_only_looked_up_on_disk(
    place: Place, no_weights: None, no_network: None, value: str
) -> None:
    """A07."""
    place.write(fixtures.numbered_rows(2))
    message = place.refuse(f"model.path={value}").err
    assert shows(message, Path(os.path.normpath(place.folder / os.path.expanduser(value))))  # noqa: PTH111
    assert "there is no such folder" in message
    assert "hub" not in message


def poison(place: Place) -> None:
    """M0 whose word "boom" is not a number, and rows of which the last one uses it."""
    path = place.folder / "m0/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][fixtures.VOCABULARY.index("boom")] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    place.write([*fixtures.numbered_rows(3), turns("ua", "boom", "w1")])


@pytest.mark.slow
def test_no_failure_counts_as_success_in_a_shell(place: Place) -> None:
    """A08, one process: a broken config, a broken row, a failure in the middle of the run, behind a pipe."""
    poison(place)
    run = "optune run full_finetune --config config.yaml"
    place.write([turns("ua", "w1", "w2"), {"messages": 3}], "broken.jsonl")
    for words, code, cause in (
        ("optimizer.lr=fast", 2, "optimizer.lr"),
        ("data.train=broken.jsonl", 2, "broken.jsonl:2"),
        ("max_skipped_steps=1 output_dir=o1", 1, "not finite"),
    ):
        result = place.shell(f"{run} {words} 2>&1 | tee log && echo BAD")
        assert result.code == code, result.out
        assert "BAD" not in result.out
        assert "Traceback" not in result.out
        causes = [line for line in result.out.splitlines() if line.startswith("error: ")]
        assert len(causes) == 1
        assert cause in causes[0]
    assert len(Finished(place.folder / "o1").metrics) == 3
    good = place.shell(f"{run} max_steps=3 output_dir=o2 2>&1 | tee log && echo GOOD")
    assert (good.code, good.out.splitlines()[-1]) == (0, "GOOD")


@pytest.mark.parametrize(
    "word", ["run", "resume out", "generate", "export a b", "nonsense", "cat nothing", "--odd", ""]
)
def test_a_command_that_cannot_be_done_has_exit_code_2(place: Place, word: str) -> None:
    """A08."""
    place.configure(CONFIG)
    result = place.call(*word.split())
    assert result.code == 2
    assert "Traceback" not in result.err
    assert result.err
