"""Runs plans on a device's lanes. Waits exactly where a plan says, and knows nothing else about order.

Runs of one plan join: the next is submitted while the last is still at work, and its first ops wait for that run's.
Another plan starts when every lane is idle.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from slideformer.device import Device, Lane, LaneFailure, Mark
from slideformer.engine.reach import Held, Reach
from slideformer.engine.run import Run
from slideformer.errors import RunFailed
from slideformer.memory import StoredTile
from slideformer.schedule import Buffer, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.ops import DISK_LANES, HOST_LANES, STATE_PLACES

Action = Callable[[Reach, Run, Op], None]

SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep Python's lock while another waits for it. With the default 5 ms a launcher or a host lane
waits for the caller's loop over the next plan at the joint between steps, where all wait for it: with this and a gather
that goes tile by tile, gathering 172 MB went from 39 to 12 ms (H200, 2026-11-30)."""

WRITTEN = STATE_PLACES | {Place.SPARE, Place.HOME}
"""Where an op that changes a unit's state writes."""

RUNS_IN_FLIGHT = 2
"""Runs submitted and not done: one at work, one queued behind it, so that queues stay bounded."""


def writes_state(op: Op) -> bool:
    return any(a.leaves is not None and a.buffer.place in WRITTEN for a in op.accesses)


class _Compiled:
    """A plan with everything that does not change from run to run looked up."""

    def __init__(self, plan: Plan, buffers: dict[Buffer, Held], actions: dict[OpKind, Action], poisons: bool) -> None:
        self.plan = plan
        self.labels = [str(op) for op in plan.ops]
        self.writes_state = [writes_state(op) for op in plan.ops]
        self.works = [partial(_perform, actions[op.kind], Reach(op, buffers), op=op) for op in plan.ops]
        self.poison_before: list[list[torch.Tensor]] = [[] for _ in plan.ops]
        self.poison_after: list[list[torch.Tensor]] = [[] for _ in plan.ops]
        if poisons:
            self._find_dead(buffers)

    def _find_dead(self, buffers: dict[Buffer, Held]) -> None:
        """A buffer is dead from its last use until it is overwritten: NaN then shows whoever reads it all the same.

        Several lanes may read a buffer at once (a hidden state is spilled while a block reads it). Then none of them
        knows that it is the last, and it is left to the op that overwrites.
        """
        last_use: dict[Buffer, int] = {}
        readers: dict[Buffer, set[LaneName]] = {}

        def bury(buffer: Buffer) -> None:
            if buffer in last_use and len(readers[buffer]) <= 1:
                self.poison_after[last_use[buffer]].append(buffers[buffer])

        for index, op in enumerate(self.plan.ops):
            for buffer, needs, leaves in ((a.buffer, a.needs, a.leaves) for a in op.accesses):
                held = buffers[buffer]
                kept = buffer.place in STATE_PLACES or buffer.place in self.plan.keeps
                if kept or not isinstance(held, torch.Tensor) or not held.is_floating_point():
                    continue
                if needs is None:
                    self.poison_before[index].append(held)
                    bury(buffer)
                last_use[buffer] = index
                readers[buffer] = set() if leaves is not None else readers[buffer] | {op.lane}
        for buffer in last_use:
            bury(buffer)


def _perform(action: Action, reach: Reach, run: Run, *, op: Op) -> None:
    if not run.dropped:
        action(reach, run, op)


def _poisoned(before: list[torch.Tensor], work: Callable[[], None], after: list[torch.Tensor]) -> None:
    for tensor in before:
        tensor.fill_(float("nan"))
    work()
    for tensor in after:
        tensor.fill_(float("nan"))


class Executor:
    """Owns the lanes. Use from one thread."""

    def __init__(
        self,
        device: Device,
        buffers: dict[Buffer, Held],
        actions: dict[OpKind, Action],
        lanes: dict[LaneName, Lane] | None = None,
    ) -> None:
        """lanes: of another executor, which works when this one does not; those that it lacks are added to them."""
        self.device, self.buffers, self._actions = device, buffers, actions
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self.lanes: dict[LaneName, Lane] = {} if lanes is None else lanes
        uses_disk = any(isinstance(held, StoredTile) for held in buffers.values())
        for lane in LaneName:
            if lane not in self.lanes and (lane not in DISK_LANES or uses_disk):
                self.lanes[lane] = device.lane(str(lane), host=lane in HOST_LANES)
        self._compiled: dict[int, _Compiled] = {}
        self._last: tuple[Plan, Run] | None = None
        self._in_flight: deque[tuple[Plan, Run]] = deque()
        self.interrupted = False
        self._torn = False
        self._holds: dict[int, Mark] = {}
        self.held_s = 0.0  # for which lanes have waited for a hold; the update lane's, unless units are resident

    def hold(self, unit: int, until: Mark) -> None:
        """No run that is submitted from now on writes the unit's state before `until`."""
        self._holds[unit] = until

    def submit(self, plan: Plan, run: Run) -> None:
        """Queue a run and return; `run.marks[i]` closes op i. Blocks while RUNS_IN_FLIGHT others are not done.

        Raises LaneFailure if any lane has failed, RunFailed if an earlier submission was interrupted.
        """
        self._check()
        if id(plan) not in self._compiled:
            self._compiled[id(plan)] = _Compiled(plan, self.buffers, self._actions, self.device.poisons)
        while len(self._in_flight) >= RUNS_IN_FLIGHT:
            self._retire()
        before: list[Mark] = []
        if self._last is not None and self._last[0] is plan:
            before = self._last[1].marks
        else:
            self.synchronize()
        self.device.anchor()
        try:
            if self._last is not None and before:  # not sooner: from here on either this run follows or none does
                self._last[1].next_feed = run.feed
            self._in_flight.append((plan, run))
            self._queue(self._compiled[id(plan)], run, before)
            self._last = (plan, run)
        except BaseException:  # a Ctrl-C: what would follow has nothing to wait for
            self.interrupted = True
            raise

    def _queue(self, compiled: _Compiled, run: Run, before: list[Mark]) -> None:
        marks, plan = run.marks, compiled.plan
        held: dict[int, LaneName] = {}  # units, and the lane that waits for their hold first
        for index, op in enumerate(plan.ops):
            lane = self.lanes[op.lane]
            for wait in plan.waits[index]:
                if wait.age == 0:
                    lane.wait(marks[wait.index])
                elif before:
                    lane.wait(before[wait.index])
            if compiled.writes_state[index] and op.unit in self._holds:
                hold = self._holds[op.unit]
                if hold.completed:
                    del self._holds[op.unit]
                else:
                    counts = held.setdefault(op.unit, op.lane) is op.lane  # others wait beside it
                    lane.run(partial(self._await, hold, counts=counts), f"hold of unit {op.unit}")
            work: Callable[[], None] = partial(compiled.works[index], run)
            if self.device.poisons:
                work = partial(_poisoned, compiled.poison_before[index], work, compiled.poison_after[index])
            marks.append(lane.run(work, compiled.labels[index]))

    def _await(self, hold: Mark, *, counts: bool) -> None:
        start = time.perf_counter()
        hold.wait()
        if counts:
            self.held_s += time.perf_counter() - start

    def synchronize(self) -> None:
        """Block until every submitted run is done. Raises as `submit` does."""
        while self._in_flight:
            self._retire()

    def wait_idle(self) -> None:
        """Block until no lane works, whatever has failed. Raises nothing."""
        for mark in [lane.run(_nothing, "idle") for lane in self.lanes.values() if not lane.closed]:
            mark.wait_issued()
        self.device.settle()

    def torn(self) -> bool:
        """Some run has begun to write the state and will not finish. Of lanes that are idle."""
        stopped = self.interrupted or self.device.failure is not None
        unfinished = any(run.writes_started and not _updated(plan, run) for plan, run in self._in_flight)
        return self._torn or (stopped and unfinished)

    def release(self) -> None:
        """Let go of every buffer, whoever keeps this or results of its runs. Of lanes that are idle; nothing can be
        submitted any more."""
        self._torn = self.torn()
        self._compiled.clear()
        self._in_flight.clear()
        self._last, self.buffers, self._actions = None, {}, {}  # actions keep views of them

    def _retire(self) -> None:
        plan, run = self._in_flight[0]
        for mark in run.marks:
            mark.wait()
        if len(run.marks) < len(plan.ops):
            self._check()
        self._in_flight.popleft()

    def _check(self) -> None:
        failure: LaneFailure | None = self.device.failure
        if failure is not None:
            failure.heard = True
            raise failure
        if self.interrupted:
            raise RunFailed(
                "a step was interrupted while it was submitted, and no other can follow: build a new engine"
            )


def _updated(plan: Plan, run: Run) -> bool:
    updates = (m.completed for op, m in zip(plan.ops, run.marks, strict=False) if _decides(op))
    return len(run.marks) == len(plan.ops) and all(updates)


def _decides(op: Op) -> bool:
    """Writes state, or has the last word about the run."""
    return op.lane in (LaneName.UPDATE, LaneName.DISK_WRITE) or op.kind in (
        OpKind.UPDATE_RESIDENT,
        OpKind.UPDATE_RESIDENT_TABLE,
    )


def _nothing() -> None:
    pass
