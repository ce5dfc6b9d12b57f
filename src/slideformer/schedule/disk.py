"""What lies on disk passes through page-locked memory: reads before the ops that need it, writes after them.

A program is written as if all state and saved inputs were on the host. This pass gives every op that touches a tile on
disk a place in a ring of staging buffers instead, with a read before and a write behind it where they are needed. How
far reads run ahead follows from the waits: as far as a ring has places. With GPUDirect Storage, uploads, spills and
fetches need no staging: they become ops of the disk's lanes themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from slideformer.schedule.ops import (
    DISK_LANES,
    FILED,
    STAGING,
    STATE,
    Access,
    Buffer,
    Content,
    LaneName,
    Op,
    OpKind,
    Place,
)
from slideformer.schedule.options import StepOptions

OUT, IN = 0, 1
"""Rings of saved inputs: on their way to the disk, and back."""

STRAIGHT = {
    LaneName.UPLOAD: LaneName.DISK_FEED,
    LaneName.SPILL: LaneName.DISK_SPILL,
    LaneName.FETCH: LaneName.DISK_FETCH,
}
"""Lanes between host and device, and those in which the same ops go between disk and device."""


MOVES_TILES = frozenset({LaneName.UPDATE, LaneName.UPLOAD, LaneName.GATHER, LaneName.SPILL, LaneName.FETCH})
"""Lanes of the ops that touch what may be on disk."""


def staged(ops: Sequence[Op], options: StepOptions) -> tuple[Op, ...]:
    """The ops with staging for whatever `options.disk` and `options.saved_on_disk` leave to the disk."""
    if not options.disk and not options.saved_on_disk:
        return tuple(ops)
    staging, found = _Staging(options), list[Op]()
    for op in ops:
        found += staging.around(op) if op.lane in MOVES_TILES else (op,)
    return _without_dead_writes(found)


def every_saved(ops: Sequence[Op], options: StepOptions) -> Op:
    """All places that the saved inputs of these ops and of fewer micro-batches may need on disk and beside it, named in
    one op that is not to be run: what is found staged here, and so never written, may not be there. ops: as if all
    saved inputs were on the host."""
    staging, moves = _Staging(options), [op for op in ops if op.lane in (LaneName.SPILL, LaneName.FETCH)]
    saved = dict.fromkeys(a.buffer for op in moves for a in op.accesses if a.buffer.place is Place.SAVED)
    found = [buffer for buffer in saved if staging.is_on_disk(buffer)]
    if found and not options.gds:
        lanes = Counter(op.lane for op in moves)
        rings = ((OUT, lanes[LaneName.SPILL]), (IN, lanes[LaneName.FETCH]))
        found += [
            Buffer(Place.STAGED_SAVED, (which, position))
            for which, num in rings
            for position in range(min(num, options.disk_ring))
        ]
    return Op(OpKind.READ_SAVED, LaneName.DISK_FETCH, tuple(Access("file", buffer, None, None) for buffer in found))


def _without_dead_writes(ops: list[Op]) -> tuple[Op, ...]:
    """Without what is written to disk and not read again, because the next to need it found it staged."""
    next_reads: dict[Buffer, bool] = {}  # of buffers on disk: whether the next op that moves them reads them
    live: list[Op] = []
    for op in reversed(ops):
        if op.lane in DISK_LANES:
            files = [a for a in op.accesses if a.buffer.place in FILED]
            reads = files[0].needs is not None
            wanted = [next_reads.get(a.buffer, a.buffer.place is not Place.SAVED) for a in files]
            if not reads and not any(wanted):
                continue
            next_reads.update((a.buffer, reads) for a in files)
        live.append(op)
    return tuple(reversed(live))


class _Staging:
    def __init__(self, options: StepOptions) -> None:
        self._options, self._disk = options, frozenset(options.disk)
        self._next: Counter[tuple[Place, int]] = Counter()
        self._holds: dict[Buffer, Buffer] = {}  # what was last staged in a place
        # By ring and what is staged: where it last was, as the disk has it or newer.
        self._stages: dict[Place, dict[Buffer, Buffer]] = {place: {} for place in STAGING}

    def around(self, op: Op) -> Iterator[Op]:
        """The op, with its reads before and its writes behind it."""
        on_disk = [a for a in op.accesses if self.is_on_disk(a.buffer)]
        if not on_disk:
            yield op
            return
        if self._goes_straight(op):
            yield Op(op.kind, STRAIGHT[op.lane], op.accesses, op.unit, op.tile, op.micro)
            return
        reads = [a for a in on_disk if a.needs is not None]
        writes = [a for a in on_disk if a.leaves is not None]
        places = self._still_there(op, on_disk)
        if places is None:
            places = {a.buffer: self._place(op, a.buffer) for a in on_disk}
            if reads:
                yield self._moved(op, reads, places, inward=True)
        accesses = (Access(a.role, places.get(a.buffer, a.buffer), a.needs, a.leaves) for a in op.accesses)
        yield Op(op.kind, op.lane, tuple(accesses), op.unit, op.tile, op.micro)
        if writes:
            self._forget(places)
            yield self._moved(op, writes, places, inward=False)

    def is_on_disk(self, buffer: Buffer) -> bool:
        if buffer.place is Place.SAVED:
            num, over = self._options.saved_on_disk, max(self._options.saved_over, self._options.saved_on_disk)
            return buffer.index[0] < over and buffer.index[0] * num % over < num
        return buffer.place in STATE and (buffer.place, buffer.index[0]) in self._disk

    def _goes_straight(self, op: Op) -> bool:
        joins = op.kind is OpKind.UPLOAD and self._options.fp32_compute
        return self._options.gds and op.lane in STRAIGHT and not joins

    def _place(self, op: Op, buffer: Buffer) -> Buffer:
        if buffer.place is Place.SAVED:
            return self._take(Place.STAGED_SAVED, OUT if op.lane is LaneName.SPILL else IN, buffer)
        return self._take(self._ring(op), STATE.index(buffer.place), buffer)

    def _ring(self, op: Op) -> Place:
        if op.lane in (LaneName.SPILL, LaneName.FETCH):
            return Place.STAGED_SAVED
        return Place.STAGED_STATE if op.lane is LaneName.UPDATE else Place.STAGED_WEIGHTS

    def _take(self, place: Place, which: int, buffer: Buffer) -> Buffer:
        position = self._next[place, which] % self._options.disk_ring
        self._next[place, which] += 1
        taken, staged = Buffer(place, (which, position)), self._stages[place]
        before = self._holds.get(taken)
        if before is not None and staged.get(before) == taken:
            del staged[before]
        self._holds[taken], staged[buffer] = buffer, taken
        return taken

    def _still_there(self, op: Op, on_disk: list[Access]) -> dict[Buffer, Buffer] | None:
        """The places of what an op needs, if all of it was staged for an op of its kind and is not overwritten yet."""
        staged = self._stages[self._ring(op)]
        if any(a.needs is None or a.buffer not in staged for a in on_disk):
            return None
        return {a.buffer: staged[a.buffer] for a in on_disk}

    def _forget(self, written: dict[Buffer, Buffer]) -> None:
        """Other stagings of what is written are old."""
        for staged in self._stages.values():
            for buffer, place in written.items():
                if buffer in staged and staged[buffer] != place:
                    del staged[buffer]

    def _moved(self, op: Op, accesses: list[Access], places: dict[Buffer, Buffer], *, inward: bool) -> Op:
        kind, lane = _mover(op, inward=inward)
        moved: list[Access] = []
        for access in accesses:
            content: Content | None = access.needs if inward else access.leaves
            name = "file" if access.buffer.place is Place.SAVED else str(access.buffer.place)
            file, stage = (access.buffer, name), (places[access.buffer], f"staged_{name}")
            (source, source_role), (target, target_role) = (file, stage) if inward else (stage, file)
            moved += [Access(source_role, source, content, None), Access(target_role, target, None, content)]
        return Op(kind, lane, tuple(moved), op.unit, op.tile, op.micro)


def _mover(op: Op, *, inward: bool) -> tuple[OpKind, LaneName]:
    if op.kind is OpKind.SPILL:
        return OpKind.WRITE_SAVED, LaneName.DISK_SPILL
    if op.kind is OpKind.FETCH:
        return OpKind.READ_SAVED, LaneName.DISK_FETCH
    if op.lane is not LaneName.UPDATE:
        return OpKind.READ_WEIGHTS, LaneName.DISK_FEED
    if op.kind is OpKind.UPDATE_ROWS:
        return (OpKind.READ_ROWS, LaneName.DISK_READ) if inward else (OpKind.WRITE_ROWS, LaneName.DISK_WRITE)
    return (OpKind.READ_STATE, LaneName.DISK_READ) if inward else (OpKind.WRITE_STATE, LaneName.DISK_WRITE)
