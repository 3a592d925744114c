"""Kinds of files, folders, patterns, splits and saved datasets: which rows are taken, and how each is named."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from optune import data, hub
from optune.data.sources import BadRow, list_sources, read_rows
from optune.data.sources.splits import parse_split, tell_split
from optune.errors import DataError
from tests import fixtures

ROWS: list[dict[str, Any]] = [{"text": f"w{i}"} for i in range(10)]
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"x": "s"}}}}}
G = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {"b": {"y": 1}}}}}


def read(train: Any) -> list[tuple[str, Any]]:
    return [(source.place(number), row) for source in list_sources(train) for number, row in read_rows(source)]


def texts(train: Any) -> list[str]:
    return [row["text"] for _, row in read(train)]


def write_csv(path: Path, rows: list[list[str]], **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def test_csv_cells_are_text_and_empty_ones_null(tmp_path: Path) -> None:
    chat = fixtures.chat("w1", "w2")["messages"]
    path = write_csv(
        tmp_path / "a.csv",
        [
            ["", "instruction", "input", "output", "messages", "chosen"],
            ["0", "a,b", "", "line\nline", json.dumps(chat), "[not a list"],
            ["1", 'say "x"', "None", " 7", "", json.dumps(chat)],
        ],
    )
    assert read(path) == [
        (
            f"{path}:2",
            {"instruction": "a,b", "input": None, "output": "line\nline", "messages": chat, "chosen": "[not a list"},
        ),
        (
            f"{path}:4",
            {"instruction": 'say "x"', "input": "None", "output": " 7", "messages": None, "chosen": chat},
        ),
    ]
    marked = tmp_path / "b.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [place.rpartition(":")[2] for place, _ in read(marked)] == ["2", "4"]
    assert [row for _, row in read(write_csv(tmp_path / "a.tsv", [["text"], ["a,b"]], delimiter="\t"))] == [
        {"text": "a,b"}
    ]


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b"a,b\n1,2\n3\n", 3, "found 1 cells, wanted 2"),
        (b"a,b\n1,2,3\n", 2, "found 3 cells, wanted 2"),
        (b'a\n"x\ny\n', 2, "not CSV: unexpected end of data"),
        (b'a\n"x"y\n', 2, "not CSV"),
        (b"a,a\n1,2\n", 1, "the column 'a' stands twice"),
        (b"a\n\n\xff\n", 3, "column 'a': not UTF-8: byte 0xff"),
        (b"a\nx\0y\n", 2, "column 'a': holds NUL bytes"),
        (b"messages\n[{'role': 'user'}]\n", 2, "column 'messages': not JSON"),
        (b'messages\n"{""a"": 1}"\n', 2, "column 'messages': found an object, wanted a list"),
    ],
)
def test_a_broken_csv_is_named_by_the_line_where_the_record_begins(
    tmp_path: Path, content: bytes, line: int, problem: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    (place, row) = next(pair for pair in read(path) if isinstance(pair[1], BadRow))
    assert place == f"{path}:{line}"
    assert problem in row.problem


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "the key 'b' stands twice"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"a": "\0"}', "holds NUL bytes"),
    ],
)
def test_what_json_leaves_open_is_refused(tmp_path: Path, line: bytes, problem: str) -> None:
    for name, around in (("a.jsonl", (b"{}\n", b"\n")), ("a.json", (b"[{},\n", b"]"))):
        path = tmp_path / name
        path.write_bytes(around[0] + line + around[1])
        bad = [(place, row.problem) for place, row in read(path) if isinstance(row, BadRow)]
        assert [place for place, _ in bad] == [f"{path}:2"]
        assert problem in bad[0][1] or (b"\0" in line and name == "a.json")
    (tmp_path / "nan.jsonl").write_text('{"text": "w1", "input": NaN}')
    assert read(tmp_path / "nan.jsonl")[0][1] == {"text": "w1", "input": None}


def test_a_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("  w1\r\n\n \nw2\u2028w3".encode())
    assert read(path) == [(f"{path}:1", {"text": "  w1"}), (f"{path}:4", {"text": "w2\u2028w3"})]


def write_tables(folder: Path, rows: list[Any], **options: Any) -> list[Path]:
    table = pyarrow.Table.from_pylist(rows)
    paths = [folder / "t.parquet", folder / "t.arrow", folder / "t_stream.arrow"]
    pyarrow.parquet.write_table(table, paths[0], **options)
    for path, make in ((paths[1], pyarrow.ipc.new_file), (paths[2], pyarrow.ipc.new_stream)):
        with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return paths


def test_a16_members_that_columnar_storage_gave_to_structs_are_taken_out_again(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"b": 1}}}]}
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}], "tools": [F]},
        {"messages": [{"role": "user", "content": "w1"}, call], "tools": [G, F]},
        {"messages": [{"role": "user", "content": "w1"}], "tools": None},
    ]
    for path in write_tables(tmp_path, rows):
        assert "None" in str(pyarrow.Table.from_pylist(rows).to_pylist()[0]["tools"])  # storage does invent them
        assert read(path) == [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]
    as_text = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    as_text[0]["tools"] = '[{"function": {"name": "f", "default": null}}]'
    for path in write_tables(tmp_path, as_text):
        assert read(path)[0][1]["tools"] == [{"function": {"name": "f", "default": None}}]


def test_tables_hold_what_json_does_not_know(tmp_path: Path) -> None:
    import datetime

    rows = [{"text": b"w1", "input": float("nan"), "meta": {"day": datetime.date(2024, 1, 2)}, "blob": b"\xff"}]
    for path in write_tables(tmp_path, rows):
        row = read(path)[0][1]
        assert (row["text"], row["meta"], row["blob"]) == ("w1", {"day": "2024-01-02"}, b"\xff")
    bad = pyarrow.table({"text": pyarrow.array([b"w1", b"\xff"]).view(pyarrow.string())})
    pyarrow.parquet.write_table(bad, tmp_path / "bad.parquet")
    assert [isinstance(row, BadRow) for _, row in read(tmp_path / "bad.parquet")] == [False, True]


def test_folders_are_read_in_order_and_splits_are_not_trained_by_oversight(tmp_path: Path) -> None:
    place = tmp_path / "plain"
    for name, rows in (("b/x.jsonl", ROWS[2:4]), ("a.jsonl", ROWS[:2]), (".hidden.jsonl", ROWS), ("_x/y.jsonl", ROWS)):
        fixtures.write_rows(place / name, rows)
    (place / "README.md").write_text("# rows")
    (place / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "w9"}'))
    assert texts(place) == ["w0", "w1", "w2", "w3", "w9"]
    assert texts({"path": str(place), "split": "train[1:3]"}) == ["w1", "w2"]
    assert texts(f"{place}/[ab]*/*.jsonl") == ["w2", "w3"]
    assert len(texts(f"{place}/**/*.jsonl")) == 14  # a pattern takes what fits it
    assert texts({"path": f"{place}/*.gz", "max_rows": 1}) == ["w9"]
    layout = tmp_path / "layout"
    for name, rows in (("train-00000-of-00002", ROWS[:2]), ("train-00001-of-00002", ROWS[2:5]), ("test-0", ROWS[5:])):
        (layout / "data").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), layout / "data" / f"{name}.parquet")
    with pytest.raises(DataError, match="the folder has files for test") as caught:
        texts(layout)
    assert f"write {{path: {layout}, split: train}}, or list the files that are meant: [" in str(caught.value.hint)
    assert texts({"path": str(layout), "split": "train"}) == ["w0", "w1", "w2", "w3", "w4"]
    assert texts({"path": str(layout), "split": "test[-2:]"}) == ["w8", "w9"]
    assert texts({"path": str(layout), "split": "train[1:]", "max_rows": 3}) == ["w1", "w2", "w3"]
    with pytest.raises(DataError, match="the folder has no split 'validation'"):
        texts({"path": str(layout), "split": "validation"})
    names = {"dev_a.jsonl": "validation", "training.json": "train", "tests.txt": None, "val/a.csv": "validation"}
    assert {name: tell_split(Path(name)) for name in names} == names


def test_a_share_of_the_rows_is_what_the_datasets_library_takes(tmp_path: Path) -> None:
    from datasets import ReadInstruction

    path = fixtures.write_rows(tmp_path / "a.jsonl", ROWS[:7])
    for split in ("train", "train[:90%]", "train[50%:]", "train[-30%:]", "train[2:4]", "train[:-2]", "train[25%:75%]"):
        (part,) = ReadInstruction.from_spec(split).to_absolute({"train": 7})  # pyright: ignore[reportArgumentType]
        expected = [row["text"] for row in ROWS[:7][part.from_ : part.to]]
        assert texts({"path": str(path), "split": split}) == expected, split
    halves = [texts({"path": str(path), "split": split}) for split in ("[:35%]", "[35%:]")]
    assert halves[0] + halves[1] == [row["text"] for row in ROWS[:7]]
    for wrong in ("", "train[", "[1:2:3]", "[a:b]", "train[:200%]"):
        with pytest.raises(DataError, match="split"):
            parse_split(wrong, "x")
    with pytest.raises(DataError, match="the split takes no row"):
        texts({"path": str(path), "split": "[:0]"})


def test_rows_outside_a_slice_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{\n{"text": "w1"}\n{"text": "w2"}\n[')
    assert read({"path": str(path), "split": "[1:3]"}) == [(f"{path}:2", {"text": "w1"}), (f"{path}:3", {"text": "w2"})]
    assert texts({"path": str(path), "split": "[1:]", "max_rows": 2}) == ["w1", "w2"]


def test_archives_and_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("in/b.csv", "text\nw2\n")
        archive.writestr("in/a.jsonl", '{"text": "w1"}\n[\n')
        archive.writestr("__MACOSX/a.jsonl", "{")
        archive.writestr("notes.md", "x")
    found = read(path)
    assert [place for place, _ in found] == [f"{path}/in/a.jsonl:1", f"{path}/in/a.jsonl:2", f"{path}/in/b.csv:2"]
    assert isinstance(found[1][1], BadRow)
    (tmp_path / "b.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"b\.zip: not a whole zip archive"):
        read(tmp_path / "b.zip")
    whole = gzip.compress(b"\n".join(json.dumps(row).encode() for row in ROWS * 200))
    (tmp_path / "c.jsonl.gz").write_bytes(whole[:-20])
    *_, (place, last) = read(tmp_path / "c.jsonl.gz")
    assert isinstance(last, BadRow)
    assert "cannot be unpacked from here on" in last.problem
    assert int(place.rpartition(":")[2]) > 1


def test_saved_datasets_are_read_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS)
    rows.select([3, 1]).save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "both")
    features = datasets.Features({"text": datasets.Value("string"), "tools": datasets.List(datasets.Json())})
    typed = datasets.Dataset.from_list([{"text": "w1", "tools": [F, G | {"none": None}]}], features=features)
    typed.save_to_disk(tmp_path / "typed")
    expected = list(typed)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert texts(tmp_path / "one") == ["w3", "w1"]
    assert texts({"path": str(tmp_path / "both"), "split": "train[:2]"}) == ["w0", "w1"]
    assert texts({"path": str(tmp_path / "both"), "split": "test"}) == ["w0"]
    with pytest.raises(DataError, match="the dataset has the splits train, test") as caught:
        texts(tmp_path / "both")
    assert caught.value.hint == "add split: train"
    assert [row for _, row in read(tmp_path / "typed")] == expected
    with pytest.raises(DataError, match="hf://a/b: the datasets library is not installed"):
        texts("hf://a/b")


def test_only_what_begins_with_hf_is_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "cache")
    asked: list[Any] = []

    def load(path: str, name: str | None, **options: Any) -> Any:
        asked.append((path, name, options))
        return datasets.load_from_disk(str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *arguments, **options: None)
    assert texts({"path": "hf://owner/rows@v1", "name": "small", "split": "test[:3]"}) == ["w0", "w1", "w2"]
    assert asked == [("owner/rows", "small", {"split": "test", "revision": "v1"})]
    for text in ("owner/rows", "./owner/rows", "hf:/owner/rows"):
        with pytest.raises(DataError, match="no such data file"):
            texts(text)
    with pytest.raises(DataError, match="name: 'small' picks a part of a dataset of the hub, and this is a path"):
        texts({"path": str(tmp_path / "cache"), "name": "small"})
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_one_line_said_soon_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The datasets library alone tries again for half a minute, and talks about it."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    asked: list[str | None] = []

    def fail(error: type[Exception], text: str) -> None:
        def answer(api: Any, dataset: str, *, revision: str | None, timeout: float) -> None:
            asked.append(revision)
            raise error(text)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)

    fail(ConnectionError, "no route to host\nlong explanation")
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        texts("hf://someone/nothing")
    assert time.monotonic() - started < 3
    assert str(caught.value) == (
        "hf://someone/nothing: the hub could not be reached (ConnectionError: no route to host), and it is not in the "
        "cache on this machine"
    )
    assert capfd.readouterr() == ("", "")
    assert datasets.config.HF_HUB_OFFLINE is False

    class RepositoryNotFoundError(Exception): ...

    fail(RepositoryNotFoundError, "404")
    with pytest.raises(DataError, match="the hub has no such dataset, or it is private and HF_TOKEN is not set"):
        texts("hf://someone/nothing@v1")
    assert asked == [None, "v1"]
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *arguments, **options: time.sleep(20))
    monkeypatch.setattr(hub, "PATIENCE_S", -0.9)
    with pytest.raises(DataError, match="the hub did not answer within"):
        texts("hf://someone/nothing")
    # What an earlier download has left is taken, and said; another revision than that is not.
    saved = datasets.Dataset.from_list(ROWS[:2])
    saved.save_to_disk(tmp_path / "someone___rows/default/0.0.0/0123abcd")
    copy = datasets.load_from_disk(str(tmp_path / "someone___rows/default/0.0.0/0123abcd"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: copy)
    capfd.readouterr()
    assert texts("hf://someone/rows") == texts("hf://someone/rows@0123abcd") == ["w0", "w1"]
    assert capfd.readouterr().err.count("taking the copy of an earlier download") == 2
    with pytest.raises(DataError, match="the copy on this machine does not say that it is v1"):
        texts("hf://someone/rows@v1")


def test_the_same_rows_are_the_same_tokens_from_every_kind_of_file(tmp_path: Path) -> None:
    t0 = data.load_tokenizer(fixtures.write_tokenizer(tmp_path / "t0"))
    rows = fixtures.numbered_rows(7)
    expected = data.load_rows(fixtures.write_rows(tmp_path / "a.jsonl", rows), t0)
    cells = [["messages"], *([json.dumps(row["messages"])] for row in rows)]
    for path in [*write_tables(tmp_path, rows, row_group_size=2), write_csv(tmp_path / "a.csv", cells)]:
        assert data.load_rows(path, t0).fingerprint() == expected.fingerprint()
