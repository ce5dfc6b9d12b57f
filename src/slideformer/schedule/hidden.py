"""Where hidden states and hidden gradients lie during a step: device positions, and host positions when spilled.

A value gets a device position of its own while the pool lasts; the others pass through a ring whose positions are
taken in turn, so that a fetch can run ahead of the op that needs it. A value that is pushed out of the ring and
has uses left is spilled first. Program order is all this file thinks about; overlap follows from the waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slideformer.schedule.ops import Access, Buffer, Content, LaneName, Op, OpKind, Place


class HiddenPositions:
    """Assigns positions and emits spills and fetches. Positions [0, pool) are the pool, the rest the ring."""

    def __init__(self, emit: Callable[[Op], None], *, pool: int, ring: int) -> None:
        if ring < 2:
            raise ValueError(f"hidden_ring is {ring}, must be at least 2: one op holds two hidden states at once")
        self._emit = emit
        self._free_pool = deque(range(pool))
        self._pool = pool
        self._ring = deque(range(pool, pool + ring))
        self._at: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._uses: dict[Content, int] = {}
        self._saved_at: dict[Content, int] = {}
        self._free_saved: list[int] = []
        self.num_saved = 0

    def produce(self, value: Content, *, uses: int, pooled: bool, keep: tuple[Content, ...] = ()) -> Buffer:
        """A position for a new value that will be used `uses` times. `keep`: values that must not be pushed out."""
        if uses < 1:
            raise ValueError(f"{value} is produced but never used")
        position = self._free_pool.popleft() if pooled and self._free_pool else self._take_ring(keep)
        self._put(value, position)
        self._uses[value] = uses
        return Buffer(Place.HIDDEN, (position,))

    def need(self, value: Content, *, keep: tuple[Content, ...] = ()) -> Buffer:
        """The device position of a live value, fetched back where it was spilled."""
        if value not in self._at:
            position = self._take_ring(keep)
            self._put(value, position)
            saved = Buffer(Place.SAVED, (self._saved_at[value],))
            target = Buffer(Place.HIDDEN, (position,))
            accesses = (Access("source", saved, value, None), Access("target", target, None, value))
            self._emit(Op(OpKind.FETCH, LaneName.FETCH, accesses, micro=int(value[2])))
        return Buffer(Place.HIDDEN, (self._at[value],))

    def used(self, value: Content) -> None:
        """One use is over; after the last, the positions are free."""
        self._uses[value] -= 1
        if self._uses[value] == 0:
            self._drop(value)

    def replace(self, old: Content, new: Content, *, uses: int) -> None:
        """`new` has overwritten `old` in its place. With no uses the position is free."""
        position = self._at[old]
        self._drop(old, keep_position=True)
        if uses:
            self._put(new, position)
            self._uses[new] = uses
        else:
            self._release(position)

    def _put(self, value: Content, position: int) -> None:
        self._at[value] = position
        self._content[position] = value

    def _drop(self, value: Content, *, keep_position: bool = False) -> None:
        position = self._at.pop(value, None)
        if position is not None:
            del self._content[position]
            if not keep_position:
                self._release(position)
        if value in self._saved_at:
            self._free_saved.append(self._saved_at.pop(value))
        del self._uses[value]

    def _release(self, position: int) -> None:
        if position < self._pool:
            self._free_pool.append(position)

    def _take_ring(self, keep: tuple[Content, ...]) -> int:
        """The oldest free position while two or more are free, so that the next fetch need not wait for the op before
        it; else the oldest. Pushing a live value out earlier costs a spill and a fetch, later it costs the overlap
        (28 blocks of 11 + 33 ms, 2 micro-batches, no pool, ring of 4, simulated: 84 spills and 1.53 s a step for the
        oldest always, 56 and 1.43 s for this)."""
        held = {self._at[v] for v in keep if v in self._at}
        choice = [p for p in self._ring if p not in held]
        free = [p for p in choice if p not in self._content]
        position = free[0] if len(free) > 1 else choice[0]
        self._ring.remove(position)
        self._ring.append(position)
        value = self._content.pop(position, None)
        if value is not None:
            if value not in self._saved_at:
                self._spill(value, position)
            del self._at[value]
        return position

    def _spill(self, value: Content, position: int) -> None:
        if self._free_saved:
            saved = self._free_saved.pop(0)
        else:
            saved, self.num_saved = self.num_saved, self.num_saved + 1
        self._saved_at[value] = saved
        source, target = Buffer(Place.HIDDEN, (position,)), Buffer(Place.SAVED, (saved,))
        accesses = (Access("source", source, value, None), Access("target", target, None, value))
        self._emit(Op(OpKind.SPILL, LaneName.SPILL, accesses, micro=int(value[2])))
