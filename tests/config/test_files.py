"""Unreadable YAML is refused with file and line; what differs only in bytes loads alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from optune.config import RunConfig, load
from optune.errors import ConfigError
from tests.config.helpers import BASE, read, refuse, say


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "c: 3"),
        ("a: 1\n\tb: 2\n", 2, "spaces"),
        ("a: b: c\n", 1, "a: b: c"),
        ("seed: 1\nepochs: 2\nseed: 3\n", 3, "the key 'seed' stands here for the second time; the first is on line 1"),
        ("model:\n  path: a\n  dtype: bf16\n  path: b\n", 4, "'path'"),
        ("- a\n- b\n", 1, "must hold a mapping"),
        ("just words\n", 1, "just words"),
        ("a: 1\n---\nb: 2\n", 2, "one file is one config"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "is not allowed"),
        ("a: !mine x\n", 1, "!mine"),
        ("a: &x [*x]\n", 1, "aliases"),
        ("? [a, b]\n: c\n", 1, "single word"),
        ("a: *nope\n", 1, "nope"),
        ("a: \x01\n", 1, "U+0001"),
        ("key: 'open\n", 1, "key"),
    ],
)
def test_unreadable_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    (error,) = refuse(tmp_path, text, base="")
    assert error.where is not None
    assert error.where.rsplit(":", 1)[0].endswith("c.yaml")
    assert words in say(error)
    assert int(error.where.rsplit(":", 1)[1]) in (line, line + 1)


def test_bytes_that_are_no_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"seed: 1\ndevice: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"c.yaml:2: is not UTF-8: byte 0xe9"):
        load(RunConfig, path, [])


@pytest.mark.parametrize(
    "encode",
    [str.encode, lambda text: b"\xef\xbb\xbf" + text.encode(), lambda text: text.replace("\n", "\r\n").encode()],
)
def test_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path, encode: object) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(encode(BASE + "seed: 5\n"))  # type: ignore[operator]
    assert load(RunConfig, path, []) == read(tmp_path, "seed: 5\n")


def test_missing_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, "nope.yaml", [])
    assert str(tmp_path / "nope.yaml") in str(caught.value)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    cfg = read(tmp_path, "checkpoint: &c {keep_last: 3}\nschedule: {<<: {warmup_steps: 7}, name: linear}\n")
    assert cfg.checkpoint.keep_last == 3
    assert (cfg.schedule.name, cfg.schedule.warmup_steps) == ("linear", 7)


def test_secret_in_an_unreadable_line_is_hidden(tmp_path: Path) -> None:
    (error,) = refuse(tmp_path, "api_key: hunter2: x\n", base="")
    assert "hunter2" not in say(error)


def test_aliases_that_multiply_are_refused_quickly(tmp_path: Path) -> None:
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True):
        text += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    (error,) = refuse(tmp_path, text, base="")
    assert "aliases" in str(error)
