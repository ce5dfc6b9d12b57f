"""Runs plans on a device's lanes. Waits exactly where a plan says, and knows nothing else about order.

Runs of one plan join: the next is submitted while the last is still at work, and its first ops wait for that run's.
Another plan starts when every lane is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from slideformer.device import Device, Lane, LaneFailure, Mark
from slideformer.engine.reach import Held, Reach
from slideformer.engine.run import Run
from slideformer.schedule import Buffer, LaneName, Op, OpKind, Plan
from slideformer.schedule.ops import HOST_LANES, STATE_PLACES

Action = Callable[[Reach, Run, Op], None]

RUNS_IN_FLIGHT = 2
"""Runs submitted and not done: one at work, one queued behind it, so that queues stay bounded."""


class _Compiled:
    """A plan with everything that does not change from run to run looked up."""

    def __init__(self, plan: Plan, buffers: dict[Buffer, Held], actions: dict[OpKind, Action], poisons: bool) -> None:
        self.plan = plan
        self.labels = [str(op) for op in plan.ops]
        self.works = [partial(_perform, actions[op.kind], Reach(op, buffers), op=op) for op in plan.ops]
        self.poison_before: list[list[torch.Tensor]] = [[] for _ in plan.ops]
        self.poison_after: list[list[torch.Tensor]] = [[] for _ in plan.ops]
        if poisons:
            self._find_dead(buffers)

    def _find_dead(self, buffers: dict[Buffer, Held]) -> None:
        """A buffer is dead from its last use until it is overwritten: NaN then shows whoever reads it all the same."""
        last_use: dict[Buffer, int] = {}
        for index, op in enumerate(self.plan.ops):
            for access in op.accesses:
                held = buffers[access.buffer]
                if (
                    access.buffer.place in STATE_PLACES
                    or not isinstance(held, torch.Tensor)
                    or not held.is_floating_point()
                ):
                    continue
                if access.needs is None:
                    self.poison_before[index].append(held)
                    if access.buffer in last_use:
                        self.poison_after[last_use[access.buffer]].append(held)
                last_use[access.buffer] = index
        for buffer, index in last_use.items():
            held = buffers[buffer]
            assert isinstance(held, torch.Tensor)
            self.poison_after[index].append(held)


def _perform(action: Action, reach: Reach, run: Run, *, op: Op) -> None:
    action(reach, run, op)


def _poisoned(before: list[torch.Tensor], work: Callable[[], None], after: list[torch.Tensor]) -> None:
    for tensor in before:
        tensor.fill_(float("nan"))
    work()
    for tensor in after:
        tensor.fill_(float("nan"))


class Executor:
    """Owns the lanes. Use from one thread."""

    def __init__(self, device: Device, buffers: dict[Buffer, Held], actions: dict[OpKind, Action]) -> None:
        self.device, self.buffers, self._actions = device, buffers, actions
        self._lanes: dict[LaneName, Lane] = {lane: device.lane(str(lane), host=lane in HOST_LANES) for lane in LaneName}
        self._compiled: dict[int, _Compiled] = {}
        self._last: tuple[Plan, Run] | None = None
        self._in_flight: deque[tuple[Plan, Run]] = deque()

    def submit(self, plan: Plan, run: Run) -> None:
        """Queue a run and return; `run.marks[i]` closes op i. Blocks while RUNS_IN_FLIGHT others are not done.

        Raises LaneFailure if any lane has failed.
        """
        self._check()
        if id(plan) not in self._compiled:
            self._compiled[id(plan)] = _Compiled(plan, self.buffers, self._actions, self.device.poisons)
        compiled = self._compiled[id(plan)]
        while len(self._in_flight) >= RUNS_IN_FLIGHT:
            self._retire()
        before: list[Mark] = []
        if self._last is not None and self._last[0] is plan:
            before = self._last[1].marks
        else:
            self.synchronize()
        self.device.anchor()
        marks = run.marks
        for index, op in enumerate(plan.ops):
            lane = self._lanes[op.lane]
            for wait in plan.waits[index]:
                if wait.age == 0:
                    lane.wait(marks[wait.index])
                elif before:
                    lane.wait(before[wait.index])
            work: Callable[[], None] = partial(compiled.works[index], run)
            if self.device.poisons:
                work = partial(_poisoned, compiled.poison_before[index], work, compiled.poison_after[index])
            marks.append(lane.run(work, compiled.labels[index]))
        self._last = (plan, run)
        self._in_flight.append((plan, run))

    def synchronize(self) -> None:
        """Block until every submitted run is done."""
        while self._in_flight:
            self._retire()

    def torn(self) -> bool:
        """Some run has begun to write the state and did not finish."""
        return self.device.failure is not None and any(
            run.writes_started
            and not all(m.completed for op, m in zip(plan.ops, run.marks, strict=False) if op.lane is LaneName.UPDATE)
            for plan, run in self._in_flight
        )

    def _retire(self) -> None:
        for mark in self._in_flight[0][1].marks:
            mark.wait()
        self._in_flight.popleft()

    def _check(self) -> None:
        failure: LaneFailure | None = self.device.failure
        if failure is not None:
            raise failure
