"""Small layouts and options to build plans from, and an interpreter that runs a plan in the worst order it can find.

The interpreter knows nothing of `check` and `waits`: an op takes time, lanes are FIFO, and whatever lane order and
waits allow to run at once may run at once. It finds a race when an op starts while another holds one of its buffers,
and a wrong content when a buffer does not hold what the op declares that it needs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.schedule import (
    Access,
    Buffer,
    LaneName,
    Op,
    PassOptions,
    Place,
    Plan,
    StepOptions,
    Update,
    Wait,
    build_evaluation,
    build_pass,
    build_step,
)
from slideformer.schedule.ops import STATE

ROWS, WIDTH, TILE = 5, 3, 6
"""Of the vocabulary matrices: 15 elements, three tiles. A block has 15 elements too, of which 12 decay: three tiles."""


def tiny_layout(
    num_blocks: int,
    *,
    tied: bool = True,
    glue: bool = False,
    final: bool = True,
    tile_numel: int = TILE,
    frozen: frozenset[str] = frozenset(),
) -> Layout:
    """frozen: names of parameters: table, glue, wB and nB of block B, final, output."""

    def param(name: str, *shape: int) -> Param:
        return Param(name, shape, decay=len(shape) > 1, trainable=name not in frozen)

    units = [Unit("table", UnitKind.TABLE, (param("table", ROWS, WIDTH),))]
    if glue:
        units.append(Unit("glue", UnitKind.GLUE, (param("glue", 4, WIDTH),)))
    for b in range(num_blocks):
        units.append(Unit(f"block.{b}", UnitKind.BLOCK, (param(f"n{b}", 3), param(f"w{b}", 4, WIDTH))))
    if final:
        units.append(Unit("final", UnitKind.FINAL, (param("final", WIDTH),)))
    if not tied:
        units.append(Unit("output", UnitKind.OUTPUT, (param("output", ROWS, WIDTH),)))
    return Layout(tuple(units), tile_numel, tied)


@dataclass(frozen=True)
class Case:
    """One plan and what it was built from."""

    layout: Layout
    options: StepOptions
    plan: Plan

    def __repr__(self) -> str:
        params = [p.name + "*" * (not p.trainable) for u in self.layout.units for p in u.params]
        return f"{self.plan.name} of {params} tied={self.layout.tied} tile={self.layout.tile_numel} {self.options}"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every op


def every_content(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((str(content), unit) for content in STATE for unit in range(len(layout.units)))


@st.composite
def cases(draw: st.DrawFn, *, max_blocks: int = 5, training: bool | None = None) -> Case:
    """Every kind of layout and every option, small. training: steps only, evaluations only, or both (None)."""
    num_blocks = draw(st.integers(1, max_blocks))
    names = ["table", "glue", "final", "output", *(f"{p}{b}" for b in range(num_blocks) for p in "wn")]
    layout = tiny_layout(
        num_blocks,
        tied=draw(st.booleans()),
        glue=draw(st.booleans()),
        final=draw(st.booleans()),
        tile_numel=draw(st.sampled_from([1, 4, 6, 15, 100])),
        frozen=draw(st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(names)))),
    )
    update = draw(st.sampled_from(list(Update)))
    units = range(len(layout.units))
    resident = draw(st.one_of(st.just(set()), st.sets(st.sampled_from(units)), st.just(set(units))))
    keep = draw(st.sets(st.sampled_from(sorted(resident)))) if resident else set()
    ahead = draw(st.sets(st.sampled_from(units))) - resident if update is Update.DEFERRED else set()
    late = draw(st.sets(st.sampled_from(layout.blocks))) - resident if update is Update.EAGER else set()
    contents = [(str(c), u) for c in STATE for u in units if u not in resident | ahead]
    some = [st.sets(st.sampled_from(contents)), st.just(set(contents))] if contents else []
    disk = draw(st.one_of(st.just(set()), *some))
    options = StepOptions(
        window=draw(st.integers(1, 4)),
        grad_slots=draw(st.integers(1, 3)),
        ring=draw(st.integers(1, 5)),
        disk=tuple(sorted(disk)),
        disk_ring=draw(st.integers(1, 4)),
        saved_on_disk=draw(st.sampled_from([0, 1, 3, 99])),
        saved_over=draw(st.sampled_from([0, 2, 5, 7])),
        gds=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 4)),
        hidden_pool=draw(st.sampled_from([0, 1, 2, 3, 5, 8, 40])),
        hidden_ring=draw(st.integers(2, 6)),
        update=update,
        fp32_compute=draw(st.booleans()),
        ahead=tuple(sorted(ahead)),
        late=tuple(sorted(late)),
        sliced_head=draw(st.booleans()) and layout.output not in resident,
        resident=tuple(sorted(resident)),
        keep=tuple(sorted(keep & set(layout.blocks))),
    )
    trains = draw(st.booleans()) if training is None else training
    trains = trains and layout.train_numel > 0
    plan = build_step(layout, options) if trains else build_evaluation(layout, options)
    return Case(layout, options, plan)


@st.composite
def passes(draw: st.DrawFn) -> Case:
    """Every kind of layout and every option of a pass of generation, small."""
    layout = tiny_layout(
        draw(st.integers(1, 4)),
        tied=draw(st.booleans()),
        glue=draw(st.booleans()),
        final=draw(st.booleans()),
        tile_numel=draw(st.sampled_from([4, 6, 15, 100])),
    )
    units = range(len(layout.units))
    resident = draw(st.one_of(st.just(set()), st.sets(st.sampled_from(units)), st.just(set(units))))
    options = PassOptions(
        window=draw(st.integers(1, 4)),
        micro_batches=draw(st.integers(1, 4)),
        hidden_pool=draw(st.sampled_from([0, 1, 2, 3, 5])),
        hidden_ring=draw(st.integers(2, 4)),
        fp32_compute=draw(st.booleans()),
        sliced_head=draw(st.booleans()) and layout.output not in resident,
        resident=tuple(sorted(resident)),
        first=draw(st.booleans()),
        cached_on_device=draw(st.sampled_from([0, 1, 3, 100])),
        cache_ring=draw(st.integers(1, 4)),
    )
    return Case(layout, options, build_pass(layout, options))


def examples() -> dict[str, Case]:
    """A few plans that between them use every kind of op; small enough to try every mutation of each."""
    tied, untied = tiny_layout(3, glue=True), tiny_layout(2, tied=False, tile_numel=100)
    partly = tiny_layout(3, tied=False, frozen=frozenset({"table", "w0", "n0", "n2"}))
    eager, deferred = StepOptions(ring=2), StepOptions(update=Update.DEFERRED)
    spilling = StepOptions(window=1, grad_slots=1, ring=1, micro_batches=2, hidden_ring=2)
    spilling32 = replace(spilling, fp32_compute=True, update=Update.DEFERRED, hidden_pool=1)
    ahead = StepOptions(update=Update.DEFERRED, ahead=(0, 2, 3))
    ahead_untied = replace(spilling32, ahead=(0, 2, 4))
    some = StepOptions(window=1, micro_batches=2, hidden_ring=2, late=(2,), resident=(0, 3), keep=(3,))
    every = replace(spilling32, resident=(0, 1, 2, 3, 4), keep=(1, 2))
    ends = StepOptions(update=Update.DEFERRED, resident=(1, 4, 5), ahead=(0, 2), keep=(4,))
    sliced = StepOptions(window=1, micro_batches=2, hidden_ring=2, ring=2, sliced_head=True)
    sliced_ahead = StepOptions(update=Update.DEFERRED, sliced_head=True, ahead=(0, 4), hidden_pool=4)
    stored = StepOptions(window=1, micro_batches=2, hidden_ring=2, ring=2, disk=every_content(tied), saved_on_disk=2)
    stored_deferred = replace(spilling32, disk=every_content(untied), disk_ring=1, saved_on_disk=99)
    some_stored = StepOptions(disk=(("exp_avg_sq", 2), ("weight", 0), ("residual", 3)), resident=(1,))
    straight, straight_deferred = replace(stored, gds=True), replace(stored_deferred, gds=True)
    straight_sliced = replace(sliced, disk=every_content(untied), gds=True)
    later = PassOptions(window=1, micro_batches=2, hidden_pool=3, cached_on_device=3, cache_ring=2, first=False)
    first = replace(later, first=True, resident=(0, 3), hidden_pool=0, fp32_compute=True)
    stored_pass = replace(later, disk=every_content(tied), gds=True)
    sliced_pass = replace(later, sliced_head=True, cache_ring=1, hidden_pool=0)
    return {
        "first pass": Case(tied, first, build_pass(tied, first)),
        "later pass": Case(tied, later, build_pass(tied, later)),
        "later pass from disk, straight": Case(tied, stored_pass, build_pass(tied, stored_pass)),
        "later pass with a sliced head": Case(untied, sliced_pass, build_pass(untied, sliced_pass)),
        "tied, sliced head": Case(tied, sliced, build_step(tied, sliced)),
        "untied, sliced head, ahead": Case(untied, sliced_ahead, build_step(untied, sliced_ahead)),
        "evaluation with a sliced head": Case(untied, sliced, build_evaluation(untied, sliced)),
        "tied, table and one block resident": Case(tied, some, build_step(tied, some)),
        "untied, all resident, deferred fp32": Case(untied, every, build_step(untied, every)),
        "tied, glue, final and one block resident, ahead": Case(tied, ends, build_step(tied, ends)),
        "tied ahead": Case(tied, ahead, build_step(tied, ahead)),
        "untied ahead spilling fp32": Case(untied, ahead_untied, build_step(untied, ahead_untied)),
        "tied, all on disk": Case(tied, stored, build_step(tied, stored)),
        "untied, all on disk, deferred fp32": Case(untied, stored_deferred, build_step(untied, stored_deferred)),
        "some on disk": Case(tied, some_stored, build_step(tied, some_stored)),
        "evaluation from disk": Case(untied, stored_deferred, build_evaluation(untied, stored_deferred)),
        "tied, all on disk, straight": Case(tied, straight, build_step(tied, straight)),
        "untied, deferred fp32, straight": Case(untied, straight_deferred, build_step(untied, straight_deferred)),
        "untied, sliced, straight": Case(untied, straight_sliced, build_step(untied, straight_sliced)),
        "tied eager": Case(tied, eager, build_step(tied, eager)),
        "tied deferred": Case(tied, deferred, build_step(tied, deferred)),
        "untied eager spilling": Case(untied, spilling, build_step(untied, spilling)),
        "untied deferred spilling fp32": Case(untied, spilling32, build_step(untied, spilling32)),
        "partly frozen": Case(partly, eager, build_step(partly, eager)),
        "evaluation": Case(tied, spilling, build_evaluation(tied, spilling)),
    }


def replace_op(plan: Plan, index: int, op: Op) -> Plan:
    return replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :]))


def without_access(plan: Plan, index: int, access: Access) -> Plan:
    op = plan.ops[index]
    return replace_op(plan, index, replace(op, accesses=tuple(a for a in op.accesses if a is not access)))


def with_access(plan: Plan, index: int, old: Access, new: Access) -> Plan:
    op = plan.ops[index]
    return replace_op(plan, index, replace(op, accesses=tuple(new if a is old else a for a in op.accesses)))


def without_wait(plan: Plan, index: int, wait: Wait) -> Plan:
    waits = tuple(w for w in plan.waits[index] if w != wait)
    return replace(plan, waits=(*plan.waits[:index], waits, *plan.waits[index + 1 :]))


def all_waits(plan: Plan) -> Iterator[tuple[int, Wait]]:
    for index, waits in enumerate(plan.waits):
        for wait in waits:
            yield index, wait


def all_accesses(plan: Plan) -> Iterator[tuple[int, Access]]:
    for index, op in enumerate(plan.ops):
        for access in op.accesses:
            yield index, access


class Race(AssertionError):
    """Two ops hold one buffer at once, and one of them writes it."""


class WrongContent(AssertionError):
    """An op does not find what it declares that it needs."""


Instance = tuple[int, int]  # (run, op index)


class Interpreter:
    """Runs a plan several times, joined, in an order that lane order and waits allow.

    rank: which of the events that could come next comes next; the lowest. An event is the start or the end of an op.
    """

    def __init__(self, case: Case, *, runs: int) -> None:
        self.case, self.runs = case, runs
        self.plan = case.plan
        self.queues: dict[LaneName, list[Instance]] = {lane: [] for lane in LaneName}
        for run in range(runs):
            for index, op in enumerate(self.plan.ops):
                self.queues[op.lane].append((run, index))
        self.ended: set[Instance] = set()
        self.running: dict[LaneName, Instance] = {}
        self.holds: dict[Buffer, object] = {}
        self.order: list[Instance] = []

    def run(self, rank) -> None:
        total = self.runs * len(self.plan.ops)
        while len(self.ended) < total:
            events = [(lane, "end") for lane in self.running]
            events += [(lane, "start") for lane in LaneName if self._may_start(lane)]
            assert events, f"deadlock after {len(self.ended)} of {total} ops"
            lane, event = min(events, key=lambda e: rank(e, self))
            if event == "start":
                self._start(lane)
            else:
                self._end(lane)

    def next_in(self, lane: LaneName) -> Instance:
        return self.running.get(lane) or self.queues[lane][0]

    def _may_start(self, lane: LaneName) -> bool:
        if lane in self.running or not self.queues[lane]:
            return False
        run, index = self.queues[lane][0]
        waits = [(run - w.age, w.index) for w in self.plan.waits[index]]
        return all(w in self.ended for w in waits if w[0] >= 0)

    def _start(self, lane: LaneName) -> None:
        run, index = self.queues[lane].pop(0)
        op = self.plan.ops[index]
        for other_run, other_index in self.running.values():
            other = self.plan.ops[other_index]
            writes = {a.buffer for a in other.accesses if a.leaves is not None}
            touches = {a.buffer for a in other.accesses}
            for access in op.accesses:
                if access.buffer in (touches if access.leaves is not None else writes):
                    raise Race(f"{op} of run {run} and {other} of run {other_run} hold {access.buffer} at once")
        for access in op.accesses:
            if access.needs is not None:
                found, expected = self._found(access.buffer), self._meaning(access.buffer, access.needs, run)
                if found != expected:
                    raise WrongContent(f"{op} of run {run} needs {expected} in {access.buffer}, finds {found}")
            if access.leaves is not None:
                self.holds[access.buffer] = "half written"
        self.running[lane] = (run, index)

    def _end(self, lane: LaneName) -> None:
        run, index = self.running.pop(lane)
        for access in self.plan.ops[index].accesses:
            if access.leaves is not None:
                self.holds[access.buffer] = self._meaning(access.buffer, access.leaves, run)
        self.ended.add((run, index))
        self.order.append((run, index))

    def _found(self, buffer: Buffer) -> object:
        if buffer.place in (*STATE, "home", "other_rows"):
            return self.holds.get(buffer, (str(buffer.place), *buffer.index, 0))
        return self.holds.get(buffer, self._left_by_another_pass(buffer))

    def _left_by_another_pass(self, buffer: Buffer) -> object:
        """Prompts, for a first pass; for a later one also uploaded weights, keys and values."""
        if buffer.place is Place.SEQUENCES:
            return ("sequences", 0)
        if not isinstance(self.case.options, PassOptions) or self.case.options.first:
            return None
        if buffer.place is Place.DENSE:
            return ("weights", *buffer.index, len(self.case.layout.tiles(buffer.index[0])))
        return ("cache", *buffer.index, 0) if buffer.place in (Place.CACHE, Place.CACHE_HOST) else None

    def _meaning(self, buffer: Buffer, content: tuple[str | int, ...], run: int) -> object:
        """State counts the updates since the start; all else belongs to its run."""
        if buffer.place == "home":
            name, unit, version = content
            return (name, unit, (run if self.plan.trains and self.case.layout.units[unit].train_numel else 0) + version)
        if isinstance(self.case.options, PassOptions) and content[0] in ("cache", "sequences"):
            first = self.case.options.first and content[0] == "cache"
            return (run, content) if first else (*content[:-1], run + int(content[-1]))
        if buffer.place is Place.DENSE and buffer.place in self.plan.keeps and not self.case.options.first:
            return content
        if buffer.place not in (*STATE, "other_rows"):
            return (run, content)
        name, unit, tile, version = content
        trained = self.plan.trains and tile < len(self.case.layout.tiles(unit, trained=True))
        before = run if trained else 0
        return (name, unit, tile, before + version if isinstance(version, int) else f"{before} and {version}")


def random_rank(seed: int):
    """Some lanes are slow and some are fast, and now and then it is otherwise; an op's end may take long."""
    generator = random.Random(seed)
    speed = {(lane, event): generator.choice([0.0, 0.5, 2.0]) for lane in LaneName for event in ("start", "end")}
    return lambda event, _: speed[event] + generator.random()


def starve(target: Instance):
    """Runs everything else for as long as it can before it lets `target` end, and prefers starts to ends."""

    def rank(event: tuple[LaneName, str], interpreter: Interpreter) -> int:
        lane, what = event
        if interpreter.next_in(lane) == target and what == "end":
            return 2
        return 0 if what == "start" else 1

    return rank
