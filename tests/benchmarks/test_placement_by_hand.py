"""The automatic placement of published shapes on an H200 against placements by hand and random ones, by the clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shapes import shape
from slideformer.engine import EngineOptions
from slideformer.engine.costs import ASSUMED, assumed
from slideformer.engine.placement import Room, place
from slideformer.model.decoder import Decoder
from sweep import by_hand

AUTO_OVER = 1.03


def room_of(name: str, batch: int, limit_gib: float, update: str) -> Room:
    decoder = Decoder(shape(name), dtype=torch.bfloat16, tile_numel=16 << 20, device=torch.device("cpu"))
    options = EngineOptions(
        micro_batch_size=batch,
        max_length=1024,
        ring=8,
        update=update,
        max_grad_norm=float(update == "deferred"),
        resident="auto",
        keep="auto",
        ahead=(),
    )
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, decoder.dtype), ASSUMED["cuda"])
    sizes = (decoder.hidden_size, decoder.dtype, int(limit_gib * 2**30))
    return Room(decoder.layout, options, replace(costs, measured=True), *sizes)


def neighbours(room: Room, found: EngineOptions, tries: int) -> Iterator[EngineOptions]:
    """With a unit more, fewer or another on the device, other late blocks, another number of saved inputs."""
    chance, layout = random.Random(0), room.layout
    for _ in range(tries):
        resident, late, saved = set(found.resident), set(found.late), found.saved_on_device
        for _ in range(chance.choice((1, 1, 2))):
            match chance.randrange(4):
                case 0:
                    resident ^= {chance.randrange(len(layout.units))}
                case 1 if resident:
                    resident ^= {chance.choice(sorted(resident)), chance.randrange(len(layout.units))}
                case 2 if found.update == "eager":
                    late ^= {chance.choice(layout.blocks)}
                case _:
                    saved = max(saved + chance.choice((-4, -1, 1, 4)), 0)
        units = {"resident": tuple(sorted(resident)), "late": tuple(sorted(late - resident))}
        yield replace(found, **units, keep=tuple(u for u in found.keep if u in resident), saved_on_device=saved)


@pytest.mark.parametrize(
    ("name", "batch", "limit_gib", "update"),
    [("llama-3.2-1b", 4, 8, "eager"), ("llama-3.2-1b", 4, 12, "deferred"), ("llama-3.2-3b", 4, 24, "eager")],
)
def test_nothing_by_hand_and_no_neighbour_is_faster_by_three_hundredths(name, batch, limit_gib, update):
    room = room_of(name, batch, limit_gib, update)
    found = place(room)
    least = room.step_s(found) / AUTO_OVER
    assert room.used(found) <= room.limit
    hands = [replace(hand, sliced_head=found.sliced_head) for hand in by_hand(room.layout, room.options).values()]
    others = [trial for trial in (*hands, *neighbours(room, found, 12)) if room.used(trial) <= room.limit]
    assert len(others) > 6 and all(room.step_s(other) >= least for other in others)


def test_residents_that_lie_apart_are_worth_a_tenth_of_a_step():
    """Where the update binds, and the device has room for some blocks: beside the lowest ones of as many."""
    room = room_of("llama-3.2-3b", 4, 24, "eager")
    found = place(room)
    blocks = [u for u in found.resident if u in room.layout.blocks]
    lowest = room.layout.blocks[: len(blocks)]
    rest = tuple(u for u in found.resident if u not in blocks)
    together = replace(found, resident=tuple(sorted((*rest, *lowest))), late=())
    assert 4 < len(blocks) < 28 and room.step_s(together) > 1.1 * room.step_s(found)


def test_updates_ahead_of_clipping_are_seen_by_who_places():
    """With memory for second copies on the host a deferred step is another one, and has another best placement."""
    room = room_of("llama-3.2-3b", 4, 24, "deferred")
    room = replace(room, options=replace(room.options, ahead="auto"))
    spare = replace(room, host_nbytes=2**37)
    blind, seen = place(room), place(spare)
    assert spare.step_s(blind) < 0.95 * room.step_s(blind)
    assert spare.step_s(seen) <= spare.step_s(blind) and seen.ahead == "auto"


@pytest.mark.parametrize(("limit_gib", "slices"), [(5, True), (24, False)])
def test_the_projection_passes_in_slices_where_what_it_leaves_is_worth_more(limit_gib, slices):
    room = room_of("llama-3.2-1b", 4, limit_gib, "eager")
    found = place(room)
    whole = place(replace(room, options=replace(room.options, sliced_head=False)))
    assert room.used(whole) <= room.limit and found.sliced_head is slices
    assert (room.step_s(whole) > 1.02 * room.step_s(found)) is slices
