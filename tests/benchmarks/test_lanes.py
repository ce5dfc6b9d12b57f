"""Seconds and bytes that are read off a step's lanes, against ones counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import benchmarks.toys  # noqa: F401  puts the scripts on the path
from cases.ours import _busy, _sizes
from lanes import Sizes, dram_gbps, parts_s
from shapes import random_tokens, shape
from slideformer.data.batches import MicroBatch
from slideformer.engine import EngineOptions
from slideformer.model.decoder import Decoder
from slideformer.schedule import Op, OpKind, Timeline, build_step
from slideformer.schedule.ops import LaneName
from slideformer.schedule.simulate import Span

DECODER = Decoder(shape("tiny"), dtype=torch.bfloat16, tile_numel=4096, device=torch.device("cpu"))
OPTIONS = EngineOptions(update="eager", max_grad_norm=0.0)
PLAN = build_step(DECODER.layout, OPTIONS.step_options(DECODER.layout, torch.bfloat16))
SIZES = Sizes(DECODER.layout, itemsize=2, num_rows=128, hidden_nbytes=1000)


def one(kind: OpKind, start_s: float, end_s: float) -> Span:
    """The first op of a kind in a plan of a model whose first block has 36,992 parameters in tiles of 4,096."""
    return Span(next(op for op in PLAN.ops if op.kind is kind), 0, start_s, end_s)


def test_updates_and_the_copies_beside_them_are_what_moves():
    update, upload, download = one(OpKind.UPDATE, 1.0, 2.0), one(OpKind.UPLOAD, 1.5, 2.5), one(OpKind.DOWNLOAD, 0, 0.5)
    updated = DECODER.layout.tiles(update.op.unit, trained=True)[update.op.tile].numel
    carried = DECODER.layout.tiles(upload.op.unit)[upload.op.tile].numel
    expected = (26 * updated + 2 * carried / 2) / 1e9
    assert dram_gbps([Timeline((update, upload, download))], SIZES) == pytest.approx(expected, abs=0.01)
    huge = Sizes(DECODER.layout, itemsize=2_000_000, num_rows=128, hidden_nbytes=1000)
    assert dram_gbps([Timeline((update, upload))], huge) == pytest.approx(2e6 * carried / 2 / 1e9, rel=1e-3)
    assert dram_gbps([Timeline((upload, download))], huge) is None


def test_updates_of_a_step_meet_the_copies_of_the_next_and_the_last_step_only_lends_its_copies():
    huge = Sizes(DECODER.layout, itemsize=2_000_000, num_rows=128, hidden_nbytes=1000)
    first = Timeline((one(OpKind.UPDATE, 1.0, 2.0),))
    second = Timeline((one(OpKind.UPLOAD, 1.0, 2.0), one(OpKind.UPDATE, 2.0, 102.0)))
    alone = dram_gbps([first], huge)
    assert dram_gbps([first, second], huge) > 10 * alone
    assert dram_gbps([second], huge) < 1.0  # all of its copies are over when it updates


def test_rows_of_a_table_count_as_far_as_they_are_touched():
    sizes = [SIZES.updated_numel(one(kind, 0, 1).op) for kind in (OpKind.UPDATE_REST, OpKind.UPDATE_ROWS)]
    whole = replace(one(OpKind.UPDATE_ROWS, 0, 1).op, kind=OpKind.UPDATE_TABLE)
    assert SIZES.updated_numel(whole) == 4096
    assert sizes == [4096 * 0.75, 4096 * 0.25]  # 128 of 512 rows
    assert SIZES.rows_nbytes == 128 * 64 * 2
    assert SIZES.gathered_nbytes(one(OpKind.GATHER, 0, 1).op) == 2 * 0.25 * 4096 * 2


def test_forward_and_backward_are_the_compute_lanes_and_the_update_is_that_of_all_parameters():
    spans = (
        one(OpKind.EMBED, 0, 1),
        one(OpKind.FORWARD, 1, 3),
        one(OpKind.HEAD, 3, 7),
        one(OpKind.BACKWARD, 7, 15),
        one(OpKind.UPDATE, 8, 9),
    )
    found = parts_s([Timeline(spans)], SIZES)
    all_numel = sum(unit.train_numel for unit in DECODER.layout.units)
    updated = DECODER.layout.tiles(spans[-1].op.unit, trained=True)[spans[-1].op.tile].numel
    assert (found["forward"], found["backward"]) == (7.0, 8.0)
    assert found["update"] == pytest.approx(all_numel / updated, rel=1e-4)
    assert parts_s([Timeline(spans[:4])], SIZES)["update"] is None


@pytest.mark.parametrize("clipped", [False, True])
def test_of_a_step_with_everything_ahead_the_update_is_told_by_bytes(clipped):
    options = replace(OPTIONS, update="deferred", max_grad_norm=1.0, ahead=tuple(range(len(DECODER.layout.units))))
    ops = build_step(DECODER.layout, options.step_options(DECODER.layout, torch.bfloat16)).ops
    seconds = {OpKind.SETTLE: 1.6, OpKind.COMPLETE: 2.4} if clipped else {OpKind.UPDATE_AHEAD: 2.6}
    spans, now = [], 0.0
    for op in ops:
        spans.append(Span(op, 0, now, now + seconds.get(op.kind, 0.0)))
        now = spans[-1].end_s
    tiles = [op for op in ops if op.kind is OpKind.SETTLE]
    numel = sum(DECODER.layout.tiles(op.unit, trained=True)[op.tile].numel for op in tiles)
    all_numel = sum(unit.train_numel for unit in DECODER.layout.units)
    found = parts_s([Timeline(tuple(spans))], SIZES)["update"]
    assert found == pytest.approx(2.6 * len(tiles) * all_numel / numel, rel=1e-4)


def test_a_vector_left_to_update_in_place_says_nothing_of_the_rate():
    """Of all parameters only the final norm's 64 are updated in place, in a second that is the thread's, not theirs."""
    options = replace(OPTIONS, update="deferred", max_grad_norm=1.0, ahead=tuple(range(len(DECODER.layout.units) - 2)))
    ops = build_step(DECODER.layout, options.step_options(DECODER.layout, torch.bfloat16)).ops
    last = len(DECODER.layout.units) - 1
    left = next(op for op in ops if op.kind is OpKind.UPDATE and op.unit == last)
    ahead = next(op for op in ops if op.kind is OpKind.UPDATE_AHEAD)
    numel = {op: DECODER.layout.tiles(op.unit, trained=True)[op.tile].numel for op in (left, ahead)}
    assert numel[left] < numel[ahead] / 10
    found = parts_s([Timeline((Span(ahead, 0, 0.0, 2.0), Span(left, 0, 2.0, 3.0)))], SIZES)["update"]
    all_numel = sum(unit.train_numel for unit in DECODER.layout.units)
    assert found == pytest.approx(2.0 * all_numel / numel[ahead], rel=1e-4)


def test_a_measured_step_says_both(line):
    streamed, resident = line("ours-streamed"), line("ours-resident")
    parts = streamed["parts_s"]
    assert 0 < parts["forward"] and 0 < parts["backward"] and 0 < parts["update"] and streamed["dram_gbps"] > 0
    assert parts["forward"] + parts["backward"] <= 1.05 * max(streamed["step_s"]["max"], 1e-9)
    assert resident["parts_s"]["update"] is None and resident["dram_gbps"] is None


@pytest.mark.parametrize("rows", [2, 4])
def test_rows_that_a_batch_touches_are_counted_once_and_hidden_states_are_the_engines(rows):
    class Engine:
        decoder, layout = DECODER, DECODER.layout
        options = EngineOptions(micro_batch_size=2, micro_batches=2, max_length=16)

    tokens = random_tokens(0, 4, 16, 512)
    sizes = _sizes(Engine(), [MicroBatch(part, part) for part in tokens.split(rows)])
    assert sizes.num_rows == len(set(tokens.flatten().tolist())) and sizes.hidden_nbytes == 2 * 16 * 64 * 2


def test_lanes_of_the_disk_that_work_for_two_steps_at_once_are_busy_once():
    read, write, compute = (
        Op(OpKind.READ_STATE, LaneName.DISK_READ, ()),
        Op(OpKind.WRITE_STATE, LaneName.DISK_WRITE, ()),
        Op(OpKind.FORWARD, LaneName.COMPUTE, ()),
    )

    def step(at: float) -> SimpleNamespace:
        """Of one second: reads from its beginning, and writes until long after its end."""
        spans = Span(read, 0, at, at + 0.6), Span(compute, 0, at, at + 0.5), Span(write, 0, at + 0.7, at + 1.5)
        timeline = Timeline(spans)
        return SimpleNamespace(timeline=lambda: timeline)

    steps = [step(at) for at in (0.0, 1.0, 2.0, 3.0)]
    assert _busy(steps, [1.5, 2.5, 3.5, 4.5]) == {"compute": 0.5, "disk": round((3.0 - 0.3) / 3, 3)}
    assert _busy(steps[:2], [1.5, 2.5]) == {"compute": 0.5, "disk": 0.9}


def test_a_lane_that_began_before_the_end_of_the_step_before_is_not_busy_for_more_than_all_the_time():
    op = Op(OpKind.FORWARD, LaneName.COMPUTE, ())
    timelines = [Timeline((Span(op, 0, at, at + 0.9),)) for at in (0.0, 0.9)]
    steps = [SimpleNamespace(timeline=lambda timeline=timeline: timeline) for timeline in timelines]
    assert _busy(steps, [1.0, 1.8]) == {"compute": 1.0}  # 0.9 s of work, and 0.8 s between the ends
