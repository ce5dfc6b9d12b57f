"""Literal programs of models with one and two blocks: what a reader should see when nothing else is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedule.costs import NUM_BLOCKS, costs, layout_3b
from schedule.plans import tiny_layout
from slideformer.schedule import (
    LaneName,
    OpKind,
    Place,
    Plan,
    StepOptions,
    Update,
    build_evaluation,
    build_step,
    simulate,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedule.md"

HIDDEN = frozenset({OpKind.REPORT, OpKind.REPORT_LOSS})


def program(plan: Plan) -> list[str]:
    """Op by op, without the reports; an upload with its slot, a gradient with its landing place."""
    lines = []
    for op in plan.ops:
        if op.kind not in HIDDEN:
            slots = [str(a.buffer) for a in op.accesses if a.buffer.place in (Place.SLOT, Place.RING, Place.GRAD)]
            lines.append(" ".join([str(op), *slots]))
    return lines


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_one_block_in_full_as_it_is_printed_in_the_documentation():
    options = StepOptions(window=1, grad_slots=1, ring=2, hidden_pool=2, hidden_ring=2)
    plan = build_step(tiny_layout(1, tile_numel=100), options)
    assert f"```\n{plan}\n```" in DOCUMENT.read_text()


@pytest.mark.parametrize("update", list(Update))
def test_the_timelines_in_the_documentation_are_those_of_real_plans(update: Update):
    layout, options = layout_3b(), StepOptions(hidden_pool=NUM_BLOCKS + 1, update=update)
    timeline = simulate(build_step(layout, options), costs(layout, options), runs=4)
    assert f"```\n{timeline.text(width=96, run=2)}\n```" in DOCUMENT.read_text()


def test_every_lane_and_place_is_in_the_documentation():
    text = DOCUMENT.read_text()
    assert [name for name in (*LaneName, *Place) if f"`{name}`" not in text] == []


def test_two_blocks_in_one_slot_are_uploaded_once_more_on_the_way_down():
    plan = build_step(tiny_layout(2, tied=False, final=False, tile_numel=100), StepOptions(window=1, ring=2))
    assert program(plan) == lines(
        """
        upload u1 t0 slot[0]
        load
        gather u0 t0
        upload_rows u0
        embed u0 m0
        forward u1 m0 slot[0]
        upload u2 t0 slot[0]
        forward u2 m0 slot[0]
        upload u3 t0
        head u3 m0
        guard
        reduce_output u3
        backward u2 m0 slot[0] grad[0]
        reduce u2 grad[0]
        download u2 t0 grad[0] ring[0]
        update u2 t0 ring[0]
        update_rest u0 t0
        upload u1 t0 slot[0]
        backward u1 m0 slot[0] grad[1]
        reduce u1 grad[1]
        download u1 t0 grad[1] ring[1]
        update u1 t0 ring[1]
        download u3 t0 ring[0]
        update u3 t0 ring[0]
        embed_backward u0 m0
        reduce_rows u0
        download_rows u0
        update_rows u0 t0
        total
        """
    )


def test_two_blocks_in_two_slots_deferred_with_two_micro_batches():
    """Layer-major, gradients wait, and updates go up in the order in which the next forward needs the units."""
    options = StepOptions(window=2, micro_batches=2, hidden_pool=8, update=Update.DEFERRED)
    plan = build_step(tiny_layout(2, final=False, glue=True, tile_numel=12), options)
    assert program(plan) == lines(
        """
        load
        gather u0 t0
        gather u0 t1
        upload_rows u0
        upload u1 t0
        upload u2 t0 slot[0]
        upload u2 t1 slot[0]
        upload u3 t0 slot[1]
        upload u3 t1 slot[1]
        embed u0 m0
        forward u2 m0 slot[0]
        embed u0 m1
        forward u2 m1 slot[0]
        upload u0 t0
        forward u3 m0 slot[1]
        forward u3 m1 slot[1]
        upload u0 t1
        head u0 m0
        head u0 m1
        reduce_output u0
        backward u3 m0 slot[1]
        backward u3 m1 slot[1]
        reduce u3 grad[0]
        download u3 t0 grad[0]
        download u3 t1 grad[0]
        download u0 t0
        backward u2 m0 slot[0]
        backward u2 m1 slot[0]
        reduce u2 grad[1]
        download u2 t0 grad[1]
        download u2 t1 grad[1]
        download u0 t1
        embed_backward u0 m0
        embed_backward u0 m1
        reduce_rows u0
        download_rows u0
        reduce u1
        download u1 t0
        decide
        update_table u0 t0
        update_table u0 t1
        update u1 t0
        update u2 t0
        update u2 t1
        update u3 t0
        update u3 t1
        """
    )


def test_hidden_states_that_do_not_fit_pass_through_the_host():
    """Three blocks, a ring of two, no pool: every input leaves, and comes back in reverse."""
    options = StepOptions(window=3, hidden_pool=0, hidden_ring=2, fp32_compute=True)
    plan = build_step(tiny_layout(3, tied=False, tile_numel=100), options)
    moves = {OpKind.SPILL: "spill", OpKind.FETCH: "fetch", OpKind.FORWARD: "forward", OpKind.BACKWARD: "backward"}
    found = []
    for op in plan.ops:
        if op.kind in moves:
            value = next(a.needs for a in op.accesses if a.role in ("source", "input"))
            found.append(f"{moves[op.kind]} {value[0]}{value[1]}")
    assert found == lines(
        """
        forward x0
        spill x0
        forward x1
        spill x1
        forward x2
        spill x2
        fetch x2
        backward x2
        fetch x1
        backward x1
        fetch x0
        backward x0
        """
    )


def test_an_evaluation_is_the_walk_up_and_a_loss():
    plan = build_evaluation(tiny_layout(2, tile_numel=100), StepOptions(window=1))
    assert program(plan) == lines(
        """
        load
        gather u0 t0
        upload_rows u0
        upload u1 t0 slot[0]
        embed u0 m0
        forward u1 m0 slot[0]
        upload u2 t0 slot[0]
        forward u2 m0 slot[0]
        upload u0 t0
        upload u3 t0
        head_loss u0 m0
        result
        """
    )


def test_with_everything_below_frozen_backward_stops_early():
    frozen = frozenset({"table", "w0", "n0", "w1", "n1"})
    plan = build_step(tiny_layout(3, tied=False, frozen=frozen), StepOptions())
    assert [str(op) for op in plan.ops if op.kind is OpKind.BACKWARD] == ["backward u3 m0"]
    assert {op.unit for op in plan.ops if op.lane is LaneName.UPDATE and op.unit >= 0} == {3, 4, 5}
    only_final = build_step(tiny_layout(1, frozen=frozenset({"table", "w0", "n0"})), StepOptions())
    kinds = [op.kind for op in only_final.ops]
    assert OpKind.BACKWARD not in kinds and kinds.count(OpKind.UPDATE) == 1
