"""Derives the waits between lanes from what the ops declare. Nobody writes a wait by hand.

Hazards: read after write, write after read, write after write. A hazard needs a wait unless the lane's own order or
another wait already implies it; each op carries a clock (per lane, how far that lane is known to be done), and
candidates are tried latest first, so that no wait is implied by another.
"""

from __future__ import annotations

from collections.abc import Sequence

from slideformer.schedule.ops import Buffer, LaneName, Op, Wait

LANES = {lane: i for i, lane in enumerate(LaneName)}


def derive(ops: Sequence[Op]) -> tuple[tuple[Wait, ...], ...]:
    """Waits of each op of a plan that follows a run of itself; those with age 1 refer to that run.

    Every hazard between two runs spans one boundary at most, since both touch the same buffers; so two copies of the
    program, one behind the other, show all of them.
    """
    num_ops = len(ops)
    lane_of = [LANES[op.lane] for op in ops] * 2
    numbers: dict[Buffer, int] = {}  # of buffers, which are looked up many times
    touched = [[(numbers.setdefault(a.buffer, len(numbers)), a.leaves is not None) for a in op.accesses] for op in ops]
    writer = [-1] * len(numbers)
    readers: list[dict[int, int]] = [{} for _ in numbers]  # by lane, since the last write
    clocks: list[list[int]] = []
    lane_clock = [[-1] * len(LANES) for _ in LANES]
    waits: list[tuple[Wait, ...]] = []
    for index in range(2 * num_ops):
        here = index % num_ops
        lane, accesses = lane_of[here], touched[here]
        known = lane_clock[lane]  # its own lane is done as far as that goes
        hazards = [writer[number] for number, _ in accesses]
        for number, writes in accesses:
            if writes:
                hazards += readers[number].values()
        found = []
        for hazard in sorted({h for h in hazards if h >= 0 and known[lane_of[h]] < h}, reverse=True):
            if known[lane_of[hazard]] < hazard:
                found.append(Wait(1 - hazard // num_ops, hazard % num_ops))
                known = list(map(max, known, clocks[hazard]))
        known = known.copy()
        known[lane] = index
        clocks.append(known)
        lane_clock[lane] = known
        for number, writes in accesses:
            if writes:
                writer[number], readers[number] = index, {}
            else:
                readers[number][lane] = index
        if index >= num_ops:
            waits.append(tuple(found))
    return tuple(waits)
