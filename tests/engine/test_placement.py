"""What is given a place on the device when nobody says: as much as there is room for, and what makes a step faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.toys import EAGER, engine_on, tiny_decoder, toy_decoder, toy_options
from slideformer.engine import EngineOptions
from slideformer.engine.costs import ASSUMED, BlockCost, Costs, HeadCost, assumed
from slideformer.engine.fit import budget_of, require_fit
from slideformer.engine.offload import spread
from slideformer.engine.placement import SLICED_OVER, Room, place
from slideformer.errors import BadInput, DoesNotFit
from slideformer.model.decoder import Decoder
from slideformer.model.folder import read_config

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
    for nbytes in (0, least(replace(options, window=1, sliced_head=True)) - 1):
        found = place(room(nbytes, options))
        assert (found.window, found.resident, found.keep, found.saved_on_device) == (1, (), (), 0)


def test_the_projection_passes_in_slices_where_the_whole_has_no_room():
    options = toy_options(micro_batch_size=1, max_length=2, **AUTO)
    need = least(replace(options, sliced_head=False))
    assert place(room(need, options)).sliced_head is False
    tight = place(room(need - 100, options))
    assert tight.sliced_head is True and toy_decoder().layout.output not in tight.resident
    assert room(need, options).used(tight) <= need - 100


def test_a_head_that_could_not_be_tried_as_a_whole_passes_in_slices():
    options = toy_options(**AUTO)
    here = room(2 * least(options), options)
    assert place(here).sliced_head is False
    assert place(replace(here, costs=replace(here.costs, head=None))).sliced_head is True


@pytest.mark.parametrize(("scale", "at_least", "slices"), [(0.25, 1.06, True), (0.55, 1.03, False), (1.0, 0.9, False)])
def test_slices_are_taken_where_they_save_more_than_measurements_differ_by(scale, at_least, slices):
    """scale: what they take themselves, as a share of the whole."""
    options = toy_options(**AUTO, **EAGER)
    here = room(least(options) + 10_000, options, speed=1e-3)
    costs = replace(here.costs, sliced_head=here.costs.sliced_head.times(scale, 1.0))
    here = replace(here, costs=costs, budgets=None)
    by_hand = [replace(here, options=replace(options, sliced_head=value)) for value in (False, True)]
    whole_s, sliced_s = (here.step_s(place(one)) for one in by_hand)
    assert at_least < whole_s / sliced_s < at_least + 0.1
    assert place(here).sliced_head is slices


MODELS = Path(__file__).parents[1] / "recipes" / "models"


@pytest.mark.parametrize("program", [EAGER, {"update": "deferred"}], ids=["eager", "deferred"])
def test_slices_are_tried_where_the_whole_projection_would_be_resident(program):
    """The state of a 1B model's projection takes as much as that of four blocks, and slices cross twice a step."""
    decoder = Decoder(read_config(MODELS / "Llama-3.2-1B"), dtype=torch.bfloat16, tile_numel=1 << 24)
    options = EngineOptions(micro_batch_size=4, max_length=1024, **AUTO, **program)
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, torch.bfloat16), ASSUMED["cuda"])
    here = Room(decoder.layout, options, costs, decoder.hidden_size, torch.bfloat16, 10 << 30)
    whole, sliced = (place(replace(here, options=replace(options, sliced_head=value))) for value in (False, True))
    assert decoder.layout.output in whole.resident
    assert here.step_s(sliced) * SLICED_OVER < here.step_s(whole)
    assert place(here) == sliced
    given = replace(options, resident=(decoder.layout.output,))
    assert place(replace(here, options=given)).sliced_head is False


def sizes_of(decoder) -> dict:
    return {"hidden_size": decoder.hidden_size, "dtype": decoder.dtype}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"resident": (0, 1, 2, 3, 4, 5), "keep": (1, 2)}, "placement: stream"),
        ({"ahead": (0, 1, 2)}, "update_ahead: none"),
        ({"micro_batch_size": 64}, "per_device_train_batch_size: "),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told_with_keys_that_a_config_has(changes, advice):
    decoder = toy_decoder(dtype=torch.bfloat16)
    options = toy_options(**{"saved_on_device": 0, "window": 1, "grad_slots": 1, "ring": 2, **changes})
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, decoder.dtype), ASSUMED["cuda"])
    found = budget_of(decoder.layout, options, **sizes_of(decoder), costs=costs)
    limit = (
        {"max_host_memory": found.host_nbytes - 1}
        if "ahead" in changes
        else {"max_gpu_memory": found.device_nbytes - 1}
    )
    with pytest.raises(DoesNotFit, match=f"Cheapest change that makes it fit: {advice}"):
        require_fit(decoder.layout, replace(options, **limit), **sizes_of(decoder), device_kind="cuda", costs=costs)


def test_what_is_free_on_the_gpu_is_a_limit_too():
    decoder = toy_decoder(dtype=torch.bfloat16)
    options = toy_options()
    need = budget_of(decoder.layout, options, **sizes_of(decoder)).device_nbytes
    fits = lambda free: require_fit(  # noqa: E731
        decoder.layout, options, **sizes_of(decoder), device_kind="cuda", free_nbytes=free
    )
    assert fits(need).device_nbytes == need
    with pytest.raises(DoesNotFit, match="memory that is free on the GPU"):
        fits(need - 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"late": (5,), **EAGER}, r"late names \[5\], must be blocks of the model, 1 to 4"),
        ({"resident": (99,)}, r"resident names \[99\], must be units of the model, 0 to 5"),
        ({"ahead": (77,)}, r"ahead names \[77\]"),
        ({"keep": (1,)}, "which resident does not"),
    ],
    ids=str,
)
def test_units_that_do_not_exist_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(BadInput, match=sentence):
        toy_options(**changes).step_options(toy_decoder().layout, torch.float32)


def test_placement_on_the_cpu_is_told_that_it_has_no_meaning(caplog):
    with engine_on(toy_decoder(), toy_options(resident="all", max_gpu_memory=2**20)) as engine:
        assert engine.step_options.resident == ()
    assert "placement: resident is for a GPU" in caplog.text and "max_gpu_memory limits a GPU" in caplog.text


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
    options = toy_options(window=2, saved_on_device=2, resident=(0, 3), keep=(3,), late=(), sliced_head=False)
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


def test_some_of_many_blocks_lie_apart():
    blocks = tuple(range(1, 29))
    order = spread(blocks)
    assert sorted(order) == list(blocks) and spread((5,)) == [5] and spread(()) == []
    for num in (2, 4, 7, 14, 20):
        chosen = [0, *sorted(order[:num]), 29]
        gaps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
        assert max(gaps) <= 2 * len(blocks) / num + 1, (num, gaps)


def test_bytes_beside_the_plan_are_counted():
    options = toy_options(resident=(1, 2), keep=(2,), micro_batches=3)
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, torch.float32), ASSUMED["cuda"])
    assert isinstance(costs, Costs)
    without = budget_of(decoder.layout, options, **sizes).device_nbytes
    counted = budget_of(decoder.layout, options, **sizes, costs=costs).device_nbytes
    block = costs.blocks[1]
    assert block.kept_workspace_nbytes < block.workspace_nbytes and costs.head is not None
    kept = 3 * block.kept_nbytes
    moments = (kept + costs.head.workspace_nbytes, kept + block.kept_workspace_nbytes, block.workspace_nbytes)
    top = decoder.layout.blocks[-1]
    assert counted == without + max(*moments, (kept if top > 2 else 0) + block.workspace_nbytes)


@pytest.mark.parametrize(
    ("keep", "beside"),
    [((), 100), ((1,), 100), ((3,), 60), ((2, 3), 30), ((1, 2, 3), 30), ((1, 3), 60), ((1, 2), 100)],
)
def test_a_graph_that_is_kept_is_gone_when_the_blocks_below_run_backward(keep, beside):
    """Of three blocks whose graphs take 2 x 20; run again they take 100, with a kept graph 30."""
    layout = tiny_decoder(blocks=3).layout
    block = BlockCost(0, 0, 0, 0, workspace_nbytes=100, kept_workspace_nbytes=30, kept_nbytes=20)
    costs = Costs(ASSUMED["cuda"], (block,) * 3, None, HeadCost(0, 0, 0), measured=False)
    assert costs.blocks_workspace_nbytes(layout, keep=keep, micro_batches=2) == beside


def test_working_memory_is_that_of_the_blocks_as_they_run_and_of_the_head_as_it_passes():
    decoder, options = toy_decoder(dtype=torch.bfloat16), toy_options(resident="all", micro_batches=3)
    layout, shape = decoder.layout, options.batch_shape(decoder.hidden_size, torch.bfloat16)
    costs = assumed(layout, shape, ASSUMED["cuda"])
    costs = replace(costs, head=replace(costs.head, workspace_nbytes=1 << 40), library_nbytes=7)
    block, sliced = costs.blocks[0], costs.sliced_head.workspace_nbytes
    assert block.kept_workspace_nbytes < block.workspace_nbytes

    def working(costs: Costs, *, keep: tuple[int, ...], sliced_head: bool, resident: tuple[int, ...]) -> int:
        here = replace(options, resident=resident, keep=keep, sliced_head=sliced_head)
        return budget_of(layout, here, **sizes_of(decoder), costs=costs).device["working memory"] - 7

    blocks, sums = layout.blocks, shape.tokens * shape.hidden * (2 * 2 + 4)
    assert working(costs, keep=(), sliced_head=False, resident=()) == 1 << 40
    for keep, least in ((blocks, block.kept_workspace_nbytes), (blocks[:-1], block.workspace_nbytes)):
        assert working(costs, keep=keep, sliced_head=True, resident=blocks) == max(least, sums + sliced)
    large = replace(costs, sliced_head=replace(costs.sliced_head, workspace_nbytes=1 << 30))
    assert working(large, keep=(), sliced_head=True, resident=()) == sums + (1 << 30), "not with the blocks' as well"


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
