"""What goes to disk when shares are given, and when the host has too little room."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from engine.toys import EAGER, plans_of, tiny_decoder, toy_decoder, toy_options
from slideformer.engine import Offload
from slideformer.engine.costs import Rates, assumed
from slideformer.engine.fit import budget_of, listed
from slideformer.engine.offload import HostRoom, offloaded
from slideformer.engine.options import RING_PLACES
from slideformer.engine.read_ahead import DEPTHS, GAIN, LEAST_BLOCKS, Tried, cut, step_s
from slideformer.engine.settle import budgets_of, deepened, with_disk
from slideformer.layout import UnitKind
from slideformer.schedule import Place
from slideformer.schedule.ops import DISK_LANES, LaneName

NOTHING = Offload(0.0, 0.0, 0.0)
HERE = {"offload_dir": "somewhere", "saved_on_device": 0, "micro_batches": 2, "disk_ring": 1}


def settled(offload: Offload, *, host_nbytes: int = 2**50, dtype=torch.bfloat16, tied: bool = True, **changes):
    """(decoder, options with the disk decided)"""
    decoder = toy_decoder(tied=tied, dtype=dtype)
    options = toy_options(offload=offload, **{**HERE, **EAGER, **changes})
    return decoder, with_disk(options, decoder, "cuda", budgets_of(decoder, None), host_nbytes)


def used(decoder, options):
    return budget_of(decoder.layout, options, hidden_size=decoder.hidden_size, dtype=decoder.dtype)


def of_content(decoder, options, content: str) -> set[int]:
    return {unit for found, unit in options.disk if found == content}


def test_half_of_the_moments_are_the_second_ones():
    decoder, options = settled(replace(NOTHING, moments=0.5))
    assert of_content(decoder, options, "exp_avg_sq") == set(range(len(decoder.layout.units)))
    assert {content for content, _ in options.disk} == {"exp_avg_sq"}


def test_half_of_the_planes_are_the_residuals_and_all_of_them_the_weights_too():
    decoder, options = settled(replace(NOTHING, planes=0.5))
    assert {content for content, _ in options.disk} == {"residual"}
    _, options = settled(replace(NOTHING, planes=1.0))
    assert len(options.disk) == 2 * len(decoder.layout.units)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8, 1.0])
def test_the_host_gives_up_the_share_to_the_unit_that_comes_nearest(share):
    decoder, options = settled(Offload(share, share, share))
    whole = used(decoder, replace(options, disk=(), saved_on_disk=0)).host
    found = used(decoder, options).host
    moments, planes = ("first moments", "second moments"), ("weights", "residuals")
    largest = max(u.numel for u in decoder.layout.units)
    for terms, itemsize in ((moments, 4), (planes, 2)):
        kept, all_of = (sum(host.get(term, 0) for term in terms) for host in (found, whole))
        assert abs(kept - (1 - share) * all_of) <= itemsize * largest / 2 + 64 * len(decoder.layout.units)
    saved = whole["saved inputs"]
    assert found.get("saved inputs", 0) == pytest.approx((1 - share) * saved, abs=saved / 8)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_saved_inputs_on_disk_lie_evenly_over_all_that_are_spilled(share):
    decoder = tiny_decoder(dtype=torch.bfloat16, blocks=24)
    options = toy_options(offload=replace(NOTHING, saved=share), **{**HERE, **EAGER, "micro_batches": 1})
    found = with_disk(options, decoder, "cuda", budgets_of(decoder, None), 2**50)
    spilled, positions = (
        {b.index[0] for op in plans_of(decoder.layout, o, decoder.dtype)[0].ops for b in saved_of(op, lanes)}
        for o, lanes in ((replace(found, saved_on_disk=0), LaneName), (found, DISK_LANES))
    )
    num = len(spilled)
    assert num >= 20 and found.saved_over == num and found.saved_on_disk == round(share * num)
    evenly = {-(-i * num // found.saved_on_disk) for i in range(found.saved_on_disk)}
    assert positions in (evenly, evenly - {max(evenly)}), "the last may never leave its ring"


def saved_of(op, lanes) -> list:
    return [a.buffer for a in op.accesses if a.buffer.place is Place.SAVED and op.lane in lanes]


def test_evenly_is_faster_by_the_clock_than_the_first_that_are_spilled():
    decoder = tiny_decoder(dtype=torch.bfloat16, blocks=24)
    options = toy_options(saved_on_device=0, offload_dir="somewhere", **{**EAGER, "micro_batches": 1})
    shape = options.batch_shape(decoder.hidden_size, torch.bfloat16)
    rates = Rates(1e15, link_nbytes=1e12, update_numel=1e15, host_nbytes=1e15, device_nbytes=1e15, disk_nbytes=1e9)
    an_input_s = shape.micro_tokens * shape.hidden * 2 / rates.disk_nbytes
    costs = assumed(decoder.layout, shape, rates)
    blocks = tuple(replace(b, forward_s=0.3 * an_input_s, backward_s=0.6 * an_input_s) for b in costs.blocks)

    def seconds(over: int) -> float:
        given = replace(options, saved_on_disk=12, saved_over=over)
        tried = Tried(decoder.layout, given, replace(costs, blocks=blocks))
        return step_s(tried, 3, decoder.hidden_size, torch.bfloat16)[0]

    assert seconds(24) < 0.9 * seconds(0)


def test_blocks_on_disk_lie_evenly_over_the_model_and_the_table_goes_last():
    decoder, options = settled(replace(NOTHING, moments=0.2))
    blocks = decoder.layout.blocks
    first, second = blocks[0], blocks[len(blocks) // 2]
    assert of_content(decoder, options, "exp_avg_sq") >= {first, second}
    for share in (0.1, 0.2, 0.3, 0.4):
        assert 0 not in of_content(*settled(replace(NOTHING, moments=share)), "exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_with_too_little_room_as_much_goes_as_must_and_weights_last(dtype, tied):
    auto = Offload()
    decoder, options = settled(auto, dtype=dtype, tied=tied)
    need = used(decoder, options).host_nbytes
    assert options.disk == () and options.saved_on_disk == 0, "there is room for all of it"
    everything = used(decoder, settled(Offload(1.0, 1.0, 1.0), dtype=dtype, tied=tied)[1]).host_nbytes
    for share in (0.9, 0.7, 0.5, 0.3, 0.1):
        limit = int(everything + share * (need - everything))
        _, options = settled(auto, host_nbytes=limit, dtype=dtype, tied=tied)
        assert used(decoder, options).host_nbytes <= limit
        if of_content(decoder, options, "weight"):
            assert len(of_content(decoder, options, "exp_avg")) == len(decoder.layout.units)
            assert options.saved_on_disk
        if options.saved_on_disk:
            assert of_content(decoder, options, "residual"), "state first: as costly, and there is more of it"


def test_resident_units_and_second_copies_stay_where_they_are():
    decoder = toy_decoder(dtype=torch.bfloat16)
    options = toy_options(offload=Offload(1.0, 1.0, 0.0), resident=(0, 2), ahead=(3,), **HERE)
    found = with_disk(options, decoder, "cuda", budgets_of(decoder, None), 2**50)
    assert {unit for _, unit in found.disk} == set(range(len(decoder.layout.units))) - {0, 2, 3}


def test_without_a_folder_nothing_is_decided():
    decoder = toy_decoder(dtype=torch.bfloat16)
    options = toy_options()
    room = HostRoom(decoder.layout, decoder.dtype, lambda _: pytest.fail("asked"), 0, 1)
    assert offloaded(options, room) is options


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("program", [EAGER, {"max_grad_norm": 0.5}], ids=["eager", "deferred"])
def test_a_step_and_an_evaluation_with_most_micro_batches_name_every_buffer_that_fewer_need(share, program):
    decoder, sizes = toy_decoder(), {"micro_batches": 4, "saved_on_device": 2}
    options = toy_options(offload=Offload(share, share, share), **{**HERE, **program, **sizes})
    options = with_disk(options, decoder, "cuda", budgets_of(decoder, None), 2**50)
    named = {b for plan in listed(decoder.layout, options, decoder.dtype) for b in plan.buffers()}
    for fewer in (1, 2, 3):
        plans = plans_of(decoder.layout, replace(options, micro_batches=fewer), decoder.dtype)
        assert {b for plan in plans for b in plan.buffers()} <= named


@pytest.mark.parametrize("over", [0, 12, 20])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_what_fewer_micro_batches_do_not_find_staged_has_a_place_on_disk(over, ring):
    decoder = toy_decoder()
    for saved, pool, hidden_ring in product((2, 5, 9), (0, 2), (2, 3, 4)):
        sizes = {"micro_batches": 5, "saved_on_device": pool, "hidden_ring": hidden_ring, "disk_ring": ring}
        given = toy_options(saved_on_disk=saved, saved_over=over, **{**HERE, **EAGER, **sizes})
        named = {b for plan in listed(decoder.layout, given, decoder.dtype) for b in plan.buffers()}
        for fewer in (1, 2, 3, 4):
            plans = plans_of(decoder.layout, replace(given, micro_batches=fewer), decoder.dtype)
            assert {b for plan in plans for b in plan.buffers()} <= named


# rings between disk and host


RATES = Rates(flops=1e9, link_nbytes=1e10, update_numel=1e9, host_nbytes=1e10, device_nbytes=1e12, disk_nbytes=1e9)


def costs_of(decoder, options, **rates):
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    return assumed(decoder.layout, shape, replace(RATES, **rates))


def depth(offload: Offload, *, host_nbytes: int = 2**50, disk_nbytes: float = 1e9, **changes) -> int:
    changes = {"disk_ring": "auto", "dtype": torch.bfloat16, **changes}
    decoder, options = settled(offload, host_nbytes=host_nbytes, **changes)
    costs = costs_of(decoder, options, disk_nbytes=disk_nbytes)
    return deepened(options, decoder, "cuda", costs, budgets_of(decoder, costs), host_nbytes).ring_places


def test_a_ring_is_as_deep_as_a_step_is_shorter_for_by_the_clock_and_no_deeper():
    decoder, options = settled(replace(NOTHING, moments=0.2), disk_ring="auto")
    costs = costs_of(decoder, options, disk_nbytes=1e7)
    tried = Tried(decoder.layout, options, costs)
    found = deepened(options, decoder, "cuda", costs, budgets_of(decoder, costs), 2**50).ring_places
    seconds = {d: step_s(tried, d, decoder.hidden_size, decoder.dtype)[0] for d in DEPTHS}
    enough = [d for d in DEPTHS if seconds[d] <= (1 + GAIN) * min(seconds.values())]
    assert found == enough[0]
    assert seconds[DEPTHS[0]] > (1 + GAIN) * min(seconds.values()), "deeper is faster here"


def test_a_disk_that_is_fast_enough_needs_no_deep_rings():
    shares = replace(NOTHING, moments=0.2)
    assert depth(shares, disk_nbytes=1e13) == DEPTHS[0] < depth(shares, disk_nbytes=1e7)


def test_a_depth_that_is_given_stays_and_without_a_disk_there_is_the_usual_one():
    assert depth(replace(NOTHING, moments=0.5), disk_ring=7) == 7
    assert depth(NOTHING) == RING_PLACES


def test_rings_are_no_deeper_than_the_host_has_room_for():
    shares, disk_nbytes = replace(NOTHING, moments=0.2), 1e7
    decoder, options = settled(shares, disk_ring="auto")
    deep = depth(shares, disk_nbytes=disk_nbytes)
    least = used(decoder, replace(options, disk_ring=RING_PLACES)).host_nbytes
    most = used(decoder, replace(options, disk_ring=deep)).host_nbytes
    assert deep > RING_PLACES and most > least
    assert depth(shares, disk_nbytes=disk_nbytes, host_nbytes=most) == deep
    assert RING_PLACES < depth(shares, disk_nbytes=disk_nbytes, host_nbytes=(most + least) // 2) < deep
    assert depth(shares, disk_nbytes=disk_nbytes, host_nbytes=least) <= RING_PLACES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_very_little_room_rings_get_smaller_and_it_is_said(dtype, caplog):
    auto, on_host = Offload(), {"disk_ring": "auto", "dtype": dtype}
    small = used(*settled(Offload(1.0, 1.0, 1.0), dtype=dtype, disk_ring=1)).host_nbytes
    usual = used(*settled(Offload(1.0, 1.0, 1.0), dtype=dtype, disk_ring=RING_PLACES)).host_nbytes
    limit = small + (usual - small) // 8
    decoder, options = settled(auto, host_nbytes=limit, **on_host)
    assert used(decoder, options).host_nbytes <= limit and options.ring_places < RING_PLACES
    assert f"each ring between disk and host has {options.ring_places} of the usual {RING_PLACES} tiles" in caplog.text


def test_a_content_whose_rings_take_more_than_it_does_stays_on_the_host():
    whole = used(*settled(Offload(), dtype=torch.bfloat16)).host_nbytes
    decoder, options = settled(Offload(), host_nbytes=whole - 1, dtype=torch.bfloat16, disk_ring=1000)
    assert options.disk == () and options.saved_on_disk == 0
    found = used(decoder, settled(Offload(), host_nbytes=whole - 1, dtype=torch.bfloat16, disk_ring="auto")[1])
    assert found.host_nbytes < whole


def test_a_cut_of_many_blocks_has_the_same_shares_on_disk():
    decoder, options = settled(Offload(0.75, 0.5, 0.5), disk_ring="auto")
    many = replace(decoder.layout, units=tuple(_repeated(decoder.layout.units, 80)))
    disk = tuple((content, unit) for content, num in (("exp_avg_sq", 80), ("weight", 20)) for unit in many.blocks[:num])
    options = replace(options, disk=(*disk, ("weight", 0)), saved_on_disk=41, resident=())
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    tried = cut(Tried(many, options, assumed(many, shape, RATES)))
    num = len(tried.layout.blocks)
    assert LEAST_BLOCKS <= num < 80 and len(tried.costs.blocks) == num
    of = {content: [u for c, u in tried.options.disk if c == content] for content in ("exp_avg_sq", "weight")}
    assert of["exp_avg_sq"] == list(tried.layout.blocks)
    assert of["weight"][0] == 0 and len(of["weight"]) - 1 == -(-num * 20 // 80)
    assert tried.options.saved_on_disk == -(-num * 41 // 80)
    step_s(tried, 4, decoder.hidden_size, decoder.dtype)  # it can be run on the clock


def _repeated(units, num):
    """With so many blocks like the first."""
    blocks = [unit for unit in units if unit.kind is UnitKind.BLOCK]
    for unit in units:
        if unit.kind is not UnitKind.BLOCK:
            yield unit
        elif unit is blocks[0]:
            for i in range(num):
                params = tuple(replace(p, name=f"{i}.{p.name}") for p in unit.params)
                yield replace(unit, name=f"block {i}", params=params)
