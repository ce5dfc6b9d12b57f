"""What several kinds of op do alike: where a unit's weights, gradients and state are, and what is found there.

The pieces of effects.py, which puts them together kind by kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.ops import Content, Op, OpKind, Place
from slideformer.schedule.options import StepOptions, Update

STATE = (Place.WEIGHT, Place.RESIDUAL, Place.EXP_AVG, Place.EXP_AVG_SQ)


class Effect(NamedTuple):
    """An access without its position: the role, the kind of buffer, what is found there and what is left there."""

    role: str
    place: Place
    needs: Content | None
    leaves: Content | None


class Pieces:
    """Of the plans of one layout and one set of options."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        self.layout, self.options = layout, options
        self.trained = [u.train_numel > 0 for u in layout.units]
        self.num_tiles = [len(layout.tiles(i)) for i in range(len(layout.units))]
        self.boundary = {unit: b for b, unit in enumerate(layout.blocks)}
        self.glue, self.final = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
        self.eager = options.update is Update.EAGER
        self.resident, self.sliced = frozenset(options.resident), options.sliced_head
        self.disk = frozenset(options.disk)
        self.in_two = 0 in options.ahead and self.trained[0]  # the table, rows that the next batch touches first
        below = [0, *([] if self.glue is None else [self.glue]), *layout.blocks]
        self.lowest = min((u for u in below if self.trained[u]), default=len(layout.units))

    def norms(self) -> list[tuple[int, int]]:
        """(unit, part) of every norm of a step. Part 1 of the table: the rows that the batch touches."""
        parts = [(u, 0) for u, trained in enumerate(self.trained) if trained and (u or self.layout.tied)]
        return parts + ([(0, 1)] if self.trained[0] else [])

    @property
    def _read_planes(self) -> tuple[Place, ...]:
        return STATE[: 2 if self.options.fp32_compute else 1]

    def _between(
        self, contents: tuple[Place, ...], unit: int, tile: int, version: int | str, kind: OpKind
    ) -> Iterator[Effect]:
        for place in contents:
            if (str(place), unit) in self.disk:
                content = (str(place), unit, tile, version)
                staged = Place.STAGED_WEIGHTS if kind is OpKind.READ_WEIGHTS else Place.STAGED_STATE
                file, stage = (str(place), place), (f"staged_{place}", staged)
                written = kind in (OpKind.WRITE_STATE, OpKind.WRITE_ROWS)
                source, target = (stage, file) if written else (file, stage)
                yield Effect(*source, content, None)
                yield Effect(*target, None, content)

    def _saved(self, op: Op) -> Place:
        """On the host as far as that has room; which positions those are, `check` looks at."""
        places = {a.buffer.place for a in op.accesses}
        return Place.STAGED_SAVED if Place.STAGED_SAVED in places and not self.options.gds else Place.SAVED

    def _planes(self, op: Op) -> Iterator[Effect]:
        """Of a tile that an op reads: staged if on disk, but for an upload that comes straight from there."""
        straight = op.kind is OpKind.UPLOAD and self.options.gds and not self.options.fp32_compute
        for place in self._read_planes:
            held = Place.STAGED_WEIGHTS if (str(place), op.unit) in self.disk and not straight else place
            yield Effect(str(place), held, (str(place), op.unit, op.tile, 0), None)
        if op.unit == 0 and self.in_two and op.kind is not OpKind.GATHER:
            yield Effect("other_rows", Place.OTHER_ROWS, ("other_rows", 0, op.tile, 0), None)

    def _state(self, unit: int, tile: int, needs: int | str, leaves: int | str | None = None) -> Iterator[Effect]:
        for place in STATE:
            held = Place.STAGED_STATE if (str(place), unit) in self.disk else place
            left = None if leaves is None else (str(place), unit, tile, leaves)
            yield Effect(str(place), held, (str(place), unit, tile, needs), left)

    def _weights(self, role: str, unit: int) -> Effect:
        if unit in self.resident:
            return Effect(role, Place.HOME, ("home", unit, 0), None)
        place = Place.SLOT if unit in self.boundary else Place.DENSE
        return Effect(role, place, ("weights", unit, self.num_tiles[unit]), None)

    def _norms(self) -> Iterator[Effect]:
        for key in self.norms():
            yield Effect("norms", Place.NORM_HOST, ("norm", *key), None)

    def _home(self, unit: int) -> Iterator[Effect]:
        yield Effect("verdict", Place.VERDICT, ("verdict",), None)
        yield Effect("home", Place.HOME, ("home", unit, 0), ("home", unit, 1))

    def _block(self, unit: int, micro: int) -> Iterator[Effect]:
        yield self._weights("weights", unit)
        yield Effect("call", Place.CALL, ("call", micro), None)
        yield Effect("input", Place.HIDDEN, ("x", self.boundary[unit], micro), None)

    def _embedding(self) -> Iterator[Effect]:
        yield Effect("batch", Place.BATCH, ("batch",), None)
        yield Effect("rows", Place.ROWS, ("rows",), None)
        if self.glue is not None:
            yield self._weights("glue", self.glue)

    def _partial(self, role: str, unit: int | None, micro: int) -> Iterator[Effect]:
        if unit is not None and self.trained[unit]:
            needs = ("sum", unit, micro) if micro else None
            yield Effect(role, self._sum(unit), needs, ("sum", unit, micro + 1))

    def _sum(self, unit: int) -> Place:
        """Micro-batches add up in fp32: beside a bf16 gradient, unless there is one micro-batch of a block."""
        if unit in self.boundary:
            single = self.options.fp32_compute or self.options.micro_batches == 1
            return self._grad(unit) if single else Place.GRAD_SUM
        return Place.DENSE_GRAD if self.options.fp32_compute else Place.DENSE_SUM

    def _grad(self, unit: int) -> Place:
        """A block's gradient leaves its slot soon, unless it waits on the device for the verdict or is late."""
        waits = unit in self.resident if not self.eager else unit in self.options.late
        return Place.GRAD if unit in self.boundary and not waits else Place.DENSE_GRAD

    def _row_sum(self) -> Place:
        return Place.ROW_GRAD if self.options.fp32_compute else Place.ROW_SUM

    def _landing(self) -> Place:
        return Place.RING if self.eager else Place.GRAD_HOST

    def _part(self, unit: int, tile: int) -> int:
        """Tiles of a sliced projection leave before its whole norm is known, and have norms of their own."""
        return 2 + tile if self.sliced and unit == self.layout.output else 0

    def _permits(self, unit: int, part: int) -> Iterator[Effect]:
        yield Effect("verdict", Place.VERDICT, ("verdict",), None)
        if self.eager:
            yield Effect("norms", Place.NORM_HOST, ("norm", unit, part), None)


def copied(source: Place, target: Place, value: Content) -> Iterator[Effect]:
    yield Effect("source", source, value, None)
    yield Effect("target", target, None, value)


def summed(total: Place, grad: Place, full: Content, done: Content) -> Iterator[Effect]:
    if total is grad:
        yield Effect("grad", grad, full, done)
    else:
        yield Effect("sum", total, full, None)
        yield Effect("grad", grad, None, done)
