"""Every plan that can be built is proven, and nothing can be taken from one without the proof failing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.plans import (
    Case,
    all_accesses,
    all_waits,
    cases,
    examples,
    passes,
    tiny_layout,
    with_access,
    without_access,
    without_wait,
)
from slideformer.schedule import (
    Access,
    Buffer,
    LaneName,
    Op,
    OpKind,
    Plan,
    PlanError,
    StepOptions,
    Wait,
    build_step,
    check,
    prove,
)
from slideformer.schedule.disk import STRAIGHT
from slideformer.schedule.ops import DISK_LANES, FILED
from slideformer.schedule.waits import derive

EXAMPLES = examples()
ANY = st.one_of(cases(), passes())
EXAMPLE = pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES.keys())


def refuses(case: Case, plan: Plan, match: str | None = None) -> None:
    with pytest.raises(PlanError, match=match):
        prove(plan, case.layout, case.options)


def changed(access: Access) -> list[Access]:
    """The access with its needs or leaves taken away, added or changed."""
    other = ("something", "else")
    variants = [{"needs": None}, {"leaves": None}, {"needs": other}, {"leaves": other}]
    return [a for a in (access._replace(**v) for v in variants) if a != access]


def pick(data: st.DataObject, choices: Sequence):
    return choices[data.draw(st.integers(0, len(choices) - 1))]


def dependent(first: Op, second: Op) -> bool:
    written = {a.buffer for a in first.accesses if a.leaves is not None}
    touched = {a.buffer for a in first.accesses}
    return any(a.buffer in (touched if a.leaves is not None else written) for a in second.accesses)


def swapped(plan: Plan, i: int, j: int) -> Plan:
    ops = list(plan.ops)
    ops[i], ops[j] = ops[j], ops[i]
    return replace(plan, ops=tuple(ops), waits=derive(ops))


@given(ANY)
@settings(max_examples=150, deadline=None)
def test_every_plan_proves(case: Case):
    prove(case.plan, case.layout, case.options)


def test_the_examples_use_every_kind_of_op():
    assert {op.kind for case in EXAMPLES.values() for op in case.plan.ops} == set(OpKind)


@EXAMPLE
def test_deleting_any_wait_is_caught(case: Case):
    for index, wait in all_waits(case.plan):
        refuses(case, without_wait(case.plan, index, wait), "nothing orders them")


@EXAMPLE
def test_dropping_any_access_is_caught(case: Case):
    for index, access in all_accesses(case.plan):
        refuses(case, without_access(case.plan, index, access))


@EXAMPLE
def test_changing_what_an_access_needs_or_leaves_is_caught(case: Case):
    for index, access in all_accesses(case.plan):
        for other in changed(access):
            refuses(case, with_access(case.plan, index, access, other))


@EXAMPLE
def test_leaving_out_any_op_is_caught(case: Case):
    """Even where the waits are derived anew: somebody needs what it leaves, or the caller never hears of the step."""
    for index in range(len(case.plan.ops)):
        ops = case.plan.ops[:index] + case.plan.ops[index + 1 :]
        refuses(case, replace(case.plan, ops=ops, waits=derive(ops)))


@EXAMPLE
def test_swapping_neighbours_that_depend_on_each_other_is_caught(case: Case):
    for i in range(len(case.plan.ops) - 1):
        if dependent(case.plan.ops[i], case.plan.ops[i + 1]):
            refuses(case, swapped(case.plan, i, i + 1), "needs|ends as")


@given(ANY, st.data())
@settings(max_examples=100, deadline=None)
def test_any_mutation_of_any_plan_is_caught(case: Case, data: st.DataObject):
    plan = case.plan
    refuses(case, without_wait(plan, *pick(data, list(all_waits(plan)))))
    index, access = pick(data, list(all_accesses(plan)))
    refuses(case, without_access(plan, index, access))
    refuses(case, with_access(plan, index, access, pick(data, changed(access))))
    later = pick(data, range(1, len(plan.ops)))
    second = plan.ops[later]
    earlier = [i for i in range(later) if dependent(plan.ops[i], second) and plan.ops[i] != second]
    if earlier:
        refuses(case, swapped(plan, pick(data, earlier), later), "needs|ends as")


@given(ANY, st.data())
@settings(max_examples=100, deadline=None)
def test_moving_an_access_to_another_buffer_is_caught(case: Case, data: st.DataObject):
    """The waits are derived anew, so that only contents and positions can tell."""
    plan = case.plan
    index, access = pick(data, [(i, a) for i, a in all_accesses(plan) if a.buffer.index])
    *first, last = access.buffer.index
    moved = Buffer(access.buffer.place, (*first, last + pick(data, [-1, 1, 99])))
    other = with_access(plan, index, access, access._replace(buffer=moved))
    refuses(case, replace(other, waits=derive(other.ops)))


def test_a_position_that_does_not_exist_is_caught():
    layout, wide = tiny_layout(3), StepOptions(window=3, grad_slots=3, ring=4)
    plan = build_step(layout, wide)
    for name in ("window", "grad_slots", "ring"):
        narrow = replace(wide, **{name: 2})
        with pytest.raises(PlanError, match=r"\[2\] does not exist: there are 2 of its kind"):
            prove(plan, layout, narrow)


def test_a_plan_of_other_options_is_caught():
    layout, options = tiny_layout(2), StepOptions()
    plan = build_step(layout, options)
    for other in (replace(options, update="deferred"), replace(options, fp32_compute=True)):
        with pytest.raises(PlanError, match="must declare"):
            prove(plan, layout, other)


@pytest.mark.parametrize("name", ["tied, all on disk, straight", "untied, sliced, straight", "tied, all on disk"])
def test_a_file_that_another_lane_moves_or_a_disk_lane_that_moves_none_is_caught(name: str):
    case = EXAMPLES[name]
    plan = case.plan
    back = {straight: usual for usual, straight in STRAIGHT.items()}
    for index, op in enumerate(plan.ops):
        if lane := {**back, **STRAIGHT, LaneName.UPDATE: LaneName.DISK_WRITE}.get(op.lane):
            if op.lane in DISK_LANES or any(a.buffer.place in FILED for a in op.accesses):
                ops = (*plan.ops[:index], replace(op, lane=lane), *plan.ops[index + 1 :])
                refuses(case, replace(plan, ops=ops, waits=derive(ops)), r"in lane \w+, and that is (not )?on disk")


def test_with_gds_files_and_the_device_share_the_ops_that_move_between_them():
    """Per lane of the disk: what it does. Of all tiles and saved inputs that are on disk, and of no other."""
    case = EXAMPLES["tied, all on disk, straight"]
    does = {lane: {op.kind for op in case.plan.ops if op.lane is lane} for lane in DISK_LANES}
    assert does == {
        LaneName.DISK_FEED: {OpKind.UPLOAD, OpKind.READ_WEIGHTS},
        LaneName.DISK_SPILL: {OpKind.SPILL},
        LaneName.DISK_FETCH: {OpKind.FETCH},
        LaneName.DISK_READ: {OpKind.READ_STATE, OpKind.READ_ROWS},
        LaneName.DISK_WRITE: {OpKind.WRITE_STATE, OpKind.WRITE_ROWS},
    }
    staged_for = {op.unit for op in case.plan.ops if op.kind is OpKind.READ_WEIGHTS}
    assert staged_for == {0}, "rows of the table are gathered on the host"
    assert not any(op.kind is OpKind.UPLOAD and op.lane is LaneName.UPLOAD for op in case.plan.ops)
    fp32 = EXAMPLES["untied, deferred fp32, straight"].plan
    uploads = {op.lane for op in fp32.ops if op.kind is OpKind.UPLOAD}
    assert uploads == {LaneName.UPLOAD}, "two planes are joined on the way"


def test_an_op_that_waits_for_a_later_one_or_has_no_list_of_waits_is_caught():
    case = EXAMPLES["tied eager"]
    plan = case.plan
    later = ((Wait(0, len(plan.ops) - 1),), *plan.waits[1:])
    refuses(case, replace(plan, waits=later), "which comes after it")
    refuses(case, replace(plan, waits=plan.waits[1:]), "lists of waits")


def test_an_error_names_the_op_the_buffer_and_both_lanes():
    case = EXAMPLES["tied eager"]
    plan = case.plan
    index, wait = next((i, w) for i, w in all_waits(plan) if plan.ops[i].kind is OpKind.FORWARD)
    text = r"forward u\d m0 \(lane compute\) and upload u\d t2 \(lane upload\) both touch slot\[\d\]"
    refuses(case, without_wait(plan, index, wait), text)


def test_the_proof_shares_no_code_with_program_and_waits():
    """Read from the source, through everything that it imports."""
    folder = Path(check.__file__).parent
    seen, todo = set(), ["check"]
    while todo:
        name = todo.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                assert not any(a.name.startswith("slideformer") for a in node.names)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slideformer.schedule."):
                todo += [n for n in [node.module.rpartition(".")[2]] if n not in seen]
    assert seen == {"check", "effect_pieces", "effects", "generation_effects", "ops", "options", "pass_options"}
