"""What goes to disk when shares are given, and when the host has too little room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.toys import EAGER, plans_of, toy_decoder, toy_options
from slideformer.engine import Offload
from slideformer.engine.fit import budget_of, listed
from slideformer.engine.offload import HostRoom, offloaded
from slideformer.engine.settle import budgets_of, with_disk

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
    whole = used(decoder, replace(options, disk=(), saved_on_host=None)).host
    found = used(decoder, options).host
    moments, planes = ("first moments", "second moments"), ("weights", "residuals")
    largest = max(u.numel for u in decoder.layout.units)
    for terms, itemsize in ((moments, 4), (planes, 2)):
        kept, all_of = (sum(host.get(term, 0) for term in terms) for host in (found, whole))
        assert abs(kept - (1 - share) * all_of) <= itemsize * largest / 2 + 64 * len(decoder.layout.units)
    saved = whole["saved inputs"]
    assert found.get("saved inputs", 0) == pytest.approx((1 - share) * saved, abs=saved / 8)


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
    assert options.disk == () and options.saved_on_host is None, "there is room for all of it"
    everything = used(decoder, settled(Offload(1.0, 1.0, 1.0), dtype=dtype, tied=tied)[1]).host_nbytes
    for share in (0.9, 0.7, 0.5, 0.3, 0.1):
        limit = int(everything + share * (need - everything))
        _, options = settled(auto, host_nbytes=limit, dtype=dtype, tied=tied)
        assert used(decoder, options).host_nbytes <= limit
        if of_content(decoder, options, "weight"):
            assert len(of_content(decoder, options, "exp_avg")) == len(decoder.layout.units)
            assert options.saved_on_host is not None
        if options.saved_on_host is not None:
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
