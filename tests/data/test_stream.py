"""Rows that are read as they are needed: mixture, order, and what holds without knowing how many there are."""

from __future__ import annotations

from collections import Counter

import pytest

from slideformer.data import load_dataset, training_batches
from slideformer.data.encode import IGNORED
from slideformer.data.stream import StreamedBatches
from slideformer.errors import BadInput


@pytest.fixture
def stream(codec, make_config, write_rows):
    """The steps over files of texts a0, a1, ... and b0, b1, ...; keywords are settings."""

    def make(*counts: int, weights: tuple[float, ...] = (1.0, 1.0), **fields: object) -> StreamedBatches:
        specs = []
        for letter, count, weight in zip("ab", counts, weights, strict=False):
            path = write_rows(*[{"text": f"{letter}{i}"} for i in range(count)], name=f"{letter}.jsonl")
            specs.append({"path": str(path), "weight": weight})
        fields = {"max_steps": 50, "per_device_train_batch_size": 2, "shuffle_buffer_size": 5, **fields}
        config = make_config(specs, streaming=True, **fields)
        make.dataset = load_dataset(config, codec)
        return training_batches(make.dataset, config, codec)

    return make


def rows(batches: StreamedBatches, *steps: int) -> list[tuple[str, ...]]:
    return [tuple(row.rsplit("/", 1)[-1] for row in batches.step(k).rows) for k in steps]


def test_every_row_comes_up_before_any_returns(stream) -> None:
    seen = [row for step in rows(stream(10), *range(10)) for row in step]
    assert Counter(seen[:10]) == Counter(seen[10:]) == Counter(f"a.jsonl:{i}" for i in range(1, 11))
    assert seen[:10] != sorted(seen[:10])


def test_rows_move_no_further_than_the_buffer_is_long_and_in_another_order_in_each(stream) -> None:
    seen = [int(row.split(":")[1]) for step in rows(stream(20), *range(10)) for row in step]
    buffers = [[number - start - 1 for number in seen[start : start + 5]] for start in range(0, 20, 5)]
    assert all(sorted(buffer) == [0, 1, 2, 3, 4] for buffer in buffers)
    assert len(set(map(tuple, buffers))) == 4


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_however_one_gets_to_it(stream, packing) -> None:
    fields = {"packing": packing, "max_length": 8}
    straight = rows(stream(10, 7, **fields), *range(12))
    assert rows(stream(10, 7, **fields), 11, 3, 4, 0) == [straight[k] for k in (11, 3, 4, 0)]
    assert rows(stream(10, 7, seed=1, **fields), *range(12)) != straight


def test_datasets_are_mixed_by_weight(stream) -> None:
    letters = Counter(row[0] for step in rows(stream(30, 30, weights=(3.0, 1.0)), *range(200)) for row in step)
    assert 0.7 < letters["a"] / 400 < 0.8  # 0.75, and four standard deviations of 0.022 are 0.09


def test_packed_rows_are_not_over_full(stream) -> None:
    batches = stream(10, packing=True, max_length=8)  # each text is 3 tokens
    for k in range(6):
        step = batches.step(k)
        assert all(m.input_ids.shape[1] <= 8 and m.position_ids is not None for m in step.micro_batches)
        assert sum(int((m.labels != IGNORED).sum()) for m in step.micro_batches) == step.num_target_tokens


def test_the_run_is_one_epoch(stream) -> None:
    batches = stream(10)
    assert (batches.steps_per_epoch, batches.num_steps(epochs=3, max_steps=50)) == (50, 50)
    assert [batches.step(k).epoch for k in (0, 24, 49)] == [0.02, 0.5, 1.0]


def test_the_report_counts_what_was_read_once(stream) -> None:
    batches = stream(10)
    (report,) = stream.dataset.reports
    assert report.lines()[0].startswith(f"{report.path}: 10 of 10 rows so far, streaming, for training")
    rows(batches, *range(20))
    assert report.rows_read == 10


def test_rows_that_cannot_be_used_are_found_before_training_if_all_are(codec, make_config, write_rows) -> None:
    path = write_rows(*[{"text": " "}] * 100)
    with pytest.raises(BadInput, match="no row of .* can be used, of 100: the first is .*rows.jsonl:1: empty text"):
        load_dataset(make_config(str(path), streaming=True, max_steps=5), codec)
    good = write_rows(*[{"text": " "}] * 100, {"text": "abc"})
    dataset = load_dataset(make_config(str(good), streaming=True, max_steps=5), codec)
    assert dataset.reports[0].rows_kept == 1


def test_identity_differs_with_what_is_read_and_how(stream) -> None:
    one = stream(10).identity()
    assert stream(10).identity() == one
    for count, change in ((11, {}), (10, {"max_length": 9}), (10, {"seed": 3}), (10, {"packing": True})):
        assert stream(count, **change).identity() != one
