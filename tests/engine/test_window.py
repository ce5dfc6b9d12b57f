"""How many blocks are on the device when nobody says: two, one where two have no room, and the run is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.toys import DEFERRED, EAGER, engine_on, repeated, run_engine, toy_batch, toy_decoder, toy_options
from slideformer.engine import EngineOptions, budget_of
from slideformer.engine.costs import ASSUMED, assumed
from slideformer.engine.placement import Room, place
from slideformer.errors import DoesNotFit

AUTO = {"saved_on_device": "auto", "resident": "auto", "keep": "auto", "late": "auto"}


def host_nbytes(options: EngineOptions) -> int:
    """Of an engine on the CPU."""
    decoder = toy_decoder()
    found = budget_of(decoder.layout, options, hidden_size=decoder.hidden_size, dtype=decoder.dtype)
    return found.on_one_tier().host_nbytes


@pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_a_run_that_fits_with_one_block_alone_takes_one_and_gives_the_same_bits(program, caplog):
    steps = repeated(toy_batch(2), 3)
    options = toy_options(micro_batches=2, **program)
    with engine_on(toy_decoder(), options) as engine:
        expected = run_engine(engine, steps)
        assert engine.options.window == engine.step_options.window == 2
    assert "one block is on the device" not in caplog.text
    one, two = (host_nbytes(replace(options, window=n)) for n in (1, 2))
    assert one < two
    for limit in (one, two - 1):
        with engine_on(toy_decoder(), replace(options, max_host_memory=limit)) as engine:
            assert engine.options.window == engine.step_options.window == 1
            assert run_engine(engine, steps) == expected
    assert caplog.text.count("one block is on the device at a time, since two have no room") == 2
    with engine_on(toy_decoder(), replace(options, max_host_memory=two)) as engine:
        assert engine.options.window == 2


def test_a_window_that_was_given_stays_and_the_advice_is_true():
    options = toy_options(window=2, grad_slots=1, saved_on_device=0)
    limited = replace(options, max_host_memory=host_nbytes(options) - 1)
    with pytest.raises(DoesNotFit, match="Cheapest change that makes it fit: window: 1$"), engine_on_limit(limited):
        pass
    for window in (1, "auto"):
        with engine_on_limit(replace(limited, window=window)) as engine:
            assert engine.options.window == 1


def test_what_fits_with_no_window_is_advised_something_else():
    options = toy_options(grad_slots=1, saved_on_device=0, **EAGER)
    limited = replace(options, max_host_memory=host_nbytes(replace(options, window=1)) - 1)
    with pytest.raises(DoesNotFit, match="Cheapest change that makes it fit: ring: 2$"), engine_on_limit(limited):
        pass
    with engine_on_limit(replace(limited, ring=2)) as engine:
        assert engine.options.max_host_memory == limited.max_host_memory


def engine_on_limit(options: EngineOptions):
    return engine_on(toy_decoder(), options)


def room(nbytes: int, options: EngineOptions) -> Room:
    decoder = toy_decoder(dtype=torch.bfloat16)
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, torch.bfloat16), ASSUMED["cuda"])
    return Room(decoder.layout, options, costs, decoder.hidden_size, torch.bfloat16, round(nbytes / (1 - 0.04)) + 2)


def least(options: EngineOptions) -> int:
    """On a GPU, with the output projection in slices if that is open."""
    smallest = replace(options, saved_on_device=0, resident=(), keep=(), late=(), sliced_head=True)
    return room(0, options).used(smallest)


@pytest.mark.parametrize("program", [EAGER, {"update": "deferred"}], ids=["eager", "deferred"])
def test_a_gpu_gets_one_block_only_where_two_have_no_room_and_what_is_left_is_used(program):
    options = toy_options(**AUTO, **program)
    one, two = (least(replace(options, window=n)) for n in (1, 2))
    assert one < two
    assert place(room(two, options)).window == 2
    tight = room(two - 100, options)
    found = place(tight)
    assert found.window == 1 and tight.used(found) <= tight.limit
    assert found == place(replace(tight, options=replace(options, window=1)))
    assert found.saved_on_device > 0, "a block that is not there leaves room for these"
    assert place(room(one - 100, options)).window == 1, "which takes least of what does not fit"


def test_a_window_that_was_given_stays_on_a_gpu():
    for window in (1, 2, 3):
        options = toy_options(window=window, **AUTO)
        for nbytes in (0, least(options), 2**40):
            assert place(room(nbytes, options)).window == window
