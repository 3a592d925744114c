"""Progress is readable JSON, and a run that goes on must be the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optune import __version__, checkpoint, kernels
from optune.checkpoint import Difference
from optune.errors import CheckpointError, ConfigError
from tests.checkpoint import runs

CONFIG = {"optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5, "betas": (0.9, 0.999)}, "seed": 0, "schedule": {}}
OLD = checkpoint.make_fingerprint(CONFIG, data="aaaabbbbccccdddd", model="m")


def test_progress_holds_what_was_given_with_step_and_versions(tmp_path: Path) -> None:
    runs.make_run(tmp_path, 1, epoch=0.5, rows=4, targets=17.0, validation_loss=float("nan"), log={"sum": 0.1 + 0.2})
    folder = tmp_path / "checkpoints/step-000001"
    progress = checkpoint.read_progress(folder)
    assert progress["versions"]["torch"] == torch.__version__
    assert progress["versions"]["optune"] == __version__
    assert (progress["step"], progress["epoch"], progress["rows"], progress["targets"]) == (1, 0.5, 4, 17.0)
    assert progress["log"] == {"sum": 0.1 + 0.2}
    # NaN is not JSON; other tools read this file too.
    assert progress["validation_loss"] is None
    assert "NaN" not in (folder / "optune/progress.json").read_text()


def test_progress_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"progress\.json cannot be read"):
        checkpoint.read_progress(tmp_path)


def test_the_same_run_has_no_difference_after_a_trip_through_json() -> None:
    new = checkpoint.make_fingerprint(CONFIG, data="aaaabbbbccccdddd", model="m")
    assert checkpoint.compare_fingerprints(json.loads(json.dumps(OLD)), new) == []


def test_changed_added_and_removed_keys_are_shown_with_both_values() -> None:
    config = {"optimizer": {"_target_": "torch.optim.AdamW", "lr": 2e-5, "eps": 1e-6}, "seed": 0, "schedule": {}}
    new = checkpoint.make_fingerprint(config, data="eeeeffff", model="m")
    differences = checkpoint.compare_fingerprints(OLD, new)
    assert differences == [
        Difference("optimizer.lr", 1e-5, 2e-5),
        Difference("optimizer.eps", "(not set)", 1e-6),
        Difference("optimizer.betas", [0.9, 0.999], "(not set)"),
        Difference("data", "aaaabbbbccccdddd", "eeeeffff"),
    ]
    assert [str(difference) for difference in differences] == [
        "optimizer.lr: 1e-05 → 2e-05",
        "optimizer.eps: (not set) → 1e-06",
        "optimizer.betas: [0.9, 0.999] → (not set)",
        "data: its content has changed (aaaabbbbcccc → eeeeffff)",
    ]


def test_changes_are_refused_all_at_once_with_the_flags_that_allow_them() -> None:
    differences = [Difference("optimizer.lr", 1, 2), Difference("seed", 0, 1)]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 1 → 2\n  seed: 0 → 1") as caught:
        checkpoint.refuse_changes(differences)
    assert caught.value.hint == "to go on all the same: --allow-change optimizer.lr --allow-change seed"
    with pytest.raises(ConfigError) as caught:
        checkpoint.refuse_changes(differences, ["optimizer"])
    assert "optimizer" not in str(caught.value)
    assert checkpoint.refuse_changes(differences, ["optimizer", "seed"]) == differences
    assert checkpoint.refuse_changes([]) == []


def test_an_allowed_name_does_not_allow_names_that_begin_alike() -> None:
    with pytest.raises(ConfigError, match="optimizer_step"):
        checkpoint.refuse_changes([Difference("optimizer_step", "a", "b")], ["optimizer"])


def test_other_library_versions_are_told() -> None:
    kernels.is_ready()
    same = {"optune": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    same |= {"kernels": kernels.describe()}
    assert checkpoint.compare_versions({"versions": same}) == []
    assert checkpoint.compare_versions({"versions": same | {"torch": "1.0"}}) == [
        Difference("torch", "1.0", torch.__version__)
    ]


def test_other_kernels_are_told_though_nothing_has_asked_for_them_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", None)
    monkeypatch.setenv("OPTUNE_KERNELS", "0")
    versions = {"optune": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    assert checkpoint.compare_versions({"versions": versions | {"kernels": "native, by g++"}}) == [
        Difference("kernels", "native, by g++", "torch's (OPTUNE_KERNELS=0)")
    ]
    monkeypatch.setattr(kernels, "_library", None)
    assert checkpoint.compare_versions({"versions": versions}) == []
    assert kernels.describe() is None
