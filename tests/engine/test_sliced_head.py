"""The output projection passes tile by tile: equal to a sequential loop that does the same, and near the whole head."""

from __future__ import annotations

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    engine_on,
    repeated,
    run_engine,
    run_sequential,
    toy_batch,
    toy_decoder,
    toy_options,
)
from slideformer.device.cpu import CpuDevice
from slideformer.schedule import OpKind, Place


@pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])
@pytest.mark.parametrize(
    ("family", "tied", "dtype", "micro_batches", "tile"),
    [
        ("llama", True, torch.float32, 1, 3000),
        ("llama", False, torch.bfloat16, 2, 3000),
        ("llama", True, torch.bfloat16, 3, 10**6),
        ("gemma2", True, torch.float32, 2, 1000),
        ("gpt2", True, torch.bfloat16, 1, 700),
        ("phi", False, torch.float32, 2, 3000),
    ],
    ids=str,
)
def test_five_steps_equal_the_sequential_loop_bit_for_bit(family, tied, dtype, micro_batches, tile, program):
    options = toy_options(micro_batches=micro_batches, sliced_head=True, ring=2, **program)
    steps = repeated(toy_batch(micro_batches))
    expected = run_sequential(toy_decoder(family, tied=tied, dtype=dtype, tile=tile), options, steps)
    decoder = toy_decoder(family, tied=tied, dtype=dtype, tile=tile)
    with engine_on(decoder, options, CpuDevice(jitter_s=5e-4, poison=True)) as engine:
        found = run_engine(engine, steps)
        places = {b.place for b in engine.plan.buffers()}
        assert not any(
            b.place in (Place.DENSE, Place.DENSE_GRAD) and b.index == (decoder.layout.output,)
            for b in engine.plan.buffers()
        )
        assert Place.SLICE in places
    assert expected.fall >= 0.5
    assert found == expected


def test_clipped_and_unclipped_steps_with_tiles_updated_ahead_equal_the_sequential_loop():
    options = toy_options(sliced_head=True, max_grad_norm=2.5, ahead=(0, 1, 2))
    steps = repeated(toy_batch())
    expected = run_sequential(toy_decoder(tile=3000), options, steps)
    assert min(expected.norms) < 2.5 < max(expected.norms)
    with engine_on(toy_decoder(tile=3000), options) as engine:
        assert run_engine(engine, steps) == expected


@pytest.mark.parametrize(
    "frozen", [("embed_tokens", "lm_head"), ("lm_head", "layers"), ("layers", "norm", "embed")], ids=str
)
def test_frozen_parameters_stay_and_the_others_are_trained(frozen):
    options = toy_options(sliced_head=True, max_grad_norm=0.5, micro_batches=2)
    steps = repeated(toy_batch(2))
    make = lambda: toy_decoder(tied=False, tile=3000, frozen=frozen)  # noqa: E731
    expected = run_sequential(make(), options, steps)
    with engine_on(make(), options) as engine:
        assert run_engine(engine, steps) == expected


def test_losses_are_those_of_the_whole_head_but_for_the_order_of_sums():
    """fp32 sums of 259 terms in another order: a few units in the last place, tiny beside a thousandth."""
    batch = toy_batch(2)
    losses = {}
    for sliced in (False, True):
        options = toy_options(sliced_head=sliced, micro_batches=2, **EAGER)
        with engine_on(toy_decoder(tile=3000), options) as engine:
            outcome = run_engine(engine, repeated(batch))
            losses[sliced] = torch.tensor([*outcome.losses, *outcome.norms, *engine.evaluate(batch)])
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-4, atol=0)


def test_no_more_of_the_projection_is_on_the_device_than_a_few_tiles():
    whole, sliced = (toy_options(sliced_head=s, window=1, saved_on_device=0) for s in (False, True))
    sizes = {}
    for options in (whole, sliced):
        with engine_on(toy_decoder(tied=False, tile=640, dtype=torch.bfloat16), options) as engine:
            sizes[options.sliced_head] = engine.budget.device
            seen = [op.tile for op in engine.plan.ops if op.kind is OpKind.HEAD_SEE]
            assert seen == (list(range(len(engine.layout.tiles(engine.layout.output)))) if options.sliced_head else [])
    projection = toy_decoder(tied=False).layout.units[-1].numel
    saved = sum(sizes[False].values()) - sum(sizes[True].values())
    assert 2 * projection <= sizes[False]["vocabulary matrix"] < 2 * projection + 512  # whole pieces of memory
    norms = 512 * len(seen)  # each tile has one, in a whole piece of memory
    assert saved + norms > 7 * projection  # 2 of weights, 4 of sums and 2 of gradients, less the tiles
    slices, sums = 2 * 1536, 2560  # 640 elements in whole pieces: of weights and gradients two each, of sums one
    assert sizes[True]["vocabulary slices"] == slices + sums + slices
