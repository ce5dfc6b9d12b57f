"""Encoded rows on disk: found again, made anew whenever anything differs, and whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.byte_tokenizer import CHATML
from slideformer.data import cache, dataset, workers
from slideformer.data.dataset import load_dataset
from slideformer.data.samples import SampleWriter
from slideformer.errors import BadInput

ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(5)] + [{"prompt": "a", "completion": ""}]


@pytest.fixture
def kept(tmp_path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def load(kept, codec, make_config, write_rows):
    """Loads the rows (or those given) with these fields; `load.encoded` says whether anything was encoded for it."""

    def run(*rows: object, codec=codec, **fields: object):
        path = write_rows(*(rows or ROWS))
        before = entries(kept)
        found = load_dataset(make_config(str(path), **{"dataset_cache_dir": str(kept), **fields}), codec)
        run.encoded = entries(kept) != before
        return found

    return run


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def content(found) -> list[tuple[list[int], list[int], str, int]]:
    return [
        (s.input_ids.tolist(), s.labels.tolist(), s.where, int(s.remarks))
        for source in found.train
        for s in source.samples
    ]


def test_the_second_time_rows_are_not_encoded_and_samples_and_report_are_the_same(load, kept, monkeypatch) -> None:
    first = load(max_length=6)
    assert load.encoded

    def not_again(*args, **kwargs):
        raise AssertionError("rows are encoded again")

    monkeypatch.setattr(workers, "encode_row", not_again)
    second = load(max_length=6)
    assert content(second) == content(first)
    assert second.reports == first.reports
    assert second.reports[0].dropped and second.reports[0].lines() == first.reports[0].lines()
    assert len(entries(kept)) == 1


def test_without_a_cache_nothing_is_kept_and_samples_are_the_same(load, tmp_path, monkeypatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert content(load(dataset_cache_dir=None)) == content(load())
    assert entries(tmp_path / "temporary") == []


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 5},
        {"excess_length_strategy": "drop"},
        {"completion_only_loss": False},
        {"assistant_only_loss": False},
        {"dataset_text_field": "prompt"},
        {"max_samples": 2},
    ],
)
def test_a_setting_that_changes_samples_makes_them_anew(load, change) -> None:
    load()
    load(**change)
    assert load.encoded


@pytest.mark.parametrize("change", [{"packing": True}, {"learning_rate": 1.0}, {"dataset_num_proc": 1}, {"seed": 7}])
def test_a_setting_that_does_not_change_samples_finds_them(load, change) -> None:
    load()
    load(**change)
    assert not load.encoded


def test_other_rows_another_tokenizer_template_version_or_day_make_them_anew(load, make_codec, monkeypatch) -> None:
    load()
    load({"prompt": "0+1=", "completion": "2"}, *ROWS[1:])  # as long as before
    assert load.encoded
    for codec in (
        make_codec(add_bos=True),
        make_codec(merges=(("1", "="),)),
        make_codec(template="{{ messages }}"),
        make_codec(stops=("<end>",)),
    ):
        load(codec=codec)
        assert load.encoded
    monkeypatch.setattr(dataset, "version", lambda name: "another")
    load()
    assert load.encoded
    dated = make_codec(template="{{ strftime_now('%d') }}")
    load(codec=dated)
    load(codec=dated)
    assert not load.encoded

    class Tomorrow(dataset.date):
        @classmethod
        def today(cls):
            return cls(2100, 1, 1)

    monkeypatch.setattr(dataset, "date", Tomorrow)
    load(codec=dated)
    assert load.encoded


def test_a_template_that_prints_the_date_is_warned_of_until_the_date_is_given(load, make_codec) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    codec = make_codec(template="{{ date_string or strftime_now('%d') }}" + CHATML)
    (report,) = load(chat, codec=codec).reports
    (warning,) = report.warnings()
    assert "today's date is in it" in warning and warning.endswith(": 1 row (1)")
    assert load({"text": "abc"}, codec=codec).reports[0].warnings() == []
    fixed = type(codec)(codec.tokenizer, codec.name, codec.end_ids, {"date_string": "26 Jul 2024"})
    found = load(chat, codec=fixed)
    assert found.reports[0].warnings() == []
    assert codec.decode(found.train[0].samples[0].input_ids).startswith("26 Jul 2024<|user|>")


@pytest.mark.parametrize("damage", ["cut", "no facts", "bad facts", "one file missing", "not an array"])
def test_an_entry_that_is_damaged_is_told_and_made_anew(load, kept, caplog, damage) -> None:
    good = content(load())
    (entry,) = [kept / name for name in entries(kept)]
    if damage == "cut":
        os.truncate(entry / "labels.npy", (entry / "labels.npy").stat().st_size - 4)
    elif damage == "no facts":
        (entry / cache.FACTS).unlink()
    elif damage == "bad facts":
        (entry / cache.FACTS).write_text("{")
    elif damage == "one file missing":
        (entry / "numbers.npy").unlink()
    else:
        (entry / "starts.npy").write_bytes(b"x" * 200)
    assert content(load()) == good
    assert content(load()) == good
    assert json.loads((entry / cache.FACTS).read_text())["files"]
    assert caplog.text.count("made anew") == 1


def test_a_run_that_dies_while_it_writes_leaves_nothing_that_is_found(load, kept, monkeypatch) -> None:
    def dies(self) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SampleWriter, "close", dies)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert entries(kept) == []
    assert len(content(load())) == 5


def test_what_killed_processes_left_is_removed_after_a_day(load, kept) -> None:
    for name, age_s in (("old", 2 * cache.ABANDONED_AFTER_S), ("new", 0)):
        folder = kept / f"{cache.PARTIAL}{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (folder.stat().st_atime, folder.stat().st_mtime - age_s))
    load()
    assert [name for name in entries(kept) if name.startswith(cache.PARTIAL)] == [f"{cache.PARTIAL}new"]


def test_what_was_not_used_for_longest_makes_room(load, kept, monkeypatch) -> None:
    for number in range(3):
        load({"text": f"row {number}"})
    names = {name: (kept / name).stat().st_mtime for name in entries(kept)}
    for age, name in enumerate(sorted(names)):
        os.utime(kept / name, (1000 + age, 1000 + age))
    size = sum(file.stat().st_size for file in (kept / sorted(names)[0]).iterdir())
    monkeypatch.setattr(cache, "MAX_NBYTES", int(2.5 * size))
    load({"text": "row 9"})
    left = entries(kept)
    assert len(left) == 2
    assert sorted(names)[2] in left


def test_two_that_encode_the_same_rows_at_the_same_time_are_both_served(
    kept, codec, make_config, write_rows, monkeypatch
) -> None:
    """Each waits until the other has written everything, and only then names its entry. Threads in place of processes:
    what they share are the files."""
    config = make_config(str(write_rows(*ROWS)), dataset_cache_dir=str(kept))
    into_place, both_there = cache._into_place, threading.Barrier(2, timeout=60)

    def meet(partial: Path, final: Path) -> None:
        both_there.wait()
        into_place(partial, final)

    monkeypatch.setattr(cache, "_into_place", meet)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: content(load_dataset(config, codec)), range(2))
    assert one == other
    assert content(load_dataset(config, codec)) == one
    assert len(entries(kept)) == 1


def test_a_cache_that_cannot_be_written_is_told_and_done_without(load, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    assert len(content(load(dataset_cache_dir=str(tmp_path / "file" / "kept")))) == 5
    assert "encoded rows are not kept" in caplog.text


def test_a_full_disk_is_told_with_the_way_out(load, monkeypatch) -> None:
    def full(self, **arrays: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SampleWriter, "add", full)
    with pytest.raises(BadInput, match="cannot be written to .*No space left on device: set dataset_cache_dir"):
        load()


def test_auto_is_a_folder_of_the_user(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder_of("auto") == tmp_path / "slideformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder_of("auto") == tmp_path / ".cache" / "slideformer"
    assert cache.folder_of(None) is None

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache.folder_of("auto") is None
