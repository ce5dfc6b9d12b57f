"""The virtual clock: when each op of joined runs starts and ends, if it takes so long by itself.

Lanes are FIFO and all of them work at once. Those between disk and host share one disk, so that an op there takes
longer while others are at work; such plans are gone through event by event, all others in program order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from slideformer.schedule.ops import DISK_LANES, LaneName, Plan

Times = tuple[list[float], list[float]]
"""Starts and ends of one run, by op."""


def clocked(plan: Plan, costs: Sequence[float], runs: int) -> list[Times]:
    """costs: seconds of each op that has what it needs, and the disk, to itself."""
    if any(op.lane in DISK_LANES for op in plan.ops):
        return _Events(plan, costs, runs).times()
    return _in_program_order(plan, costs, runs)


def _in_program_order(plan: Plan, costs: Sequence[float], runs: int) -> list[Times]:
    lanes = {lane: number for number, lane in enumerate(LaneName)}
    lane_of = [lanes[op.lane] for op in plan.ops]
    free = [0.0] * len(lanes)
    found: list[Times] = []
    for run in range(runs):
        starts: list[float] = []
        ends: list[float] = []
        before = found[-1][1] if run else []
        for lane, waits, seconds in zip(lane_of, plan.waits, costs, strict=True):
            start = free[lane]
            for age, index in waits:
                if age == 0:
                    start = max(start, ends[index])
                elif before:
                    start = max(start, before[index])
            free[lane] = start + seconds
            starts.append(start)
            ends.append(free[lane])
        found.append((starts, ends))
    return found


class _Events:
    """One pass over all runs. Ops are numbered through: those of a run follow those of the run before.

    served: seconds that the disk has had for each op that has been at work there all the time; an op that begins when
    it is s and takes c by itself is done when it is s + c.
    """

    def __init__(self, plan: Plan, costs: Sequence[float], runs: int) -> None:
        self.num_ops, self.runs, self.costs = len(plan.ops), runs, costs
        lanes = {lane: number for number, lane in enumerate(LaneName)}
        self.lane_of = [lanes[op.lane] for op in plan.ops]
        self.on_disk = [lane in DISK_LANES for lane in lanes]
        self.queues: list[list[int]] = [[] for _ in lanes]
        for index, lane in enumerate(self.lane_of):
            self.queues[lane].append(index)
        self.after: list[list[tuple[int, int]]] = [[] for _ in plan.ops]  # who waits for an op, as (age, op)
        self.missing = [0] * (runs * self.num_ops)  # what an op still waits for
        for index, waits in enumerate(plan.waits):
            for age, source in waits:
                self.after[source].append((age, index))
                for run in range(age, runs):
                    self.missing[run * self.num_ops + index] += 1
        self.taken = [0] * len(lanes)  # ops that a lane has begun
        self.busy = [False] * len(lanes)
        self.now = self.served = 0.0
        self.working: list[tuple[float, int]] = []  # (when it ends, op)
        self.on_the_disk: list[tuple[float, int]] = []  # (served when it ends, op)
        self.starts, self.ends = [0.0] * len(self.missing), [0.0] * len(self.missing)

    def times(self) -> list[Times]:
        self._begin(range(len(self.queues)))
        while self.working or self.on_the_disk:
            self._begin(self._finish(self._next()))
        cuts = [slice(run * self.num_ops, (run + 1) * self.num_ops) for run in range(self.runs)]
        return [(self.starts[cut], self.ends[cut]) for cut in cuts]

    def _begin(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            queue, taken = self.queues[lane], self.taken[lane]
            if self.busy[lane] or taken >= self.runs * len(queue):
                continue
            op = taken // len(queue) * self.num_ops + queue[taken % len(queue)]
            if self.missing[op]:
                continue
            self.busy[lane], self.taken[lane], self.starts[op] = True, taken + 1, self.now
            cost = self.costs[op % self.num_ops]
            if self.on_disk[lane]:
                heappush(self.on_the_disk, (self.served + cost, op))
            else:
                heappush(self.working, (self.now + cost, op))

    def _next(self) -> int:
        """The op that ends first, at which the clock then stands."""
        sharers = len(self.on_the_disk)
        elsewhere = self.working[0][0] if self.working else math.inf
        there = self.now + max(self.on_the_disk[0][0] - self.served, 0.0) * sharers if sharers else math.inf
        if there <= elsewhere:
            self.served, op = heappop(self.on_the_disk)
            self.now = there
            return op
        if sharers:
            self.served += (elsewhere - self.now) / sharers
        self.now, op = heappop(self.working)
        return op

    def _finish(self, op: int) -> list[int]:
        """Lanes that may have something to begin."""
        run, index = divmod(op, self.num_ops)
        lane = self.lane_of[index]
        self.ends[op], self.busy[lane] = self.now, False
        lanes = [lane]
        for age, other in self.after[index]:
            if run + age < self.runs:
                waiting = (run + age) * self.num_ops + other
                self.missing[waiting] -= 1
                if not self.missing[waiting]:
                    lanes.append(self.lane_of[other])
        return lanes
