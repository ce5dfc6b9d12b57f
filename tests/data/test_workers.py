"""Encoding in several processes: the same samples, reports and errors as in one."""

from __future__ import annotations

import dataclasses
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest

from slideformer.data import workers
from slideformer.data.dataset import load_dataset
from slideformer.data.encode import EncodingRules
from slideformer.data.files import read_file
from slideformer.data.formats import RowFormat
from slideformer.data.rows import RawRow
from slideformer.data.workers import Encoder
from slideformer.errors import BadInput, RunFailed


@pytest.fixture
def load(codec, make_config, write_rows, monkeypatch):
    """The samples and report of rows, four a chunk, by `num_proc` processes."""
    monkeypatch.setattr(workers, "CHUNK_ROWS", 4)

    def run(rows: list[object], num_proc: int, **fields: object):
        config = make_config(str(write_rows(*rows)), dataset_num_proc=num_proc, dataset_cache_dir=None, **fields)
        found = load_dataset(config, codec)
        samples = found.train[0].samples
        arrays = [np.array(getattr(samples, name)).tolist() for name in ("input_ids", "labels", "starts", "numbers")]
        return arrays, found.reports

    return run


def chat(asked: str, answered: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def test_the_result_is_the_same_for_any_number_of_processes(load) -> None:
    rows = [chat(f"question {i}", " " if i % 7 == 0 else "x" * i) for i in range(50)]
    assert load(rows, 1, max_length=40) == load(rows, 2, max_length=40)


def test_the_first_error_in_order_is_told_though_reading_is_ahead_and_finds_a_worse_one(
    codec, make_config, write_rows, monkeypatch
) -> None:
    """With threads in place of processes, which take seconds to start."""
    path = write_rows(*[chat("a", "b")] * 5, chat("a", ""), *[chat("a", "b")] * 30, "{")
    encoder = Encoder(codec, RowFormat(), EncodingRules.of(make_config()), strict=True)
    monkeypatch.setattr(workers, "_own", [encoder])
    with ThreadPoolExecutor(2) as pool, pytest.raises(BadInput, match="rows.jsonl:6: empty answer"):
        list(workers._in_order(workers._groups(read_file(path), 4), pool, 100))
    lenient = dataclasses.replace(encoder, strict=False)
    monkeypatch.setattr(workers, "_own", [lenient])
    with ThreadPoolExecutor(2) as pool, pytest.raises(BadInput, match="rows.jsonl:37: not valid JSON"):
        list(workers._in_order(workers._groups(read_file(path), 4), pool, 100))


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


def test_a_process_that_dies_is_told_with_what_mostly_is_the_reason() -> None:
    with pytest.raises(RunFailed, match="has died: if memory is short, lower dataset_num_proc; .*__main__"):
        list(workers.encode_all([RawRow("a", 1, {})], Deadly(), num_proc=2))


class SignalMask:
    """Becomes, in the process that receives it, the signals that are blocked there."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.pthread_sigmask, (signal.SIG_BLOCK, ())


def test_ctrl_c_is_for_the_process_that_the_others_work_for() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    (blocked,) = workers.encode_all([SignalMask()], SimpleNamespace(encode=itemgetter(0)), num_proc=2)
    assert signal.SIGINT in blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
