"""Where models come from: paths stay on disk, hub ids are cached, and a silent network is not waited for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from optune import hub, models
from optune.errors import ModelError
from tests import fixtures


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a hub that must not be asked."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    cache = tmp_path / "hub-cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    return cache


@pytest.mark.parametrize(
    "path",
    ["./owner/name", "/nowhere/model", "~/nowhere", "a/b/c", "name", "../name", "owner/name/", "here/name", ".\\m"],
)
@pytest.mark.usefixtures("no_hub")
def test_path_like_values_are_never_looked_up_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(ModelError) as caught:
        models.resolve(path)
    absolute = os.path.normpath(Path(path).expanduser().absolute())
    assert os.path.normpath(str(caught.value.where)) == absolute
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("no_hub")
def test_a_folder_wins_over_a_hub_id_and_variables_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = fixtures.write_model(tmp_path / "owner" / "name")
    assert models.resolve("owner/name") == folder
    assert models.resolve(folder) == folder
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert models.resolve("$MODELS/owner/name") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.resolve("~/owner/name") == folder
    with pytest.raises(ModelError, match="this is a file"):
        models.resolve(folder / "config.json")


def cache_model(cache: Path, *, whole: bool = True) -> Path:
    root = cache / "models--owner--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    folder = fixtures.write_model(root / "snapshots" / ("0" * 40))
    if not whole:
        (folder / "model.safetensors").unlink()
    return folder


def test_a_cached_hub_model_loads_without_a_network(no_hub: Path) -> None:
    folder = cache_model(no_hub)
    assert models.resolve("owner/name") == folder
    assert models.check("owner/name").model_type == "llama"


def test_a_download_that_was_cut_short_is_not_taken_for_the_model(no_hub: Path) -> None:
    cache_model(no_hub, whole=False)
    with pytest.raises(ModelError, match="the hub was asked"):
        models.resolve("owner/name")


def test_config_and_tokenizer_are_had_without_weights(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="the hub was asked"):
        models.resolve("owner/name", weights=False)
    folder = cache_model(no_hub, whole=False)
    assert models.resolve("owner/name", weights=False) == folder
    assert models.check("owner/name", weights=False).vocab_size == len(fixtures.VOCABULARY)
    with pytest.raises(ModelError, match="safetensors"):
        models.check(folder)
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match="unheard_of"):
        models.check(folder, weights=False)


def test_an_unreachable_hub_is_one_clear_error(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host\nlong explanation")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ModelError) as caught:
        models.check("owner/name")
    text = str(caught.value)
    assert text.startswith("owner/name: the hub could not be reached (ConnectionError: no route to host)")
    assert str(Path("owner/name").absolute()) in text and "\n" not in text
    assert caught.value.hint is not None


def test_a_hub_that_does_not_answer_is_given_up(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: time.sleep(20))
    assert hub.PATIENCE_S + 1 < 10
    monkeypatch.setattr(hub, "PATIENCE_S", -0.9)
    started = time.monotonic()
    with pytest.raises(ModelError, match="did not answer"):
        models.resolve("owner/name")
    assert time.monotonic() - started < 2


def test_a_download_leaves_pickled_weights_behind(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(no_hub)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert models.download("owner/name", no_hub / "here", revision="v1") == no_hub
    assert (asked["repo_id"], asked["revision"], asked["local_dir"]) == ("owner/name", "v1", no_hub / "here")
    kept = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "additional_chat_templates/rag.jinja"]
    left = ["pytorch_model.bin", "original/tokenizer.model", "consolidated.safetensors", "onnx/config.json", "a/b.pth"]
    wanted = filter_repo_objects(
        kept + left, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == kept
    models.download("owner/name", no_hub / "here", weights=False)
    fewer = filter_repo_objects(kept, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    assert list(fewer) == [name for name in kept if not name.endswith(".safetensors")]
