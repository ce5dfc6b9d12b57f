"""An evaluation measures and changes nothing."""

from __future__ import annotations

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    engine_on,
    repeated,
    run_sequential,
    state_hashes,
    toy_batch,
    toy_decoder,
    toy_options,
    write_weights,
)
from families import FAMILIES, random_model
from slideformer.data.batches import MicroBatch

PROGRAMS = pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])


def split_rows(batch: MicroBatch, rows: int) -> list[MicroBatch]:
    pieces = zip(batch.input_ids.split(rows), batch.labels.split(rows), strict=True)
    return [MicroBatch(ids, labels) for ids, labels in pieces]


@PROGRAMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_evaluation_is_the_same_for_every_batch_size_and_changes_nothing(program, dtype):
    """Six rows by one, two, three and six; between two steps that are under way."""
    decoder = toy_decoder(dtype=dtype)
    options = toy_options(**program, micro_batch_size=6, micro_batches=6, saved_on_device=2)
    (batch,) = toy_batch(rows=6)
    steps = repeated(toy_batch(2), 4)
    with engine_on(decoder, options) as engine:
        write_weights(engine.layout, engine)
        for batch_before, lr in steps[:2]:
            engine.step(batch_before, lr=lr)
        sums = {rows: engine.evaluate(split_rows(batch, rows)) for rows in (1, 2, 3, 6)}
        before = state_hashes(engine), engine.num_updates, torch.get_rng_state()
        again = engine.evaluate([batch])
        after = state_hashes(engine), engine.num_updates, torch.get_rng_state()
        assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        assert again == sums[6]
        losses = {rows: total / count for rows, (total, count) in sums.items()}
        tolerance = 1e-6 if dtype is torch.float32 else 2**-8  # bf16 products are summed in another order
        assert all(loss == pytest.approx(losses[1], rel=tolerance) for loss in losses.values())
        for batch_after, lr in steps[2:]:
            engine.step(batch_after, lr=lr)
        engine.synchronize()
        found = state_hashes(engine)
    assert found == run_sequential(decoder, options, steps).state


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere", "granite", "phi"])
def test_the_loss_is_that_of_the_whole_model(family):
    """1e-6: the same fp32 operations, but for the sum over tokens."""
    config = FAMILIES[family](False)
    model = random_model(config)
    decoder = toy_decoder(family, tied=False)
    batch = toy_batch(3)
    weights = model.state_dict()
    with engine_on(decoder, toy_options(**EAGER, micro_batches=3)) as engine:
        for index, unit in enumerate(decoder.layout.units):
            for param in unit.params:
                engine.write(index, unit.offsets[param.name], weights[param.name].flatten())
        total, count = engine.evaluate(batch)
    assert count == sum(int((m.labels[:, 1:] != -100).sum()) for m in batch)
    with torch.no_grad():
        expected = sum(float(model(m.input_ids, labels=m.labels, num_items_in_batch=1).loss) for m in batch)
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_targets_counts_for_nothing():
    with engine_on(toy_decoder(), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        ids = toy_batch()[0].input_ids
        assert engine.evaluate([MicroBatch(ids, torch.full_like(ids, -100))]) == (0.0, 0)
        assert engine.evaluate([MicroBatch(ids[:, :1], ids[:, :1])]) == (0.0, 0)


def test_evaluation_before_the_first_step_and_of_every_size_leaves_the_steps_alone():
    decoder, options = toy_decoder("qwen3", tied=False), toy_options(**DEFERRED, micro_batches=3)
    steps = repeated(toy_batch(3), 3)
    with engine_on(decoder, options) as engine:
        write_weights(engine.layout, engine)
        for count, (batch, lr) in enumerate(steps, start=1):
            engine.evaluate(toy_batch(count, length=5 + count))
            engine.step(batch, lr=lr)
        engine.evaluate(toy_batch(1, length=3))
        found = state_hashes(engine)
    assert found == run_sequential(decoder, options, steps).state
    assert LR > 0
