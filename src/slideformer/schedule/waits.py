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
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, dict[LaneName, int]] = {}
    clocks: list[list[int]] = []
    lane_clock = {lane: [-1] * len(LANES) for lane in LaneName}
    waits: list[tuple[Wait, ...]] = []
    for index in range(2 * num_ops):
        op = ops[index % num_ops]
        hazards: set[int] = set()
        for access in op.accesses:
            if access.buffer in writer:
                hazards.add(writer[access.buffer])
            if access.leaves is not None:
                hazards.update(readers.get(access.buffer, {}).values())
        known = list(lane_clock[op.lane])
        found = []
        for hazard in sorted(hazards, reverse=True):
            lane = ops[hazard % num_ops].lane
            if lane is op.lane or known[LANES[lane]] >= hazard:
                continue
            found.append(Wait(1 - hazard // num_ops, hazard % num_ops))
            known = [max(a, b) for a, b in zip(known, clocks[hazard], strict=True)]
        known[LANES[op.lane]] = index
        clocks.append(known)
        lane_clock[op.lane] = known
        for access in op.accesses:
            if access.leaves is not None:
                writer[access.buffer] = index
                readers[access.buffer] = {}
            else:
                readers.setdefault(access.buffer, {})[op.lane] = index
        if index >= num_ops:
            waits.append(tuple(found))
    return tuple(waits)
