"""Files and folders: what is read of each kind, how rows are numbered, and what is said of broken ones."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from slideformer.config import DatasetSpec
from slideformer.data import files
from slideformer.data.files import READ_CHARS, files_of, read_file
from slideformer.data.rows import Block
from slideformer.data.sources import open_source
from slideformer.errors import BadInput

ROWS = [{"prompt": "a", "completion": "ä"}, {"prompt": 'say "b", twice', "completion": "b\nb"}]


def write(path, *, suffix: str):
    """The same two rows in a file of each kind."""
    path = path / f"rows{suffix}"
    kind = suffix.removesuffix(".gz")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    text = {
        ".jsonl": f"{lines}\n\n",
        ".ndjson": lines,
        ".json": json.dumps(ROWS, indent=1),
        ".csv": 'prompt,completion\na,ä\n"say ""b"", twice","b\nb"\n',
        ".tsv": 'prompt\tcompletion\na\tä\n"say ""b"", twice"\t"b\nb"\n',
    }
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        content = ("\ufeff" + text[kind] if kind == ".csv" else text[kind]).encode()
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    return path


@pytest.mark.parametrize(
    ("suffix", "numbers"),
    [
        (".jsonl", [1, 2]),
        (".ndjson", [1, 2]),
        (".jsonl.gz", [1, 2]),
        (".json", [1, 2]),
        (".json.gz", [1, 2]),
        (".csv", [2, 3]),
        (".csv.gz", [2, 3]),
        (".tsv", [2, 3]),
        (".tsv.gz", [2, 3]),
        (".parquet", [1, 2]),
    ],
)
def test_the_same_rows_come_out_of_every_kind_of_file(tmp_path, suffix, numbers) -> None:
    rows = list(read_file(write(tmp_path, suffix=suffix)))
    assert [dict(row.columns) for row in rows] == ROWS
    assert [row.number for row in rows] == numbers


def test_empty_lines_count_as_lines(write_rows) -> None:
    assert [row.number for row in read_file(write_rows("", {"text": "a"}, " ", {"text": "b"}))] == [2, 4]


def test_json_may_be_a_list_or_objects_one_behind_the_other(tmp_path) -> None:
    path = tmp_path / "rows.json"
    for text in ('{"a": 1}\n{"a": 2}\n', '{\n "a": 1\n}{"a": 2}', ' [ {"a": 1} ,\n{"a": 2} ] \n'):
        path.write_text(text)
        assert [row.columns["a"] for row in read_file(path)] == [1, 2]
    path.write_text("[]")
    assert list(read_file(path)) == []


@pytest.mark.parametrize("amount", [1, 2, 7, 64])
def test_json_is_the_same_however_little_is_read_at_once(tmp_path, monkeypatch, amount) -> None:
    monkeypatch.setattr(files, "READ_CHARS", amount)
    path = write(tmp_path, suffix=".json")
    assert [row.columns for row in read_file(path)] == ROWS


def test_a_list_of_many_rows_is_never_in_memory_as_a_whole(tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 20_000))  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in read_file(path)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20  # one stretch as bytes, as text, and joined to the rest of the one before


@pytest.mark.parametrize("num_chars", [10, 25, 10_000])
def test_plain_text_comes_in_stretches_that_end_at_a_line_and_lose_nothing(tmp_path, monkeypatch, num_chars) -> None:
    monkeypatch.setattr(files, "BLOCK_CHARS", num_chars)
    text = "".join(f"line {i}\n" for i in range(20)) + "the end"
    path = tmp_path / "book.txt"
    path.write_text(text)
    rows = list(read_file(path))
    assert "".join(row.columns.text for row in rows) == text
    assert [(row.columns.starts, row.columns.ends) for row in rows] == [
        (i == 0, i == len(rows) - 1) for i in range(len(rows))
    ]
    for row in rows:
        assert row.columns.text.startswith(("line", "the end"))
        assert text.splitlines()[row.number - 1] == row.columns.text.splitlines()[0]


def test_plain_text_is_the_same_when_it_is_gzipped(tmp_path) -> None:
    text = "".join(f"Zeile {i}: ä\n" for i in range(20))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(text.encode()))
    (plain,), (zipped,) = (list(read_file(tmp_path / name)) for name in ("book.txt", "book.txt.gz"))
    assert (zipped.columns, zipped.number) == (plain.columns, plain.number) == (Block(text), 1)


def test_a_text_without_line_ends_is_cut_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "BLOCK_CHARS", 10)
    path = tmp_path / "one_line.txt"
    path.write_text("x" * 35)
    assert [len(row.columns.text) for row in read_file(path)] == [20, 15]
    assert [row.columns for row in read_file(path)] == [Block("x" * 20, ends=False), Block("x" * 15, starts=False)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("rows.doc", b"x", "ends in .doc; accepted are .jsonl, .json, .csv, .tsv, .txt"),
        ("rows", b"x", "ends in nothing; accepted are"),
        ("latin.jsonl", b'{"text": "\xe9"}', "is not UTF-8"),
        (
            "broken.jsonl",
            b'{"text": "abc"}\n\n{"text": "abc"\n',
            ":3: not valid JSON: Expecting ',' delimiter at column 15",
        ),
        ("value.jsonl", b'{"text": "abc"}\n{"text": \n', ":2: not valid JSON: Expecting value at column 10"),
        ("string.jsonl", b'{"text": "abc\n', ":1: not valid JSON: Unterminated string starting at column 10"),
        ("list.jsonl", b"[1]", ":1: expected a JSON object in each line, found a list"),
        ("broken.json", b'[{"a": 1},\n {"a": ]', ":2: not valid JSON: Expecting value at column 8, in object 2; "),
        ("cut.json", b'[{"a": 1}, {"a": 2}', ":1: not valid JSON: the list does not end at column 20, in object 2"),
        ("comma.json", b'[{"a": 1} {"a": 2}]', ":1: not valid JSON: expected a comma or the list's end at column 11, "),
        (
            "long.json",
            b'[\n{"a": "' + b"x" * 2 * READ_CHARS + b'"},\n\n  {"a" 1}]',
            ":4: not valid JSON: Expecting ':' delimiter at column 8, in object 2; it goes on with '1}]'",
        ),
        ("numbers.json", b"[1]", "expected JSON objects, found a int as number 1"),
        ("wide.csv", b"a,b\n1,2,3\n", ":2: the row has more cells than the header"),
        ("quote.csv", b'a,b\n1,"2\n', ":2: not valid CSV: unexpected end of data"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 1000, mtime=0)[:-20], "is no complete gzip file"),
        ("no.jsonl.gz", b"plain", "is no complete gzip file"),
        ("no.parquet", b"plain", "is no parquet file that can be read"),
    ],
)
def test_files_that_cannot_be_read_are_named_with_what_is_wrong(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=re.escape(str(path)) + ".*" + re.escape(message)):
        list(read_file(path))


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch) -> None:
    path = write(tmp_path, suffix=".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=re.escape(f"{path} needs pyarrow: pip install 'slideformer[parquet]'")):
        list(read_file(path))


def test_a_folder_gives_its_files_in_the_order_of_their_names_and_says_which_it_passes_over(tmp_path) -> None:
    for name in ("b.jsonl", "a/z.csv", "README.md", ".hidden.jsonl", "a/_state.json", "dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found, others = files_of(tmp_path, None)
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/z.csv", "b.jsonl"]
    assert [path.name for path in others] == ["README.md", "dataset_info.json"]


def test_a_folder_with_splits_gives_train_unless_another_is_asked_for(tmp_path) -> None:
    names = ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test.jsonl", "valid/1.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    def names_of(split: str | None) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in files_of(tmp_path, split)[0]]

    assert names_of(None) == names_of("train") == list(names[:2])
    assert names_of("test") == ["data/test.jsonl"]
    assert names_of("validation") == names_of("val") == ["valid/1.jsonl"]
    with pytest.raises(BadInput, match="nothing of the split holdout: its files are of the splits test, train, valid"):
        names_of("holdout")


@pytest.mark.parametrize("split", [None, "train"])
def test_a_link_out_of_a_data_folder_is_not_followed_and_the_hubs_cache_is(tmp_path, split) -> None:
    (tmp_path / "mine.txt").write_text("secret")
    folder = tmp_path / "from elsewhere"
    folder.mkdir()
    name = "rows.txt" if split is None else "train.txt"
    (folder / name).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(BadInput, match=f"{name} leads out of its folder, to .*mine.txt: put the file itself there"):
        files_of(folder, split)
    (folder / name).unlink()
    (folder / "a.txt").write_text("x")
    (folder / name).symlink_to(folder / "a.txt")
    assert folder / name in files_of(folder, split)[0]
    snapshot = tmp_path / "datasets--a--b/snapshots/0123"
    (snapshot / "data").mkdir(parents=True)
    (tmp_path / "datasets--a--b/blobs").mkdir()
    (tmp_path / "datasets--a--b/blobs/77").write_text("x")
    (snapshot / "data/train.txt").symlink_to("../../../blobs/77")
    assert files_of(snapshot, split)[0] == [snapshot / "data/train.txt"]


def test_a_folder_without_rows_is_refused(tmp_path) -> None:
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(BadInput, match="has no file of rows; accepted are .jsonl"):
        open_source(DatasetSpec(path=str(tmp_path)), text_field="text")
    (tmp_path / "rows.jsonl").write_text("x")
    with pytest.raises(BadInput, match="nothing of the split test: the names of its files say no split"):
        open_source(DatasetSpec(path=str(tmp_path), split="test"), text_field="text")


def test_a_pattern_gives_the_files_that_match_it(tmp_path, write_rows) -> None:
    for name in ("b.jsonl", "a.jsonl", "a.csv"):
        write_rows({"text": name}, name=name)
    source = open_source(DatasetSpec(path=f"{tmp_path}/*.jsonl"), text_field="text")
    assert [row.columns["text"] for row in source.rows()] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(BadInput, match=r"no file matches .*/\*.json: check the pattern"):
        open_source(DatasetSpec(path=f"{tmp_path}/*.json"), text_field="text")


def test_a_split_of_a_file_is_refused(write_rows) -> None:
    with pytest.raises(BadInput, match="split of the dataset .* has no meaning for a file"):
        open_source(DatasetSpec(path=str(write_rows({"text": "a"})), split="test"), text_field="text")


def test_max_samples_stops_reading(write_rows) -> None:
    path = write_rows({"text": "a"}, {"text": "b"}, "broken")
    source = open_source(DatasetSpec(path=str(path)), text_field="text", max_rows=2)
    assert [row.number for row in source.rows()] == [1, 2]


def test_a_file_that_the_system_will_not_read_is_bad_input(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/proc/self/mem")  # a regular file whose first page cannot be read, by root neither
    with pytest.raises(BadInput, match=r"the data file .*rows\.jsonl cannot be read"):
        open_source(DatasetSpec(path=str(path)), text_field="text").identity()
