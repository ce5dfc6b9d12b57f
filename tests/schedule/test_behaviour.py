"""What plans promise beyond being right: bytes over the link, positions, turns, overlap, the cost of a plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.costs import NUM_BLOCKS, costs, layout_3b, work_s
from schedule.plans import Case, cases, tiny_layout
from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.schedule import (
    LaneName,
    Op,
    OpKind,
    Place,
    Plan,
    StepOptions,
    Update,
    build_evaluation,
    build_step,
    prove,
    simulate,
)
from slideformer.schedule.ops import STATE_PLACES

COMPLETES = (OpKind.COMPLETE, OpKind.COMPLETE_ROWS)
RESIDENT_UPDATES = (OpKind.UPDATE_RESIDENT, OpKind.UPDATE_RESIDENT_TABLE)
WHOLE_TABLE = (OpKind.UPDATE_TABLE, OpKind.SETTLE_ROWS)
UPDATES = (OpKind.UPDATE, OpKind.UPDATE_REST, OpKind.UPDATE_ROWS, OpKind.SETTLE, *WHOLE_TABLE)


def uploads(plan: Plan, layout: Layout) -> Counter[tuple[int, int]]:
    """How often each tile of a block is uploaded."""
    return Counter((op.unit, op.tile) for op in plan.ops if op.kind is OpKind.UPLOAD and op.unit in layout.blocks)


def positions(plan: Plan, place: Place) -> list[int]:
    """The positions of one kind that ops write from scratch, in program order."""
    accesses = (a for op in plan.ops for a in op.accesses if a.buffer.place is place)
    return [a.buffer.index[0] for a in accesses if a.leaves is not None and a.needs is None]


def big_layout(*, num_blocks: int = 32, tied: bool = False) -> Layout:
    """The shape of Llama-3.1-8B: 8.03 G parameters, tiles of 16 Mi elements."""
    hidden, inner, kv, vocabulary = 4096, 14336, 1024, 128256
    shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(inner, hidden)] * 3 + [(hidden,)] * 2
    units = [Unit("table", UnitKind.TABLE, (Param("table", (vocabulary, hidden)),))]
    for b in range(num_blocks):
        params = tuple(Param(f"{b}.{i}", shape, decay=len(shape) > 1) for i, shape in enumerate(shapes))
        units.append(Unit(f"block.{b}", UnitKind.BLOCK, params))
    units.append(Unit("final", UnitKind.FINAL, (Param("final", (hidden,), decay=False),)))
    if not tied:
        units.append(Unit("output", UnitKind.OUTPUT, (Param("output", (vocabulary, hidden)),)))
    return Layout(tuple(units), 16 << 20, tied)


@given(cases(training=True))
@settings(max_examples=60, deadline=None)
def test_weights_cross_the_link_once_a_pass_however_many_micro_batches(case: Case):
    if not case.plan.trains:
        return
    counts = uploads(case.plan, case.layout)
    one = build_step(case.layout, replace(case.options, micro_batches=1))
    assert counts == uploads(one, case.layout)
    streamed = [b for b in case.layout.blocks if b not in case.options.resident]
    tiles = {(b, t.index) for b in streamed for t in case.layout.tiles(b)}
    assert set(counts) == tiles and set(counts.values()) <= {1, 2}
    last = streamed[-case.options.window :]
    assert all(counts[tile] == 1 for tile in tiles if tile[0] in last), "the last blocks are there from the walk up"
    others = [u for u in range(len(case.layout.units)) if u not in case.layout.blocks and (u or case.layout.tied)]
    others = [u for u in others if u not in case.options.resident]
    dense = Counter((op.unit, op.tile) for op in case.plan.ops if op.kind is OpKind.UPLOAD) - counts
    once = Counter((u, t.index) for u in others for t in case.layout.tiles(u))
    if case.options.sliced_head:  # there and back; the last two are still there when it turns
        once += Counter((case.layout.output, t.index) for t in case.layout.tiles(case.layout.output)[:-2])
    assert dense == once


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_all_but_the_last_window_blocks_are_uploaded_twice(window: int):
    layout = tiny_layout(5)
    counts = uploads(build_step(layout, StepOptions(window=window)), layout)
    assert [counts[block, 0] for block in layout.blocks] == [2] * (5 - window) + [1] * window
    assert set(uploads(build_evaluation(layout, StepOptions(window=window)), layout).values()) == {1}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_positions_on_the_device_are_never_exceeded(case: Case):
    limits = {
        Place.SLOT: case.options.window,
        Place.GRAD: case.options.grad_slots,
        Place.RING: case.options.ring,
        Place.HIDDEN: case.options.hidden_pool + case.options.hidden_ring,
        Place.CALL: case.options.micro_batches,
    }
    for buffer in case.plan.buffers():
        assert buffer.index == () or buffer.index[0] < limits.get(buffer.place, 1000)


@pytest.mark.parametrize("frozen", [frozenset(), frozenset({"w1", "n1", "w3", "n3"})], ids=["all", "every other"])
def test_gradient_slots_and_ring_are_used_in_turn(frozen: frozenset[str]):
    plan = build_step(tiny_layout(5, frozen=frozen), StepOptions(grad_slots=2, ring=3))
    slots, ring = positions(plan, Place.GRAD), positions(plan, Place.RING)
    assert slots == [i % 2 for i in range(5 - len(frozen) // 2)]
    assert ring == [i % 3 for i in range(len(ring))]


@given(cases(training=True))
@settings(max_examples=60, deadline=None)
def test_every_trained_tile_is_updated_exactly_once_and_no_frozen_one(case: Case):
    if not case.plan.trains:
        return
    updates = Counter(
        (op.unit, op.tile) for op in case.plan.ops if op.kind in UPDATES and op.kind is not OpKind.UPDATE_ROWS
    )
    units, resident = range(len(case.layout.units)), case.options.resident
    streamed = [u for u in units if u not in resident]
    assert updates == Counter((u, t.index) for u in streamed for t in case.layout.tiles(u, trained=True))
    rows = [op.tile for op in case.plan.ops if op.kind in (OpKind.UPDATE_ROWS, *WHOLE_TABLE)]
    assert rows == [t.index for t in case.layout.tiles(0, trained=True) if 0 not in resident]
    whole = Counter(op.unit for op in case.plan.ops if op.kind in RESIDENT_UPDATES)
    assert whole == Counter(u for u in resident if case.layout.units[u].train_numel)
    moved = {op.unit for op in case.plan.ops if op.lane is LaneName.DOWNLOAD and op.unit >= 0}
    assert moved == {u for u in units if case.layout.units[u].train_numel}


@given(cases(training=True))
@settings(max_examples=60, deadline=None)
def test_what_no_upload_waits_for_is_completed_last_in_the_order_in_which_gradients_land(case: Case):
    lane = [op for op in case.plan.ops if op.lane is LaneName.UPDATE]
    ahead = [(op.unit, op.tile) for op in lane if op.kind in (OpKind.UPDATE_AHEAD, OpKind.REST_AHEAD)]
    assert [(op.unit, op.tile) for op in lane if op.kind in COMPLETES] == ahead
    assert all(op.kind in COMPLETES for op in lane[len(lane) - len(ahead) :])
    read = {Place.WEIGHT, Place.RESIDUAL} if case.options.fp32_compute else {Place.WEIGHT}
    for op in lane:
        if op.kind in COMPLETES:
            assert not {a.buffer.place for a in op.accesses} & read
    waits = {(op.kind, w.index) for op, ws in zip(case.plan.ops, case.plan.waits, strict=True) for w in ws}
    assert not [kind for kind, index in waits if kind is OpKind.UPLOAD and case.plan.ops[index].kind in COMPLETES]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_of_a_resident_unit_only_norms_leave_the_device(case: Case):
    for op in case.plan.ops:
        if op.unit in case.options.resident and op.kind is not OpKind.REPORT:
            assert op.lane in (LaneName.COMPUTE, LaneName.SPILL, LaneName.FETCH)
            owned = {a.buffer.place for a in op.accesses if a.buffer.index[:1] == (op.unit,)}
            assert not owned & {Place.DENSE, *STATE_PLACES}


@given(cases(training=True))
@settings(max_examples=60, deadline=None)
def test_a_block_that_keeps_its_graph_is_not_run_again_and_its_input_is_not_saved(case: Case):
    kinds = Counter((op.unit, op.kind) for op in case.plan.ops)
    downward = {op.unit for op in case.plan.ops if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_KEPT)}
    for block, unit in enumerate(case.layout.blocks):
        kept = case.plan.trains and unit in case.options.keep and unit in downward
        count = case.options.micro_batches
        assert kinds[unit, OpKind.FORWARD_KEEP] == kinds[unit, OpKind.BACKWARD_KEPT] == kept * count
        if kept:
            inputs = {("x", block, m) for m in range(count)}
            readers = [op for op in case.plan.ops for a in op.accesses if a.needs in inputs and a.role == "input"]
            assert [op.kind for op in readers] == [OpKind.FORWARD_KEEP] * count


@given(cases(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_plans_of_the_most_micro_batches_and_of_one_name_every_buffer_of_those_between(case: Case, fewer: int):
    """The last step of an epoch may have fewer; what two plans name is allocated once, for all."""
    build = build_step if case.plan.trains else build_evaluation
    one, some = (build(case.layout, replace(case.options, micro_batches=m)) for m in (1, fewer))
    if fewer <= case.options.micro_batches:
        assert some.buffers().keys() <= case.plan.buffers().keys() | one.buffers().keys()


@given(cases(training=False))
@settings(max_examples=60, deadline=None)
def test_an_evaluation_writes_no_state(case: Case):
    touched = [a for op in case.plan.ops for a in op.accesses if a.leaves is not None]
    assert not {a.buffer.place for a in touched} & STATE_PLACES


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("update", list(Update))
def test_weights_of_the_next_step_go_up_before_the_last_update_of_this_one_ends(update: Update, tied: bool):
    plan = build_step(big_layout(tied=tied), StepOptions(update=update, hidden_pool=40))
    timeline = simulate(plan, lambda op: 1e-3, runs=2)
    last_update = max(s.end_s for s in timeline.spans if s.run == 0 and s.op.kind in UPDATES)
    first_upload = min(s.start_s for s in timeline.spans if s.run == 1 and s.op.kind is OpKind.UPLOAD)
    assert first_upload < last_update


def test_no_update_waits_for_the_end_of_backward_when_eager():
    plan = build_step(big_layout(), StepOptions(hidden_pool=40))
    spans = simulate(plan, lambda op: 1e-3).spans
    first_update = min(s.start_s for s in spans if s.op.kind is OpKind.UPDATE)
    backwards = [s.start_s for s in spans if s.op.kind is OpKind.BACKWARD]
    assert sum(start > first_update for start in backwards) > 0.8 * len(backwards)


COUNTS = {"window": [2, 3, 4], "grad_slots": [2, 3], "ring": [4, 8, 16]}
SIZES = pytest.mark.parametrize(
    "sizes", [dict(zip(COUNTS, v, strict=True)) for v in product(*COUNTS.values())], ids=str
)


def step_s(options: StepOptions, *, batch: float = 1.0) -> tuple[float, Plan, Callable[[Op], float]]:
    """Simulated step time of joined runs of the 3.2 G model, with the plan and the costs."""
    layout = layout_3b()
    plan, seconds = build_step(layout, options), costs(layout, options, batch=batch)
    return simulate(plan, seconds, runs=4).step_s(), plan, seconds


@SIZES
def test_an_eager_step_takes_its_compute_and_the_updates_that_nothing_can_hide(sizes: dict[str, int]):
    """Those of the first block and of the touched rows, whose gradients come last and whose weights go first."""
    found, plan, seconds = step_s(StepOptions(hidden_pool=NUM_BLOCKS + 1, **sizes))
    exposed = [op for op in plan.ops if op.kind is OpKind.UPDATE_ROWS or (op.kind is OpKind.UPDATE and op.unit == 1)]
    assert found <= work_s(plan, seconds, LaneName.COMPUTE) + sum(map(seconds, exposed)) + 3e-3


@SIZES
def test_a_deferred_step_takes_backward_and_the_longer_of_update_and_forward(sizes: dict[str, int]):
    found, plan, seconds = step_s(StepOptions(hidden_pool=NUM_BLOCKS + 1, update=Update.DEFERRED, **sizes))
    up = sum(seconds(op) for op in plan.ops if op.kind in (OpKind.EMBED, OpKind.FORWARD))
    down = work_s(plan, seconds, LaneName.COMPUTE) - up
    assert found <= 1.01 * (down + max(up, work_s(plan, seconds, LaneName.UPDATE)))


@pytest.mark.parametrize("batch", [4.0, 1.0, 0.125])
def test_a_deferred_step_with_enough_units_ahead_takes_no_longer_than_an_eager_one(batch: float):
    eager, *_ = step_s(StepOptions(hidden_pool=NUM_BLOCKS + 1), batch=batch)
    ahead = StepOptions(hidden_pool=NUM_BLOCKS + 1, update=Update.DEFERRED, ahead=tuple(range(20)))
    assert step_s(ahead, batch=batch)[0] <= 1.005 * eager


@pytest.mark.parametrize("update", list(Update))
def test_a_small_batch_is_bound_by_the_updates_and_one_pass_of_uploads(update: Update):
    """No update can run between the last one of a step and the first gradient of the next: a forward, bound by the
    link, and the head."""
    found, plan, seconds = step_s(StepOptions(hidden_pool=NUM_BLOCKS + 1, update=update), batch=1 / 8)
    head = next(i for i, op in enumerate(plan.ops) if op.kind is OpKind.HEAD)
    up = sum(seconds(op) for op in plan.ops[:head] if op.lane is LaneName.UPLOAD)
    assert found <= work_s(plan, seconds, LaneName.UPDATE) + up + seconds(plan.ops[head]) + 10e-3


def test_hidden_states_in_a_ring_of_four_cost_no_time():
    """Two micro-batches and no pool: every input crosses the link twice, beside the compute (once 1.53 s for 1.43)."""
    kept, *_ = step_s(StepOptions(micro_batches=2, hidden_pool=2 * NUM_BLOCKS + 2))
    moved, *_ = step_s(StepOptions(micro_batches=2, hidden_pool=0))
    assert moved <= 1.005 * kept


def test_two_micro_batches_through_a_ring_of_four_spill_each_input_once():
    """The hidden gradients of both stay: only saved inputs move (once 84 spills for 56 inputs)."""
    plan = build_step(tiny_layout(28), StepOptions(micro_batches=2, hidden_ring=4))
    moved = Counter(
        a.needs for op in plan.ops if op.kind in (OpKind.SPILL, OpKind.FETCH) for a in op.accesses if a.needs
    )
    assert {value[0] for value in moved} == {"x"}
    assert max(moved.values()) <= 2, "out once and back once"


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_value_is_spilled_at_most_once_and_host_positions_are_as_few_as_live_at_once(case: Case):
    spilled: dict[tuple[str | int, ...], int] = {}
    last_use: dict[tuple[str | int, ...], int] = {}
    for index, op in enumerate(case.plan.ops):
        last_use |= {a.needs: index for a in op.accesses if a.needs}
        if op.kind is OpKind.SPILL:
            value = next(a.needs for a in op.accesses if a.needs)
            assert value not in spilled
            spilled[value] = index
    most = max((sum(i <= j < last_use[v] for v, i in spilled.items()) for j in spilled.values()), default=0)
    used = len({b for b in case.plan.buffers() if b.place is Place.SAVED})
    assert used == most if not case.options.saved_on_disk else used <= most, "some come and go staged"


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_pool_for_all_saved_inputs_and_gradients_leaves_nothing_to_spill(micro_batches: int):
    options = StepOptions(micro_batches=micro_batches, hidden_pool=7 * micro_batches, hidden_ring=2)
    kinds = {op.kind for op in build_step(tiny_layout(6), options).ops}
    assert not kinds & {OpKind.SPILL, OpKind.FETCH}


@pytest.mark.parametrize("update", list(Update))
def test_an_8b_plan_builds_and_proves_in_well_under_a_second(update: Update):
    """Measured on one busy core of a 2-core container (2026-12): 2,100 ops, 0.05 s to build, 0.05 s to prove."""
    layout, options = big_layout(), StepOptions(update=update, hidden_pool=40)
    start = time.process_time()
    plan = build_step(layout, options)
    built = time.process_time()
    prove(plan, layout, options)
    proven = time.process_time()
    assert 1500 < len(plan.ops) < 2500
    assert built - start < 1.0 and proven - built < 1.0


def test_waits_stay_few():
    """A wait is an event on the device: less than one an op, and none that another one implies."""
    plan = build_step(big_layout(), StepOptions(hidden_pool=40))
    assert sum(map(len, plan.waits)) < len(plan.ops)
    assert max(map(len, plan.waits)) < len(LaneName)


def test_options_out_of_range_and_nothing_to_train_are_refused():
    layout = tiny_layout(1)
    for name, value in (("window", 0), ("grad_slots", 0), ("ring", 0), ("micro_batches", -1), ("hidden_pool", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}, must be at least"):
            StepOptions(**{name: value})
    with pytest.raises(ValueError, match="hidden_ring is 1, must be at least 2"):
        build_step(layout, StepOptions(hidden_ring=1))
    with pytest.raises(ValueError, match="'late' is not a valid Update"):
        StepOptions(update="late")
    assert StepOptions(update="deferred").update is Update.DEFERRED
    with pytest.raises(ValueError, match="no parameter is trainable"):
        build_step(tiny_layout(1, frozen=frozenset({"table", "w0", "n0", "final"})), StepOptions())
