"""Order, weights, steps and padding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from slideformer.data.batches import Batches, EvaluationBatches, Source, collate
from slideformer.data.encode import IGNORED
from slideformer.data.samples import Sample
from slideformer.errors import BadInput


def sample(name: str, length: int = 3) -> Sample:
    ids = torch.arange(1, length + 1, dtype=torch.int32)
    labels = ids.clone()
    labels[0] = IGNORED
    return Sample(ids, labels, name)


def source(prefix: str, count: int, weight: float = 1.0) -> Source:
    return Source([sample(f"{prefix}{i}", 2 + i % 5) for i in range(count)], weight)


def batches(*sources: Source, rows: int = 2, micro: int = 2, seed: int = 0) -> Batches:
    return Batches(sources, rows, micro, seed, pad_id=9)


def epoch_rows(b: Batches, epoch: int) -> list[str]:
    first = epoch * b.steps_per_epoch
    return [row for step in range(first, first + b.steps_per_epoch) for row in b.step(step).rows]


def test_an_epoch_sees_every_row_once_and_the_next_one_in_another_order() -> None:
    b = batches(source("a", 10))
    assert b.steps_per_epoch == 3
    first, second = epoch_rows(b, 0), epoch_rows(b, 1)
    assert sorted(first) == sorted(second) == sorted(f"a{i}" for i in range(10))
    assert first != second


def test_a_step_of_more_rows_than_an_epoch_has_is_told_once() -> None:
    assert batches(source("a", 4)).warnings() == []
    assert batches(source("a", 3), source("b", 2, 0.5), rows=2, micro=3).warnings() == [
        "a step takes 6 sequences (2 x 3), and there are 4 in an epoch: each step sees all of them once; lower "
        "gradient_accumulation_steps or per_device_train_batch_size for more steps"
    ]


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    straight = batches(source("a", 10))
    rows = [straight.step(k).rows for k in range(9)]
    resumed = batches(source("a", 10))
    assert [resumed.step(k).rows for k in (7, 2, 8)] == [rows[7], rows[2], rows[8]]
    assert [batches(source("a", 10), seed=1).step(k).rows for k in range(9)] != rows


def test_the_order_is_this_one_on_every_machine_and_version() -> None:
    assert epoch_rows(batches(source("a", 6), seed=42), 0) == ["a1", "a2", "a0", "a3", "a5", "a4"]


def test_weights_repeat_rows_or_take_another_share_each_epoch() -> None:
    b = batches(source("a", 4, weight=2.5), source("b", 8, weight=0.25))
    assert b.rows_per_epoch == 12
    epochs = [Counter(epoch_rows(b, e)) for e in range(4)]
    for counts in epochs:
        assert sum(v for k, v in counts.items() if k[0] == "a") == 10
        assert {counts[f"a{i}"] for i in range(4)} == {2, 3}
        assert sum(v for k, v in counts.items() if k[0] == "b") == 2
    total = sum(epochs, Counter())
    assert {total[f"b{i}"] for i in range(8)} == {1}
    assert {total[f"a{i}"] for i in range(4)} == {10}


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match=r"weight 0.01 of a dataset with 4 rows leaves no row in an epoch: raise it"):
        batches(source("a", 4, weight=0.01))


def test_a_step_counts_tokens_without_padding_and_its_epoch() -> None:
    b = batches(source("a", 10))
    steps = [b.step(k) for k in range(3)]
    assert [round(s.epoch, 3) for s in steps] == [0.4, 0.8, 1.0]
    assert [len(s.micro_batches) for s in steps] == [2, 2, 1]
    assert sum(s.num_input_tokens for s in steps) == sum(2 + i % 5 for i in range(10))
    for step in steps:
        labels = [m.labels for m in step.micro_batches]
        assert step.num_target_tokens == sum(int((x[:, 1:] != IGNORED).sum()) for x in labels)


def test_number_of_steps() -> None:
    b = batches(source("a", 10))
    assert b.num_steps(epochs=2, max_steps=-1) == 6
    assert b.num_steps(epochs=1.5, max_steps=-1) == 5
    assert b.num_steps(epochs=2, max_steps=4) == 4


def test_collate_pads_on_the_right_and_padding_is_not_learned() -> None:
    batch = collate([(sample("long", 4),), (sample("short", 2),)], pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 9, 9]]
    assert batch.labels.tolist() == [[IGNORED, 2, 3, 4], [IGNORED, 2, IGNORED, IGNORED]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_a_real_token_equal_to_the_pad_token_is_still_learned() -> None:
    assert collate([(sample("a", 3),)], pad_id=3).labels.tolist() == [[IGNORED, 2, 3]]


def test_rows_of_like_length_share_a_micro_batch_longest_first() -> None:
    found = EvaluationBatches([sample("a", n) for n in (2, 5, 3, 4)], 2, 9)
    assert [m.input_ids.shape[1] for m in found] == [5, 3]


def test_evaluation_sees_every_sample_once() -> None:
    found = EvaluationBatches(source("a", 7).samples, 3, 9)
    assert [len(m.input_ids) for m in found] == [3, 3, 1]
    assert sum(int((m.labels != IGNORED).sum()) for m in found) == sum(1 + i % 5 for i in range(7))
