"""Rows from the cache are the rows that would be made now, or they are not found."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optune import data
from optune.data import cache, cache_key, loading
from optune.errors import DataError
from tests import fixtures


@pytest.fixture(autouse=True)
def _every_row_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "SMALLEST", 0)
    cache.say_once.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever rows are made and not found."""
    calls: list[int] = []
    encode = loading.encode_sources

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return encode(*arguments, **options)

    monkeypatch.setattr(loading, "encode_sources", counting)
    return calls


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fixtures.write_tokenizer(tmp_path / "t0")


ROWS = [
    *fixtures.numbered_rows(40),
    fixtures.chat("w1", ""),
    fixtures.chat(" ".join(["w1"] * 70), "w2"),
    {"messages": [*fixtures.chat("w1", "w2")["messages"][:1], {"role": "assistant", "content": "w3", "weight": 0.5}]},
]


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    return fixtures.write_rows(path, rows)


def load(path: Any, model: Path, folder: Path | None, template: str | None = None, **options: Any) -> data.Rows:
    tokenizer = data.load_tokenizer(model, template)
    rows = data.load_rows(path, tokenizer, cache=folder, **({"max_length": 64} | options))
    assert isinstance(rows, data.Rows)
    return rows


def assert_same(rows: data.Rows, others: data.Rows) -> None:
    assert rows.fingerprint() == others.fingerprint()
    for name in ("starts", "tokens", "trained", "weights"):
        mine, theirs = getattr(rows, name), getattr(others, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
    assert list(rows.places) == list(others.places)
    assert rows.report == others.report
    assert rows.report.lines() == others.report.lines()


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "rows").iterdir())


def test_warm_rows_are_the_cold_ones_bit_for_bit_and_so_is_what_is_said_of_them(
    tmp_path: Path, model: Path, made: list[int]
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    without = load(path, model, None)
    cold, warm = load(path, model, folder), load(path, model, folder)
    assert len(made) == 2
    assert without.weights is not None
    assert len(without.report.skipped) == 2
    for rows in (cold, warm):
        assert_same(rows, without)
        assert not rows.tokens.flags.writeable
        assert isinstance(rows.tokens.base, np.memmap)
    batches = [data.build_batches(rows, batch_size=3, seed=1).microbatches(2)[0] for rows in (without, warm)]
    assert batches[0].rows == batches[1].rows
    assert batches[0].tokens_BT.tolist() == batches[1].tokens_BT.tolist()


def test_weights_of_sources_are_not_part_of_an_entry_and_pairs_are_kept_too(
    tmp_path: Path, model: Path, made: list[int]
) -> None:
    one, two, folder = write(tmp_path / "1.jsonl"), write(tmp_path / "2.jsonl", ROWS[:9]), tmp_path / "cache"
    for weight in (1, 2, 3):
        rows = load([{"path": str(one)}, {"path": str(two), "weight": weight}], model, folder)
        assert (rows.mixture.size if rows.mixture else len(rows)) == 41 + 9 * weight
    assert len(made) == 1
    prompt = fixtures.chat("w1", "w2")["messages"][:1]
    answers = {
        name: [{"role": "assistant", "content": name_}] for name, name_ in (("chosen", "w2"), ("rejected", "w3"))
    }
    path, tokenizer = write(tmp_path / "pairs.jsonl", [{"prompt": prompt, **answers}] * 3), data.load_tokenizer(model)
    cold, warm = (data.load_pairs(path, tokenizer, cache=folder) for _ in range(2))
    assert_same(cold, warm)
    assert len(made) == 2
    assert warm.report.kept == 3


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap_words(content: Any) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]


def change_file(path: Path, model: Path) -> None:
    """Another content of the same size, under the same name, inode and time of change."""
    before = path.stat()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b"w1 ", b"w2 ", 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "file": change_file,
    "vocabulary": lambda path, model: edit_json(model / "tokenizer.json", swap_words),
    "end token": lambda path, model: edit_json(
        model / "tokenizer_config.json", lambda content: content.update(eos_token="</s>")
    ),
    "template": lambda path, model: (model / "chat_template.jinja").write_text(
        fixtures.CHAT_TEMPLATE.replace("'<end>\n'", "'<end>'")
    ),
}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_seen(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, made: list[int], change: str, is_large: bool
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    if is_large:  # of which the sum is remembered, and the file was left alone for long
        monkeypatch.setattr(cache_key, "LARGE", 0)
        monkeypatch.setattr(cache_key, "_QUIET_S", -1)
    before = load(path, model, folder)
    assert (folder / "sums").exists() == is_large
    hashed = []
    hash_file = cache_key.files.hash_file
    monkeypatch.setattr(cache_key.files, "hash_file", lambda path: hashed.append(path) or hash_file(path))
    load(path, model, folder)
    assert (path in hashed) != is_large
    assert len(made) == 1
    time.sleep(0.02)  # a tick of the clock that stamps files
    CHANGES[change](path, model)
    after = load(path, model, folder)
    assert len(made) == 2
    assert_same(after, load(path, model, None))
    # A chat's end is the template's; the tokenizer's own matters to other formats.
    assert after.fingerprint() != before.fingerprint() or change == "end token"


def test_a_file_that_was_touched_a_moment_ago_is_read_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes within one tick of the clock leave the same times."""
    monkeypatch.setattr(cache_key, "LARGE", 0)
    path = write(tmp_path / "rows.jsonl")
    load(path, model, tmp_path / "cache")
    assert not (tmp_path / "cache" / "sums").exists()


OPTIONS: list[dict[str, Any]] = [
    {"max_length": 63},
    {"truncation": "truncate_right"},
    {"train_on": "all"},
    {"parse_special": True},
    {"embedding_rows": 1000},
    {"format": "messages"},
    {"template": "template.jinja"},
    {"path": [{"path": "rows.jsonl", "max_rows": 5}]},
    {"path": [{"path": "rows.jsonl", "format": "messages"}]},
    {"path": ["rows.jsonl", "rows.jsonl"]},
]


def test_every_option_has_entries_of_its_own(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache"
    write(tmp_path / "rows.jsonl")
    (tmp_path / "template.jinja").write_text(fixtures.CHAT_TEMPLATE + " ")
    for count, options in enumerate([{}, *OPTIONS], start=1):
        given = {"path": "rows.jsonl"} | options
        cold, warm = (
            load(given["path"], model, folder, **{k: v for k, v in given.items() if k != "path"}) for _ in "12"
        )
        assert len(made) == count, options
        assert_same(cold, warm)
    monkeypatch.setattr(cache_key, "_sum_code", lambda: "another version")
    load("rows.jsonl", model, folder)
    assert len(made) == len(OPTIONS) + 2


def test_the_day_that_a_template_prints_is_part_of_the_key(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d') }} " + fixtures.CHAT_TEMPLATE)
    keys = set()
    for day in ("2024-01-01", "2024-01-02", "2024-01-02"):
        tokenizer = data.load_tokenizer(model, template_date=day)
        data.load_rows(write(tmp_path / "rows.jsonl"), tokenizer, cache=tmp_path / "cache")
        keys.add(len(entries(tmp_path / "cache")))
    assert keys == {1, 2}


def test_a_format_of_a_users_own_is_not_kept(tmp_path: Path, model: Path, made: list[int]) -> None:
    for _ in range(2):
        load(write(tmp_path / "rows.jsonl"), model, tmp_path / "cache", format=lambda row: row)
    assert len(made) == 2
    assert not (tmp_path / "cache").exists()


def test_a_file_that_grows_while_it_is_read_is_not_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    join = loading.join_results

    def grow(*arguments: Any) -> data.Rows:
        rows = join(*arguments)
        path.write_bytes(path.read_bytes() + json.dumps(fixtures.chat("w1", "w2")).encode() + b"\n")
        return rows

    monkeypatch.setattr(loading, "join_results", grow)
    assert len(load(path, model, folder)) == 41
    assert not (folder / "rows").exists()


def test_broken_rows_are_told_every_time(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"messages": 1}])
    for _ in range(2):
        with pytest.raises(DataError, match="wanted a list"):
            load(path, model, tmp_path / "cache")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_entry_is_told_once_and_made_again(
    tmp_path: Path, model: Path, made: list[int], capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    without = load(path, model, None)
    load(path, model, folder)
    names = sorted(file.name for file in entries(folder)[0].iterdir())
    assert names == ["entry.json", "place_ends", "places", "starts", "tokens", "trained", "weights"]
    for count, name in enumerate(names, start=3):
        cache.say_once.cache_clear()
        damage(entries(folder)[0] / name)
        assert_same(load(path, model, folder), without)
        assert len(made) == count, name
        assert capsys.readouterr().err.count("are damaged (") == 1
        assert_same(load(path, model, folder), without)
        assert len(made) == count, name


def test_what_a_crash_left_behind_is_no_entry_and_goes_after_a_day(tmp_path: Path, model: Path) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    for name, age_s in ((".tmp-old", 100_000), (".tmp-new", 10)):
        (folder / "rows" / name).mkdir(parents=True)
        (folder / "rows" / name / "tokens").write_bytes(b"half")
        os.utime(folder / "rows" / name, (time.time() - age_s,) * 2)
    load(path, model, folder)
    assert [entry.name for entry in entries(folder) if entry.name.startswith(".")] == [".tmp-new"]


def test_the_entries_that_were_not_used_for_the_longest_time_make_room(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    folder = tmp_path / "cache"
    paths = [write(tmp_path / f"{index}.jsonl") for index in range(3)]
    rows = [load(path, model, folder) for path in paths[:2]]
    os.utime(max(entries(folder), key=lambda entry: (entry / "entry.json").stat().st_mtime_ns) / "entry.json", (1, 1))
    size = sum(file.stat().st_size for file in entries(folder)[0].iterdir())
    monkeypatch.setattr(cache, "LIMIT", size * 5 // 2)
    load(paths[2], model, folder)
    assert len(entries(folder)) == 2
    assert_same(rows[1], load(paths[1], model, None))  # rows that are open stay readable
    made.clear()
    for path, is_found in ((paths[2], True), (paths[0], True), (paths[1], False)):
        load(path, model, folder)
        assert len(made) == (0 if is_found else 1)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("why", ["no folder", "full"])
def test_where_nothing_can_be_kept_the_rows_come_all_the_same_and_it_is_said_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    if why == "no folder":
        folder.write_text("a file is in its place")
    else:
        monkeypatch.setattr(cache, "_sum_places", full)  # after the arrays were written
    for _ in range(2):
        assert_same(load(path, model, folder), load(path, model, None))
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert f"warning: prepared rows cannot be kept in {folder}" in said
    assert why == "no folder" or not entries(folder)


def test_of_several_that_want_the_same_rows_one_makes_them(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    join = loading.join_results
    monkeypatch.setattr(loading, "join_results", lambda *arguments: (time.sleep(0.3), join(*arguments))[1])
    found: list[data.Rows] = []
    threads = [threading.Thread(target=lambda: found.append(load(path, model, folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    for rows in found:
        assert_same(rows, found[0])


def test_nobody_waits_for_ever(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    load(path, model, folder)
    key = entries(folder)[0].name
    shutil.rmtree(folder / "rows")
    monkeypatch.setattr(cache, "WAIT_S", 0.3)
    with (folder / "locks" / key[:2]).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert len(load(path, model, folder)) == 41
    assert "waiting for another process" in capsys.readouterr().err
    assert entries(folder)[0].name == key


def test_few_rows_are_not_kept(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "SMALLEST", 1 << 20)
    load(write(tmp_path / "rows.jsonl"), model, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.find_folder(None) is None
    assert cache.find_folder("some/where") == Path("some/where").absolute()
    assert cache.find_folder("auto") == Path(os.environ["OPTUNE_CACHE"])
    monkeypatch.delenv("OPTUNE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.find_folder("auto") == tmp_path / "optune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.find_folder("auto") == tmp_path / ".cache" / "optune"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.find_folder("auto") == tmp_path / "Library" / "Caches" / "optune"
