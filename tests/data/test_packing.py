"""Several samples a row: which, in what order, and what a model makes of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from slideformer.data.batches import Batches, EvaluationBatches, Source, collate
from slideformer.data.dataset import load_dataset, training_batches
from slideformer.data.encode import IGNORED
from slideformer.data.packing import best_fit
from slideformer.data.samples import Sample


def sample(name: str, length: int) -> Sample:
    ids = torch.arange(1, length + 1, dtype=torch.int32)
    return Sample(ids, ids.clone(), name)


LENGTHS = [3, 9, 1, 4, 4, 7, 2, 5, 5, 6, 8, 3, 10, 1]


def packed(lengths=LENGTHS, *, weight: float = 1.0, seed: int = 0, rows: int = 2, micro: int = 2) -> Batches:
    source = Source([sample(f"a{i}", n) for i, n in enumerate(lengths)], weight)
    return Batches((source,), rows, micro, seed, pad_id=0, pack_length=10)


def test_best_fit_takes_the_fullest_row_that_still_has_room() -> None:
    # 7; 6 needs a new row; 4 fits exactly beside 6, not beside 7; 3 beside 7.
    assert best_fit([4, 7, 3, 6], 10, range(4)) == [[1, 2], [3, 0]]
    assert best_fit([5, 5, 5], 10, [2, 0, 1]) == [[2, 0], [1]]
    assert best_fit([], 10, []) == []
    with pytest.raises(ValueError, match="a sample of 11 tokens is longer than a row of 10"):
        best_fit([11], 10, [0])


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each row, by looking at every row for every sample."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, used in enumerate(rows) if used + length <= capacity]
        if fitting:
            rows[max(fitting, key=lambda i: rows[i])] += length
        else:
            rows.append(length)
    return sorted(rows)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=60), st.randoms())
def test_rows_are_those_of_plain_best_fit_decreasing_whatever_the_order(lengths, chance) -> None:
    order = list(range(len(lengths)))
    chance.shuffle(order)
    rows = best_fit(lengths, 20, order)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in row) for row in rows) == plain_best_fit(lengths, 20)


def test_every_sample_comes_up_once_an_epoch_and_no_row_is_over_full() -> None:
    b = packed()
    for epoch in range(2):
        steps = [b.step(epoch * b.steps_per_epoch + k) for k in range(b.steps_per_epoch)]
        assert Counter(row for step in steps for row in step.rows) == Counter(f"a{i}" for i in range(len(LENGTHS)))
        assert steps[-1].epoch == epoch + 1
        assert sum(step.num_input_tokens for step in steps) == sum(LENGTHS)
        for step in steps:
            assert all(m.input_ids.shape[1] <= 10 for m in step.micro_batches)
    assert sum(LENGTHS) / 10 <= b.num_packs[0] < len(LENGTHS) / 1.5


def test_packs_and_their_order_follow_from_seed_and_epoch_alone() -> None:
    straight = packed()
    rows = [straight.step(k).rows for k in range(9)]
    resumed = packed()
    assert [resumed.step(k).rows for k in (7, 2, 8)] == [rows[7], rows[2], rows[8]]
    assert [packed(seed=1).step(k).rows for k in range(9)] != rows
    assert rows[: straight.steps_per_epoch] != rows[straight.steps_per_epoch : 2 * straight.steps_per_epoch]


def test_samples_of_one_length_are_packed_with_others_than_their_neighbours_in_the_file() -> None:
    b = packed([5] * 40)
    pairs = [{int(name[1:]) for name in row} for row in (_names(b, i) for i in range(20))]
    assert sum(abs(max(p) - min(p)) == 1 for p in pairs) < 10


def _names(b: Batches, pack: int) -> list[str]:
    return [s.where for s in b._row(0, pack)]


def test_weights_count_packs() -> None:
    b = packed([5] * 8, weight=2.5)
    counts = Counter(row for k in range(b.steps_per_epoch) for row in b.step(k).rows)
    assert sorted(counts.values()) == [2] * 4 + [3] * 4


def test_positions_begin_anew_and_first_tokens_are_no_targets_nor_is_padding() -> None:
    batch = collate([(sample("a", 3), sample("b", 2)), (sample("c", 1), sample("d", 1))], pad_id=9, packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 1, 2], [1, 1, 9, 9, 9]]
    assert batch.labels.tolist() == [[IGNORED, 2, 3, IGNORED, 2], [IGNORED] * 5]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]
    assert batch.attention_mask is None


def test_the_counted_targets_are_those_of_the_tensors() -> None:
    for b in (packed(), packed(rows=1, micro=3)):
        for k in range(b.steps_per_epoch):
            step = b.step(k)
            found = sum(int((m.labels[:, 1:] != IGNORED).sum()) for m in step.micro_batches)
            assert found == step.num_target_tokens
            assert [len(m.input_ids) for m in step.micro_batches] == [len(rows) for rows in step.layout]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_models_logits_of_each_sample_in_a_pack_are_those_of_it_alone(attention) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, attn_implementation=attention, **sizes)
    model = LlamaForCausalLM(config).eval()
    rows = [tuple(sample("x", n) for n in lengths) for lengths in ((5, 1, 9), (4, 4), (12,))]
    batch = collate(rows, pad_id=0, packed=True)
    with torch.no_grad():
        together = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        for row, samples in enumerate(rows):
            at = 0
            for one in samples:
                alone = model(one.input_ids[None].long()).logits[0]
                torch.testing.assert_close(together[row, at : at + len(one)], alone, rtol=0, atol=1e-4)
                at += len(one)


def test_evaluation_packs_too_and_sees_every_target_once() -> None:
    samples = [sample(f"a{i}", n) for i, n in enumerate(LENGTHS)]
    batches = EvaluationBatches(samples, 2, 9, pack_length=10)
    assert sum(int((m.labels != IGNORED).sum()) for m in batches) == sum(n - 1 for n in LENGTHS)
    assert sum(len(m.input_ids) for m in batches) == packed().num_packs[0]


def test_the_report_says_how_full_the_rows_are(codec, make_config, write_rows) -> None:
    path = write_rows(*[{"text": "x" * n} for n in (4, 4, 9, 2)])  # with their end tokens 5, 5, 10, 3
    config = make_config(str(path), packing=True, max_length=10)
    dataset = load_dataset(config, codec)
    batches = training_batches(dataset, config, codec)
    assert batches.pack_length == 10
    assert "  packed into 3 rows, 77% full" in dataset.reports[0].lines()
    assert dataset.reports[0].as_dict()["packs"] == 3
