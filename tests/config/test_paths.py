"""What looks like a path is only ever looked up on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import looks_like_path


@pytest.mark.parametrize(
    "text",
    [
        "/m",
        "./m",
        "../m",
        ".",
        "~/m",
        "a/b/c",
        "a/b/",
        "model.safetensors",
        "x.jsonl",
        "data/x.JSONL",
        "C:\\m",
        "here",
        "models/typo",
    ],
)
def test_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "models").mkdir()
    assert looks_like_path(text)


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M-Instruct", ""])
def test_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not looks_like_path(text)
    assert looks_like_path(text, hub_ids=False) == ("/" in text)
