"""Writes down one pass of text generation: every prompt gets one token more.

A pass walks up the units once, all micro-batches of prompts through one before the next, so weights cross the link once
for one token of every prompt. The first pass takes whole prompts and leaves the keys and values of every block and
micro-batch; each later one takes a token a row, finds them and appends its own. They stay on the device as far as it
has room; the others lie on the host, are fetched through a ring, and only their new columns go back. What surrounds the
blocks is uploaded in the first pass and stays. Runs of later passes join: the first blocks of the next one cross while
this one's tokens are still being chosen.
"""

from __future__ import annotations

from slideformer.layout import Layout
from slideformer.schedule.disk import staged
from slideformer.schedule.ops import Access, Buffer, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.pass_options import PassOptions
from slideformer.schedule.program import Program
from slideformer.schedule.waits import derive

KEPT = frozenset({Place.DENSE, Place.CACHE, Place.CACHE_HOST, Place.SEQUENCES})
"""What a pass leaves for the next, beside the state."""

SLICES = 2
"""Positions that the tiles of a sliced output projection take in turn."""


def pass_ops(layout: Layout, options: PassOptions) -> tuple[Op, ...]:
    """The ops of `build_pass` without their waits."""
    return staged(_PassProgram(layout, options).write(), options)


def build_pass(layout: Layout, options: PassOptions) -> Plan:
    """The plan of one pass; it leaves every weight as it was."""
    ops = pass_ops(layout, options)
    return Plan(ops, derive(ops), trains=False, name="first pass" if options.first else "pass", keeps=KEPT)


class _PassProgram(Program):
    loads = LaneName.FETCH  # not behind the weights, which need not wait for tokens

    def __init__(self, layout: Layout, options: PassOptions) -> None:
        super().__init__(layout, options)
        self.first, self._ring, self._on_device = options.first, options.cache_ring, options.cached_on_device
        self._num_passed = 0  # keys and values that have gone through the ring

    def begin(self) -> None:
        self.upload_blocks(0)
        if self.first:
            self.upload_glue()
        feed = Buffer(Place.FEED)
        self.emit(OpKind.NEXT, LaneName.GATHER, self._sequences(), Access("feed", feed, None, ("feed",)))
        self.load_rows()

    def load(self) -> None:
        feed = Access("feed", Buffer(Place.FEED), ("feed",), None)
        self.emit(OpKind.LOAD, self.loads, feed, Access("batch", Buffer(Place.BATCH), None, ("batch",)))

    def upload_output(self, visit: int) -> None:
        if self.first:
            super().upload_output(visit)

    def climb(self, visit: int) -> None:
        unit = self.blocks[visit]
        for micro in range(self.num_micro):
            if visit == 0:
                self.embed(micro)
            source, target = ("x", visit, micro), ("x", visit + 1, micro)
            x = self.hidden.need(source)
            y = self.hidden.produce(target, uses=1, pooled=True, keep=(source,))
            cache = self._cache(visit, micro)
            found, left = None if self.first else ("cache", unit, micro, 0), ("cache", unit, micro, 1)
            accesses = [self.block_weights(visit), self.call(micro), Access("cache", cache, found, left)]
            accesses += [Access("input", x, source, None), Access("hidden", y, None, target)]
            self.emit(OpKind.FORWARD_CACHED, LaneName.COMPUTE, *accesses, unit=unit, micro=micro)
            self.hidden.used(source)
            if cache.place is Place.CACHE_RING:
                host = Access("target", Buffer(Place.CACHE_HOST, (unit, micro)), found, left)
                source_of = Access("source", cache, left, None)
                self.emit(OpKind.SPILL_CACHE, LaneName.SPILL, source_of, host, unit=unit, micro=micro)

    def _cache(self, visit: int, micro: int) -> Buffer:
        """Where the block finds its keys and values; fetched there, if their place is the host."""
        unit = self.blocks[visit]
        if visit * self.num_micro + micro < self._on_device:
            return Buffer(Place.CACHE, (unit, micro))
        cache = Buffer(Place.CACHE_RING, (self._num_passed % self._ring,))
        self._num_passed += 1
        if not self.first:
            content = ("cache", unit, micro, 0)
            source = Access("source", Buffer(Place.CACHE_HOST, (unit, micro)), content, None)
            target = Access("target", cache, None, content)
            self.emit(OpKind.FETCH_CACHE, LaneName.FETCH, source, target, unit=unit, micro=micro)
        return cache

    def embed(self, micro: int) -> None:
        value = ("x", 0, micro)
        x = self.hidden.produce(value, uses=1, pooled=True)
        accesses = [self.batch(), *self.glue_weights()]
        accesses += [Access("call", Buffer(Place.CALL, (micro,)), None, ("call", micro))]
        accesses += [Access("hidden", x, None, value)]
        self.emit(OpKind.EMBED_CACHED, LaneName.COMPUTE, *accesses, unit=self.table, micro=micro)

    def turn(self) -> None:
        """The last position of every row through the head, a token for each, and the tokens to their sequences."""
        for micro in range(self.num_micro):
            value = ("x", len(self.blocks), micro)
            accesses = [*self.final_weights(), Access("input", self.hidden.need(value), value, None)]
            accesses.append(Access("state", self._state(micro), None, ("logits", micro, 0)))
            self.emit(OpKind.HEAD_LAST, LaneName.COMPUTE, *accesses, unit=self.output, micro=micro)
            self.hidden.used(value)
        num_parts = self._logits()
        for micro in range(self.num_micro):
            state = Access("state", self._state(micro), ("logits", micro, num_parts), ("spent", micro))
            tokens, landed = Buffer(Place.TOKENS, (micro,)), Buffer(Place.TOKENS_HOST, (micro,))
            chosen = Access("tokens", tokens, None, ("tokens", micro))
            self.emit(OpKind.HEAD_PICK, LaneName.COMPUTE, state, chosen, unit=self.output, micro=micro)
            source = Access("source", tokens, ("tokens", micro), None)
            target = Access("target", landed, None, ("tokens", micro))
            self.emit(OpKind.REPORT_TOKENS, LaneName.DOWNLOAD, source, target, micro=micro)
        landed_all = [
            Access("tokens", Buffer(Place.TOKENS_HOST, (m,)), ("tokens", m), None) for m in range(self.num_micro)
        ]
        ends = Access("sequences", Buffer(Place.SEQUENCES), ("sequences", 0), ("sequences", 1))
        self.emit(OpKind.TAKE, LaneName.UPDATE, *landed_all, ends)

    def _logits(self) -> int:
        """Logits of every micro-batch, from one part of the projection after the other. Returns how many parts."""
        if not self.options.sliced_head:
            whole = self.weights(self.output, "weights")
            self.emit(OpKind.HEAD_LOGITS, LaneName.COMPUTE, whole, *self._with_states(0), unit=self.output)
            return 1
        tiles = self.layout.tiles(self.output)
        for tile in tiles:
            position = Buffer(Place.SLICE, (tile.index % SLICES,))
            into = Access("slice", position, None, ("slice", tile.index))
            at = {"unit": self.output, "tile": tile.index}
            self.emit(OpKind.UPLOAD, LaneName.UPLOAD, *self.planes(self.output, tile.index), into, **at)
            part = Access("weights", position, ("slice", tile.index), None)
            self.emit(OpKind.HEAD_LOGITS, LaneName.COMPUTE, part, *self._with_states(tile.index), **at)
        return len(tiles)

    def _with_states(self, before: int) -> list[Access]:
        """The bias, and every micro-batch's logits, one part further."""
        micros = range(self.num_micro)
        states = [Access("state", self._state(m), ("logits", m, before), ("logits", m, before + 1)) for m in micros]
        return [*self.final_weights(), *states]

    @staticmethod
    def _state(micro: int) -> Buffer:
        return Buffer(Place.HEAD_STATE, (micro,))

    @staticmethod
    def _sequences() -> Access:
        return Access("sequences", Buffer(Place.SEQUENCES), ("sequences", 0), None)
