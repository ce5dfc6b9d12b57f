"""What is given a place on the device when nobody says: as much as there is room for, and what makes a step faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.toys import EAGER, engine_on, toy_decoder, toy_options
from slideformer.engine import EngineOptions
from slideformer.engine.costs import ASSUMED, Costs, assumed
from slideformer.engine.fit import budget_of
from slideformer.engine.placement import Room, place

AUTO = {"saved_on_device": "auto", "resident": "auto", "keep": "auto", "late": "auto"}
LARGE = 2**40


def room(nbytes: int, options: EngineOptions, *, tied: bool = True, speed: float = 1.0) -> Room:
    """A toy on an H200; speed: of its matrix products. nbytes: of the device, the allocator's share not counted."""
    decoder = toy_decoder(tied=tied, dtype=torch.bfloat16)
    rates = replace(ASSUMED["cuda"], flops=speed * ASSUMED["cuda"].flops)
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, torch.bfloat16), rates)
    return Room(decoder.layout, options, costs, decoder.hidden_size, torch.bfloat16, round(nbytes / (1 - 0.04)) + 2)


def least(options: EngineOptions) -> int:
    smallest = replace(options, saved_on_device=0, resident=(), keep=())
    return room(0, options).used(smallest)


@pytest.mark.parametrize("program", [EAGER, {"update": "deferred"}], ids=["eager", "deferred"])
def test_a_card_that_holds_everything_trains_as_if_nothing_slid(program):
    options = toy_options(**AUTO, **program)
    found = place(room(LARGE, options))
    assert found.resident == tuple(range(len(toy_decoder().layout.units)))
    assert found.keep == toy_decoder().layout.blocks


def test_a_card_without_room_gets_the_window_alone():
    options = toy_options(**AUTO)
    for nbytes in (0, least(options) - 1):
        found = place(room(nbytes, options))
        assert (found.resident, found.keep, found.saved_on_device) == ((), (), 0)


def test_the_projection_passes_in_slices_where_the_whole_has_no_room():
    options = toy_options(micro_batch_size=1, max_length=2, **AUTO)
    need = least(replace(options, sliced_head=False))
    assert place(room(need, options)).sliced_head is False
    tight = place(room(need - 100, options))
    assert tight.sliced_head is True and toy_decoder().layout.output not in tight.resident
    assert room(need, options).used(tight) <= need - 100


@pytest.mark.parametrize("program", [EAGER, {"update": "deferred"}], ids=["eager", "deferred"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("speed", [1e-6, 1.0], ids=["slow", "fast"])
def test_never_more_is_placed_than_fits_and_more_room_is_never_slower(program, micro_batches, speed):
    options = toy_options(micro_batches=micro_batches, **AUTO, **program)
    before = float("inf")
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0):
        here = room(int(least(options) + share * 14 * toy_decoder().layout.numel), options, speed=speed)
        found = place(here)
        assert here.used(found) <= here.limit
        assert here.step_s(found) <= before * 1.01, "0.5% is not worth any memory, and may be lost twice"
        before = min(before, here.step_s(found))


def test_what_was_given_stays():
    options = toy_options(saved_on_device=2, resident=(0, 3), keep=(3,), late=(), sliced_head=False)
    assert place(room(LARGE, options)) == options
    slow = {"speed": 1e-6}
    assert place(room(LARGE, replace(options, keep="auto"), **slow)).keep == (3,)
    moved = place(room(LARGE, replace(options, resident="auto", keep=())))
    assert set(moved.resident) > {0, 3} and moved.keep == ()


def test_the_chosen_is_the_best_of_a_sweep_by_hand():
    """Of every number of resident blocks beside the vocabulary matrix and every number of saved inputs that fit."""
    options = toy_options(**AUTO, **EAGER)
    layout = toy_decoder().layout
    here = room(least(options) + 5 * layout.numel, options, speed=1e-3)
    times = []
    for resident in (ends + layout.blocks[:n] for ends in ((), (0, 5)) for n in range(len(layout.blocks) + 1)):
        for saved in range(6):
            trial = replace(options, resident=tuple(sorted(resident)), keep=(), saved_on_device=saved)
            if here.used(trial) <= here.limit:
                times.append(here.step_s(trial))
    assert len(times) > 8 and max(times) > 1.05 * min(times)
    assert here.step_s(place(here)) <= 1.03 * min(times)


def test_bytes_beside_the_plan_are_counted():
    options = toy_options(resident=(1, 2), keep=(2,), micro_batches=3)
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, torch.float32), ASSUMED["cuda"])
    assert isinstance(costs, Costs)
    without = budget_of(decoder.layout, options, **sizes).device_nbytes
    counted = budget_of(decoder.layout, options, **sizes, costs=costs).device_nbytes
    assert counted == without + costs.workspace_nbytes + 3 * costs.blocks[1].kept_nbytes


def test_on_the_cpu_nothing_is_moved_and_all_saved_inputs_stay():
    decoder = toy_decoder()
    with engine_on(decoder, toy_options(**AUTO)) as engine:
        assert engine.step_options.hidden_pool == engine.options.most_saved(decoder.layout)
        assert (engine.step_options.resident, engine.step_options.keep) == ((), ())


def test_what_was_chosen_is_what_is_allocated():
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    for saved in (0, 2, 5):
        options = toy_options(saved_on_device=saved, ahead=())
        with engine_on(decoder, options) as engine:
            assert engine.budget == budget_of(decoder.layout, options, **sizes)
            assert engine.step_options.hidden_pool == saved
