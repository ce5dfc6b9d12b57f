"""The virtual clock, the picture and the trace, on plans small enough to work out by hand."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.plans import Case, cases, tiny_layout
from slideformer.schedule import (
    Access,
    Buffer,
    LaneName,
    Op,
    OpKind,
    Place,
    Plan,
    StepOptions,
    Wait,
    build_step,
    joined_step_s,
    simulate,
)
from slideformer.schedule.clock import _Events, _in_program_order
from slideformer.schedule.ops import DISK_LANES

SLOT = Buffer(Place.SLOT, (0,))


def by_hand() -> Plan:
    """upload -> forward, twice over in one slot: the upload of the next run waits for this forward."""
    upload = Op(OpKind.UPLOAD, LaneName.UPLOAD, (Access("target", SLOT, None, ("w",)),))
    forward = Op(OpKind.FORWARD, LaneName.COMPUTE, (Access("weights", SLOT, ("w",), None),))
    return Plan((upload, forward), ((Wait(1, 1),), (Wait(0, 0),)), trains=False)


def seconds(op: Op) -> float:
    return {OpKind.UPLOAD: 1.0, OpKind.FORWARD: 3.0}[op.kind]


def test_times_of_two_joined_runs():
    timeline = simulate(by_hand(), seconds, runs=2)
    assert [(s.start_s, s.end_s) for s in timeline.spans] == [(0, 1), (1, 4), (4, 5), (5, 8)]
    assert timeline.end_s == 8 and timeline.step_s() == 4
    assert timeline.busy()[LaneName.COMPUTE] == pytest.approx(6 / 8)
    assert timeline.busy()[LaneName.UPLOAD] == pytest.approx(2 / 8)
    assert timeline.busy()[LaneName.UPDATE] == 0


def test_two_lanes_of_the_disk_share_it():
    """A read of 2 s and a write of 3 s begin together: until the read is done, at 4 s, both go at half speed; then the
    write has 1 s left. The next read waits for it and has the disk to itself. Beside them compute is as ever."""
    read, write, again = (
        Op(kind, lane, (Access("tile", Buffer(Place.WEIGHT, (0, i)), ("w",), None),))
        for i, (kind, lane) in enumerate(
            [
                (OpKind.READ_STATE, LaneName.DISK_READ),
                (OpKind.WRITE_STATE, LaneName.DISK_WRITE),
                (OpKind.READ_WEIGHTS, LaneName.DISK_FEED),
            ]
        )
    )
    forward = Op(OpKind.FORWARD, LaneName.COMPUTE, ())
    plan = Plan((read, write, forward, again), ((), (), (), (Wait(0, 1),)), trains=False)
    took = {OpKind.READ_STATE: 2.0, OpKind.WRITE_STATE: 3.0, OpKind.FORWARD: 2.5, OpKind.READ_WEIGHTS: 1.0}
    spans = simulate(plan, lambda op: took[op.kind]).spans
    assert [(s.start_s, s.end_s) for s in spans] == [(0, 4), (0, 5), (0, 2.5), (5, 6)]
    joined = simulate(plan, lambda op: took[op.kind], runs=2).spans[4:]
    assert joined[0].start_s == 4 and joined[2].end_s == 5, "lanes go on with the next run"


@given(cases(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_event_by_event_is_what_program_order_gives_where_nothing_is_shared(case: Case, seed: int):
    costs = [(hash((op.unit, op.tile, op.micro, str(op.kind), seed)) % 7) / 8 for op in case.plan.ops]
    costs = [0.0 if op.lane in DISK_LANES else cost for op, cost in zip(case.plan.ops, costs, strict=True)]
    ends = [ends for _, ends in _Events(case.plan, costs, 3).times()]
    assert ends == [ends for _, ends in _in_program_order(case.plan, costs, 3)]


@given(cases())
@settings(max_examples=30, deadline=None)
def test_a_step_without_its_picture_takes_as_long(case: Case):
    def cost_s(op: Op) -> float:
        return (op.unit + 2 * op.tile + op.micro) % 5 / 8

    assert joined_step_s(case.plan, cost_s) == simulate(case.plan, cost_s, runs=3).step_s()


@given(cases(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_lanes_are_fifo_and_no_op_starts_before_what_it_waits_for(case: Case, seed: int):
    plan = case.plan
    timeline = simulate(plan, lambda op: (hash((op.unit, op.tile, op.micro, str(op.kind), seed)) % 7) / 10, runs=3)
    assert len(timeline.spans) == 3 * len(plan.ops)
    ends: dict[tuple[int, int], float] = {}
    lane_free: dict[LaneName, float] = defaultdict(float)
    for number, span in enumerate(timeline.spans):
        run, index = divmod(number, len(plan.ops))
        assert span.run == run and span.op is plan.ops[index]
        ready = [ends[run - w.age, w.index] for w in plan.waits[index] if run >= w.age]
        assert span.start_s == max([lane_free[span.op.lane], *ready]), "as early as lane and waits allow, no earlier"
        ends[run, index] = lane_free[span.op.lane] = span.end_s
    assert all(0 <= share <= 1.0000001 for share in timeline.busy().values())


@pytest.mark.parametrize("width", [30, 64, 160])
def test_the_picture_fits_its_width_and_shows_every_busy_lane(width: int):
    plan = build_step(tiny_layout(4), StepOptions(micro_batches=2))
    timeline = simulate(plan, lambda op: 1.0, runs=2)
    busy = [lane for lane in LaneName if timeline.busy()[lane] > 0]
    lines = timeline.text(width=width).splitlines()
    rows, (ruler, *legend) = lines[: len(busy)], lines[len(busy) :]
    assert [row.split()[0] for row in rows] == busy
    assert [row[-4:] for row in rows] == [f"{timeline.busy()[lane]:4.0%}" for lane in busy]
    pictures = [row[10:-5] for row in rows]
    assert {len(picture) for picture in pictures} == {width}
    assert all(len(line) <= 10 + width for line in (ruler, *legend))
    compute = pictures[busy.index(LaneName.COMPUTE)]
    assert compute.index("F") < compute.index("H") < compute.index("B")
    explained = dict(entry.split("=") for line in legend for entry in line.split())
    assert set(explained) == set("".join(pictures)) - {"."}


def test_an_op_of_a_tenth_of_a_slice_is_seen_and_an_idle_lane_is_not():
    times = {OpKind.UPLOAD: 0.1, OpKind.FORWARD: 1.0}
    picture = simulate(by_hand(), lambda op: times[op.kind]).text(width=11).splitlines()
    assert picture == [
        "  compute .FFFFFFFFFF  91%",
        "   upload u..........   9%",
        "          0 s   1.1 s",
        "          F=forward",
        "          u=upload",
    ]


def test_the_picture_of_one_run_is_a_period_with_what_runs_beside_it():
    """From this run's forward to the next run's; the upload in it is the next run's."""
    picture = simulate(by_hand(), seconds, runs=3).text(width=8, run=1).splitlines()
    assert picture[:2] == ["  compute FFFFFF..  75%", "   upload ......uu  25%"]


def test_the_trace_is_json_with_every_op_on_its_lane():
    plan = build_step(tiny_layout(2), StepOptions())
    timeline = simulate(plan, lambda op: 0.5, runs=2)
    trace = json.loads(timeline.chrome_trace())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], names[e["tid"]], e["args"]["run"]) for e in events] == [
        (str(s.op), s.op.lane, s.run) for s in timeline.spans
    ]
    assert all(e["dur"] == 5e5 for e in events)
