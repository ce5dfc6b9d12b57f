"""Proves a plan before it runs. Shares no code with the files that write the program and derive the waits.

Order: every pair of accesses to one buffer of which one writes is ordered by lane order and waits, within a run and
across the boundary to the run before. Contents: run one op after the other, every op finds in each buffer what it
needs, and the state ends as it should. Effects: every op declares what its kind does, in positions that exist.
With these three, any execution that respects lanes and waits equals the sequential one.
"""

from __future__ import annotations

from collections import Counter

from slideformer.layout import Layout
from slideformer.schedule.effect_pieces import Effect
from slideformer.schedule.effects import Effects
from slideformer.schedule.generation_effects import PassEffects
from slideformer.schedule.ops import (
    DISK_LANES,
    FILED,
    STAGING,
    STATE_PLACES,
    Buffer,
    Content,
    LaneName,
    OpKind,
    Place,
    Plan,
)
from slideformer.schedule.options import StepOptions, Update
from slideformer.schedule.pass_options import PassOptions


class PlanError(AssertionError):
    """The plan is wrong. Names the op and the buffer. Always a defect of the program, never of its user."""


def prove(plan: Plan, layout: Layout, options: StepOptions) -> None:
    """Raise PlanError unless effects, contents and order hold for a first run and for runs that join."""
    effects = PassEffects(layout, options) if isinstance(options, PassOptions) else Effects(layout, options)
    _prove_effects(plan, effects, options)
    _prove_positions(plan, layout, options)
    _prove_lanes(plan, options)
    _prove_contents(plan, effects)
    _prove_order(plan)


def _prove_effects(plan: Plan, effects: Effects, options: StepOptions) -> None:
    for op in plan.ops:
        declared = [(a.role, a.buffer.place, a.needs, a.leaves) for a in op.accesses]
        required = effects.of(op)
        if declared != required and Counter(declared) != Counter(required):
            missing, extra = Counter(required) - Counter(declared), Counter(declared) - Counter(required)
            found = [Effect(*one) for one in extra]
            raise PlanError(f"{op} must declare {list(missing)}, which it does not, and declares {found}")
        if len({a.buffer for a in op.accesses}) != len(op.accesses):
            raise PlanError(f"{op} declares one buffer twice")
    last = OpKind.RESULT if not plan.trains else OpKind.DECIDE if options.update is Update.DEFERRED else OpKind.TOTAL
    last = OpKind.TAKE if isinstance(options, PassOptions) else last
    if sum(op.kind is last for op in plan.ops) != 1:
        raise PlanError(f"the plan must have one op {last}, which tells the caller what came of it")


def _prove_positions(plan: Plan, layout: Layout, options: StepOptions) -> None:
    limits = {
        Place.DENSE: len(layout.units),
        Place.SLOT: options.window,
        Place.GRAD: options.grad_slots,
        Place.RING: options.ring,
        Place.HIDDEN: options.hidden_pool + options.hidden_ring,
        Place.CALL: options.micro_batches,
        Place.HEAD_STATE: options.micro_batches,
        Place.SLICE: 2,
        Place.SLICE_GRAD: 2,
        Place.TOKENS: options.micro_batches,
        Place.CACHE_RING: options.cache_ring if isinstance(options, PassOptions) else 0,
    }
    for buffer in plan.buffers():
        if buffer.place in limits and not 0 <= buffer.index[0] < limits[buffer.place]:
            raise PlanError(f"{buffer} does not exist: there are {limits[buffer.place]} of its kind")
        if buffer.place in STAGING and not 0 <= buffer.index[1] < options.disk_ring:
            raise PlanError(f"{buffer} does not exist: there are {options.disk_ring} of its kind")


def _prove_lanes(plan: Plan, options: StepOptions) -> None:
    """The disk's lanes move what is on disk, and nobody else does."""
    disk = frozenset(options.disk)
    num, positions = options.saved_on_disk, {b.index[0] for b in plan.buffers() if b.place is Place.SAVED}
    over = max(options.saved_over, num)
    apart = {-(-i * over // num) for i in range(min(num, over, max(positions, default=0) + 1))}  # the i-th of them
    for op in plan.ops:
        for buffer in (a.buffer for a in op.accesses if a.buffer.place in FILED):
            on_disk = (str(buffer.place), buffer.index[0]) in disk
            if buffer.place is Place.SAVED:
                on_disk = buffer.index[0] in apart
            if on_disk != (op.lane in DISK_LANES):
                is_there = f"is {'' if on_disk else 'not '}on disk"
                raise PlanError(f"{op} touches {buffer} in lane {op.lane}, and that {is_there}")


def _prove_contents(plan: Plan, effects: Effects) -> None:
    layout, options = effects.layout, effects.options
    holds: dict[Buffer, Content] = {}
    for buffer in plan.buffers():
        if buffer.place in STATE_PLACES | {Place.HOME, Place.OTHER_ROWS}:
            holds[buffer] = (str(buffer.place), *buffer.index, 0)
        elif isinstance(effects, PassEffects) and (found := effects.found(buffer)) is not None:
            holds[buffer] = found
    for op in plan.ops:
        for access in op.accesses:
            if access.needs is not None and holds.get(access.buffer) != access.needs:
                found = holds.get(access.buffer, "nothing")
                raise PlanError(f"{op} needs {access.needs} in {access.buffer}, but finds {found}")
        for access in op.accesses:
            if access.leaves is not None:
                holds[access.buffer] = access.leaves
    if isinstance(effects, PassEffects):
        _prove_kept(plan, effects, holds)
    for index, unit in enumerate(layout.units):
        trained_tiles = len(layout.tiles(index, trained=True)) if plan.trains else 0
        if index in options.resident:
            home = Buffer(Place.HOME, (index,))
            if holds.get(home, ("home", index, 0)) != ("home", index, int(trained_tiles > 0)):
                raise PlanError(f"{unit.name}: its state on the device ends as {holds.get(home)}")
            trained_tiles = 0  # on the host there is nothing of it
        for tile in range(len(layout.tiles(index))):
            for place in STATE_PLACES | ({Place.OTHER_ROWS} if index == 0 and effects.in_two else set()):
                buffer = Buffer(place, (index, tile))
                found = holds.get(buffer, (str(place), index, tile, 0))
                if found != (str(place), index, tile, 1 if tile < trained_tiles else 0):
                    raise PlanError(f"{unit.name} tile {tile}: {place} ends as {found}, which is not what it should be")


def _prove_kept(plan: Plan, effects: PassEffects, holds: dict[Buffer, Content]) -> None:
    """A pass leaves what the next one finds, and keeps the places of it."""
    for buffer, left in effects.left().items():
        if holds.get(buffer, effects.found(buffer)) != left:
            raise PlanError(f"{buffer} ends as {holds.get(buffer, 'nothing')}, and the next pass needs {left}")
        if buffer.place not in plan.keeps:
            raise PlanError(f"{buffer} is for the next pass, and the plan does not keep {buffer.place}")


def _prove_order(plan: Plan) -> None:
    """Two runs, one behind the other. done[i] says of every lane how far it certainly is once op i is done: lanes are
    FIFO, so an op that is done has all of its lane before it done.

    Two are enough: a buffer that one run touches and writes is touched and written by every run, so an access two
    runs back is ordered through the run between.
    """
    num_ops = len(plan.ops)
    if len(plan.waits) != num_ops:
        raise PlanError(f"{len(plan.waits)} lists of waits for {num_ops} ops")
    lanes = {lane: number for number, lane in enumerate(LaneName)}
    lane_of = [lanes[op.lane] for op in plan.ops] * 2
    numbers: dict[Buffer, int] = {}
    touched = [
        [(numbers.setdefault(a.buffer, len(numbers)), a.leaves is not None) for a in op.accesses] for op in plan.ops
    ]
    done: list[list[int]] = []
    lane_done = [[-1] * len(lanes) for _ in lanes]
    writer = [-1] * len(numbers)
    readers: list[dict[int, int]] = [{} for _ in numbers]  # by lane the last one since it was written
    for index in range(2 * num_ops):
        here = index % num_ops
        op, lane = plan.ops[here], lane_of[here]
        known = lane_done[lane]
        for wait in plan.waits[here]:
            source = index - here - wait.age * num_ops + wait.index
            if source >= index:
                raise PlanError(f"{op} waits for {plan.ops[source % num_ops]}, which comes after it")
            if source >= 0:
                known = list(map(max, known, done[source]))
        for access, (number, writes) in zip(op.accesses, touched[here], strict=True):
            before = [writer[number], *readers[number].values()] if writes else [writer[number]]
            for other in before:
                if other >= 0 and known[lane_of[other]] < other:
                    beside = plan.ops[other % num_ops]
                    raise PlanError(
                        f"{op} (lane {op.lane}) and {beside} (lane {beside.lane}) both touch {access.buffer}, and "
                        "nothing orders them"
                    )
        known = known.copy()
        known[lane] = index
        done.append(known)
        lane_done[lane] = known
        for number, writes in touched[here]:
            if writes:
                writer[number], readers[number] = index, {}
            else:
                readers[number][lane] = index
