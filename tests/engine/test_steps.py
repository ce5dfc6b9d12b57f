"""Steps on batches that differ in length, micro-batches and padding. Each equals the sequential loop bit for bit."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    TINY_VOCAB,
    engine_on,
    run_engine,
    run_sequential,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_batch,
    toy_decoder,
    toy_options,
    write_weights,
)
from slideformer.data.batches import MicroBatch
from slideformer.device.cpu import CpuDevice
from slideformer.engine.feed import build_feed
from slideformer.errors import BadInput

PROGRAMS = pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def assert_equal(decoder, options, steps) -> None:
    expected = run_sequential(decoder, options, steps)
    with engine_on(decoder, options) as engine:
        assert run_engine(engine, steps) == expected


@PROGRAMS
@DTYPES
def test_batches_of_other_lengths_and_rows_join_without_a_drain(program, dtype):
    options = toy_options(**program, micro_batch_size=4, micro_batches=2, saved_on_device=3)
    shapes = [(4, 12), (1, 3), (3, 12), (4, 5), (2, 1), (48, 1), (1, 48)]  # the last ones: as many tokens, other sides
    batches = [tiny_batch(2, rows=rows, length=length, seed=rows + length) for rows, length in shapes if length > 1]
    batches += [[*tiny_batch(1, length=6, seed=9), MicroBatch(*[torch.full((rows, 1), 7)] * 2)] for rows in (2, 48)]
    assert_equal(tiny_decoder(dtype=dtype), options, [(batch, LR) for batch in batches])


@PROGRAMS
@DTYPES
def test_a_ragged_last_step_has_fewer_micro_batches(program, dtype):
    options = toy_options(**program, micro_batches=5, saved_on_device=2, hidden_ring=2)
    batches = [tiny_batch(m, seed=m) for m in (5, 5, 2, 5, 3, 1, 4)]
    assert_equal(tiny_decoder(dtype=dtype, tied=False), options, [(batch, LR) for batch in batches])


@PROGRAMS
def test_a_micro_batch_whose_labels_are_all_ignored_adds_nothing(program):
    first, second = tiny_batch(2)
    silent = [MicroBatch(m.input_ids, torch.full_like(m.labels, -100)) for m in (first, second)]
    options = toy_options(**program, micro_batches=2)
    for batch in ([silent[0], second], [first, silent[1]]):
        assert_equal(tiny_decoder(), options, [(batch, LR)] * 2)


def test_a_micro_batch_without_labels_leaves_loss_and_gradient_as_they_were():
    first, second = tiny_batch(2)
    silent = MicroBatch(second.input_ids[:, :7], torch.full_like(second.labels[:, :7], -100))
    decoder, options = tiny_decoder(), toy_options(**EAGER, micro_batches=2)
    alone = run_sequential(decoder, options, [([first], LR)])
    both = run_sequential(decoder, options, [([first, silent], LR)])
    assert both.losses == alone.losses
    # rows that only the silent batch touches are summed in another place of the norm
    assert both.norms == pytest.approx(alone.norms, rel=1e-6)


def test_a_batch_may_touch_every_row_of_the_table_or_one():
    options = toy_options(**DEFERRED, micro_batch_size=8)
    every = torch.arange(TINY_VOCAB).repeat(3)[: 8 * 12].view(8, 12)
    one = torch.full((2, 12), 7)
    steps = [([MicroBatch(ids, ids.clone())], LR) for ids in (every, one, every)]
    for tied in (True, False):
        assert_equal(tiny_decoder(tied=tied, tile=64), options, steps)


def test_one_row_of_two_tokens_is_a_batch():
    options = toy_options(**DEFERRED)
    ids = torch.tensor([[3, 5]])
    assert_equal(tiny_decoder(), options, [([MicroBatch(ids, ids.clone())], LR)] * 2)


@pytest.mark.parametrize("tile", [8, 16, 33])  # a row has 16 elements
def test_a_tile_may_be_smaller_than_a_row(tile):
    options = toy_options(**EAGER, ring=1)
    assert_equal(tiny_decoder(tile=tile, blocks=1), options, [(tiny_batch(1, seed=s), LR) for s in range(2)])


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", False), ("gemma3", True), ("phi3", False)])
def test_masks_and_positions_reach_the_model(family, tied):
    """Left padding, holes and given positions go to the model's own code; right padding does not need to."""
    ids, labels = (getattr(toy_batch()[0], name) for name in ("input_ids", "labels"))
    left, right, hole = (torch.ones_like(ids) for _ in range(3))
    left[0, :4], right[1, -5:], hole[1, 5:7] = 0, 0, 0
    positions = torch.arange(12).expand(2, -1).clone()
    positions[0] = torch.cat([torch.arange(5), torch.arange(7)])  # two samples in one row
    batch = [
        MicroBatch(ids, labels.masked_fill(left == 0, -100), left),
        MicroBatch(ids, labels.masked_fill(right == 0, -100), right),
        MicroBatch(ids, labels.masked_fill(hole == 0, -100), hole, (hole.cumsum(1) - 1).clamp(min=0)),
        MicroBatch(ids, labels, None, positions),
    ]
    options = toy_options(**DEFERRED, micro_batches=4)
    assert_equal(toy_decoder(family, tied=tied), options, [(batch, LR), (batch[::-1], LR)])


def test_a_mask_and_positions_change_the_result():
    """Else the test above could pass with both of them dropped."""
    options, decoder = toy_options(**EAGER), toy_decoder("gpt2")
    (plain,) = toy_batch()
    left = torch.ones_like(plain.input_ids)
    left[0, :4] = 0
    positions = torch.arange(12).flip(0).expand(2, -1)
    others = [
        MicroBatch(plain.input_ids, plain.labels, left),
        MicroBatch(plain.input_ids, plain.labels, None, positions),
    ]
    with engine_on(decoder, options) as engine:
        losses = []
        for micro in (plain, *others):
            write_weights(decoder.layout, engine)
            losses.append(engine.evaluate([micro])[0])
    assert len(set(losses)) == 3


def test_right_padding_gives_the_same_with_and_without_a_mask():
    (micro,) = toy_batch()
    right = torch.ones_like(micro.input_ids)
    right[1, -5:] = 0
    labels = micro.labels.masked_fill(right == 0, -100)
    decoder, options = toy_decoder("qwen2"), toy_options(**EAGER)
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    outcomes = []
    for mask in (right, right.bool(), None):
        batch = [MicroBatch(micro.input_ids, labels, mask)]
        feed = build_feed(batch, shape, decoder.layout, None)
        assert feed.micro[0].attention_mask is None, "no causal query sees what lies to its right"
        assert feed.num_tokens == (19 if mask is not None else 24)
        with engine_on(decoder, options) as engine:
            outcomes.append(run_engine(engine, [(batch, LR)]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_batch_may_be_changed_as_soon_as_step_has_returned():
    decoder, options = tiny_decoder(), toy_options(**EAGER, micro_batches=2)
    steps = [(tiny_batch(2, seed=s), LR) for s in range(4)]
    expected = run_sequential(decoder, options, steps)
    with engine_on(decoder, options) as engine:
        write_weights(decoder.layout, engine)
        for batch, lr in steps:
            engine.step(batch, lr=lr)
            for micro in batch:
                micro.input_ids.fill_(1)
                micro.labels.fill_(-100)
        engine.synchronize()
        assert state_hashes(engine) == expected.state


@PROGRAMS
def test_delays_of_many_milliseconds_change_nothing(program):
    """A hundred times as long as an op takes itself."""
    decoder, options = tiny_decoder(blocks=2), toy_options(**program, micro_batches=2, saved_on_device=1)
    steps = [(tiny_batch(2, seed=s, length=12 - s), LR) for s in range(4)]
    expected = run_sequential(decoder, options, steps)
    for seed in range(2):
        with engine_on(decoder, options, CpuDevice(jitter_s=1e-2, poison=True, seed=seed)) as engine:
            assert run_engine(engine, steps) == expected


@PROGRAMS
def test_a_long_run_leaves_nothing_behind(program):
    """Buffers stay where they are, and marks and results go when the caller lets go of them."""
    options = toy_options(**program)
    with engine_on(tiny_decoder(blocks=2), options, CpuDevice()) as engine:
        write_weights(engine.layout, engine)
        addresses, living = [], []
        for index in range(30):
            batch = tiny_batch(seed=index, length=4 + index % 9)
            loss = engine.step(batch, lr=LR).loss
            assert loss == loss
            if index in (4, 29):
                engine.synchronize()
                gc.collect()
                held = engine.executor.buffers.values()
                addresses.append([t.data_ptr() for t in held if isinstance(t, torch.Tensor)])
                living.append(Counter(type(o).__name__ for o in gc.get_objects()))
        assert addresses[0] == addresses[1]
        for name in ("HostMark", "Event", "Run", "Feed", "StepResult", "Tensor", "partial", "Reach", "frame"):
            assert living[1][name] <= living[0][name], name
        assert living[0]["HostMark"] >= len(engine.plan.ops)


WRONG = [
    (dict(input_ids=torch.zeros(2, 12, dtype=torch.int32)), "input_ids must be int64"),
    (dict(input_ids=torch.zeros(24, dtype=torch.int64)), "input_ids must be int64"),
    (dict(input_ids=torch.zeros(0, 12, dtype=torch.int64)), "input_ids must be int64"),
    (dict(labels=torch.zeros(2, 11, dtype=torch.int64)), "labels is [2, 11], input_ids is [2, 12]"),
    (dict(attention_mask=torch.ones(2, 13)), "attention_mask is [2, 13]"),
    (dict(position_ids=torch.full((2, 12), -1)), "position -1 is negative"),
    (dict(position_ids=torch.full((2, 12), 64)), "has 65 positions, and the model's position table has 64"),
    (dict(input_ids=torch.full((2, 12), 307)), "token id 307 is outside the vocabulary of 307"),
    (dict(input_ids=torch.full((2, 12), -1)), "token id -1 is outside"),
    (dict(labels=torch.full((2, 12), 400)), "label 400 is neither a token"),
    (dict(labels=torch.full((2, 12), -100)), "no target tokens"),
    (dict(input_ids=torch.zeros(3, 12, dtype=torch.int64), labels=torch.zeros(3, 12, dtype=torch.int64)), "3 x 12"),
    (dict(input_ids=torch.zeros(1, 65, dtype=torch.int64), labels=torch.zeros(1, 65, dtype=torch.int64)), "1 x 65"),
]


def test_a_batch_that_does_not_fit_is_refused_and_nothing_is_done():
    decoder, options = toy_decoder("gpt2"), toy_options(**EAGER)
    good = toy_batch()
    with engine_on(decoder, options) as engine:
        write_weights(decoder.layout, engine)
        for change, sentence in WRONG:
            bad = MicroBatch(good[0].input_ids, good[0].labels)
            for name, value in change.items():
                setattr(bad, name, value)
            with pytest.raises(BadInput) as error:
                engine.step([bad], lr=LR)
            assert sentence in str(error.value)
        for batch, lr in (([], LR), (good * 2, LR), (good, -1.0), (good, float("nan")), (good, float("inf"))):
            with pytest.raises(BadInput):
                engine.step(batch, lr=lr)
        engine.step(good, lr=LR)
        engine.synchronize()
        found = state_hashes(engine)
        assert engine.num_updates == 1
    assert found == run_sequential(decoder, options, [(good, LR)]).state
