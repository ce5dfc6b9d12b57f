"""What every kind of op of a pass of generation must need and leave, stated a second time and independently of the
program; and what a pass finds and leaves beside the weights."""

from __future__ import annotations

from collections.abc import Iterator

from slideformer.layout import Layout
from slideformer.schedule.effect_pieces import Effect
from slideformer.schedule.effects import Effects
from slideformer.schedule.ops import Buffer, Content, Op, OpKind, Place
from slideformer.schedule.pass_options import PassOptions


class PassEffects(Effects):
    """The effects of every op of the passes of one layout and one set of options."""

    def __init__(self, layout: Layout, options: PassOptions) -> None:
        super().__init__(layout, options)
        self.options: PassOptions = options
        self.num_parts = self.num_tiles[layout.output] if options.sliced_head else 1

    def of(self, op: Op) -> list[Effect]:
        for group in (self._moved, self._ran, self._chosen):
            found = list(group(op))
            if found:
                return found
        return super().of(op)

    def found(self, buffer: Buffer) -> Content | None:
        """What a pass finds in a buffer that passes keep. The first pass finds the prompts and nothing else."""
        place, index = buffer
        if place is Place.SEQUENCES:
            return ("sequences", 0)
        if self.options.first:
            return None
        if place is Place.DENSE:
            return ("weights", index[0], self.num_tiles[index[0]])
        return ("cache", *index, 0) if place in (Place.CACHE, Place.CACHE_HOST) else None

    def left(self) -> dict[Buffer, Content]:
        """What it leaves for the next one, which takes it for the version that it finds: keys and values of every block
        and micro-batch, what surrounds the blocks, and the sequences."""
        left: dict[Buffer, Content] = {Buffer(Place.SEQUENCES): ("sequences", 1)}
        around = {self.glue, self.final, None if self.sliced else self.layout.output} - {None} - self.resident
        for unit in sorted(u for u in around if u is not None):
            left[Buffer(Place.DENSE, (unit,))] = ("weights", unit, self.num_tiles[unit])
        for unit in self.layout.blocks:
            for micro in range(self.options.micro_batches):
                place = Place.CACHE if self._stays(unit, micro) else Place.CACHE_HOST
                left[Buffer(place, (unit, micro))] = ("cache", unit, micro, 1)
        return left

    def _moved(self, op: Op) -> Iterator[Effect]:
        before, after = self._versions(op.unit, op.micro)
        match op.kind:
            case OpKind.NEXT:
                yield Effect("sequences", Place.SEQUENCES, ("sequences", 0), None)
                yield Effect("feed", Place.FEED, None, ("feed",))
            case OpKind.LOAD:
                yield Effect("feed", Place.FEED, ("feed",), None)
                yield Effect("batch", Place.BATCH, None, ("batch",))
            case OpKind.FETCH_CACHE:
                yield Effect("source", Place.CACHE_HOST, before, None)
                yield Effect("target", Place.CACHE_RING, None, before)
            case OpKind.SPILL_CACHE:
                yield Effect("source", Place.CACHE_RING, after, None)
                yield Effect("target", Place.CACHE_HOST, before, after)

    def _ran(self, op: Op) -> Iterator[Effect]:
        unit, micro = op.unit, op.micro
        match op.kind:
            case OpKind.EMBED_CACHED:
                yield from self._embedding()
                yield Effect("call", Place.CALL, None, ("call", micro))
                yield Effect("hidden", Place.HIDDEN, None, ("x", 0, micro))
            case OpKind.FORWARD_CACHED:
                yield from self._block(unit, micro)
                yield Effect("hidden", Place.HIDDEN, None, ("x", self.boundary[unit] + 1, micro))
                place = Place.CACHE if self._stays(unit, micro) else Place.CACHE_RING
                yield Effect("cache", place, *self._versions(unit, micro))

    def _chosen(self, op: Op) -> Iterator[Effect]:
        micro, micros = op.micro, range(self.options.micro_batches)
        final = [] if self.final is None else [self._weights("final", self.final)]
        match op.kind:
            case OpKind.HEAD_LAST:
                yield from final
                yield Effect("input", Place.HIDDEN, ("x", len(self.layout.blocks), micro), None)
                yield Effect("state", Place.HEAD_STATE, None, ("logits", micro, 0))
            case OpKind.HEAD_LOGITS:
                part = max(op.tile, 0)
                if self.sliced:
                    yield Effect("weights", Place.SLICE, ("slice", part), None)
                else:
                    yield self._weights("weights", self.layout.output)
                yield from final
                for m in micros:
                    yield Effect("state", Place.HEAD_STATE, ("logits", m, part), ("logits", m, part + 1))
            case OpKind.HEAD_PICK:
                yield Effect("state", Place.HEAD_STATE, ("logits", micro, self.num_parts), ("spent", micro))
                yield Effect("tokens", Place.TOKENS, None, ("tokens", micro))
            case OpKind.REPORT_TOKENS:
                yield Effect("source", Place.TOKENS, ("tokens", micro), None)
                yield Effect("target", Place.TOKENS_HOST, None, ("tokens", micro))
            case OpKind.TAKE:
                for m in micros:
                    yield Effect("tokens", Place.TOKENS_HOST, ("tokens", m), None)
                yield Effect("sequences", Place.SEQUENCES, ("sequences", 0), ("sequences", 1))

    def _stays(self, unit: int, micro: int) -> bool:
        return self.boundary[unit] * self.options.micro_batches + micro < self.options.cached_on_device

    def _versions(self, unit: int, micro: int) -> tuple[Content | None, Content]:
        """Of keys and values, before and after the block has run."""
        return None if self.options.first else ("cache", unit, micro, 0), ("cache", unit, micro, 1)
