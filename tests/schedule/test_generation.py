"""Passes of text generation: what crosses the link, how often, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from schedule.plans import Case, passes, tiny_layout
from slideformer.schedule import LaneName, Op, OpKind, PassOptions, Place, build_pass, simulate

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedule.md"
LATER = PassOptions(window=1, micro_batches=2, hidden_pool=3, cached_on_device=1, first=False)


def test_a_pass_in_full_as_it_is_printed_in_the_documentation():
    plan = build_pass(tiny_layout(2, tile_numel=100), LATER)
    assert f"```\n{plan}\n```" in DOCUMENT.read_text()


@given(passes())
@settings(max_examples=80, deadline=None)
def test_a_streamed_block_crosses_once_a_pass_however_many_micro_batches(case: Case):
    uploaded = Counter((op.unit, op.tile) for op in case.plan.ops if op.kind is OpKind.UPLOAD)
    streamed = {u for u in case.layout.blocks if u not in case.options.resident}
    for unit in range(len(case.layout.units)):
        tiles = range(len(case.layout.tiles(unit)))
        around = unit not in case.layout.blocks
        sliced = case.options.sliced_head and unit == case.layout.output
        once = unit in streamed or sliced or (around and case.options.first and unit not in case.options.resident)
        once = once and (unit != 0 or case.layout.tied)
        assert [uploaded[unit, t] for t in tiles] == [int(once)] * len(tiles), case.layout.units[unit].name


@given(passes())
@settings(max_examples=80, deadline=None)
def test_keys_and_values_cross_only_where_they_have_no_room(case: Case):
    count = Counter(op.kind for op in case.plan.ops)
    pairs = len(case.layout.blocks) * case.options.micro_batches
    away = max(pairs - case.options.cached_on_device, 0)
    assert count[OpKind.FORWARD_CACHED] == pairs
    assert count[OpKind.SPILL_CACHE] == away
    assert count[OpKind.FETCH_CACHE] == (0 if case.options.first else away)


def test_the_link_is_busy_all_the_time_once_passes_join():
    """Blocks of 1 s a tile, everything else a tenth or less: choosing tokens hides behind the first uploads."""
    layout = tiny_layout(8, tile_numel=100)

    def seconds(op: Op) -> float:
        return 1.0 if op.kind is OpKind.UPLOAD else 0.1 if op.lane is LaneName.COMPUTE else 0.01

    options = replace(LATER, window=2, cached_on_device=16)
    timeline = simulate(build_pass(layout, options), seconds, runs=6)
    assert timeline.step_s() == pytest.approx(8.0, rel=0.01)  # 8 blocks, and nothing beside them


@pytest.mark.parametrize("change", [{"cached_on_device": -1}, {"cache_ring": 0}, {"window": 0}])
def test_counts_that_cannot_be_are_refused(change: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(LATER, **change)


def test_a_pass_keeps_the_places_that_the_next_one_needs():
    plan = build_pass(tiny_layout(2), LATER)
    found = {a.buffer.place for op in plan.ops for a in op.accesses if a.needs and a.needs[-1] == 0}
    assert {Place.CACHE, Place.CACHE_HOST, Place.SEQUENCES} <= found & plan.keeps
