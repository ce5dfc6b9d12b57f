"""What every kind of op must need and leave, stated a second time and independently of the program.

The program chooses the order of the ops and the position of every buffer; nothing here knows either. What an op of one
kind does for its unit, tile and micro-batch is fixed, and this file is where it is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.ops import Content, Op, OpKind, Place
from slideformer.schedule.options import StepOptions, Update

STATE = (Place.WEIGHT, Place.RESIDUAL, Place.EXP_AVG, Place.EXP_AVG_SQ)
AHEAD = {OpKind.UPDATE_AHEAD, OpKind.REST_AHEAD}
SETTLES, COMPLETES = {OpKind.SETTLE, OpKind.SETTLE_ROWS}, {OpKind.COMPLETE, OpKind.COMPLETE_ROWS}


class Effect(NamedTuple):
    """An access without its position: the role, the kind of buffer, what is found there and what is left there."""

    role: str
    place: Place
    needs: Content | None
    leaves: Content | None


class Effects:
    """The effects of every op of the plans of one layout and one set of options."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        self.layout, self.options = layout, options
        self.trained = [u.train_numel > 0 for u in layout.units]
        self.num_tiles = [len(layout.tiles(i)) for i in range(len(layout.units))]
        self.boundary = {unit: b for b, unit in enumerate(layout.blocks)}
        self.glue, self.final = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
        self.eager = options.update is Update.EAGER
        self.resident, self.sliced = frozenset(options.resident), options.sliced_head
        self.disk = frozenset(options.disk)
        below = [0, *([] if self.glue is None else [self.glue]), *layout.blocks]
        self.lowest = min((u for u in below if self.trained[u]), default=len(layout.units))
        self._group_of: dict[OpKind, Callable[[Op], Iterator[Effect]]] = {}  # which of the groups below knows a kind

    def of(self, op: Op) -> list[Effect]:
        """In no particular order."""
        known = self._group_of.get(op.kind)
        if known is not None and (found := list(known(op))):
            return found
        for group in (self._up, self._across, self._down, self._sliced, self._reduced, self._host, self._stored):
            if found := list(group(op)):
                self._group_of[op.kind] = group
                return found
        raise AssertionError(f"{op} is of a kind without effects")

    def norms(self) -> list[tuple[int, int]]:
        """(unit, part) of every norm of a step. Part 1 of the table: the rows that the batch touches."""
        parts = [(u, 0) for u, trained in enumerate(self.trained) if trained and (u or self.layout.tied)]
        return parts + ([(0, 1)] if self.trained[0] else [])

    def _up(self, op: Op) -> Iterator[Effect]:
        unit, tile, micro = op.unit, op.tile, op.micro
        match op.kind:
            case OpKind.LOAD:
                yield Effect("batch", Place.BATCH, None, ("batch",))
            case OpKind.GATHER:
                yield from self._planes(op)
                yield Effect("rows", Place.ROWS_HOST, ("rows", tile) if tile else None, ("rows", tile + 1))
            case OpKind.PICK_ROWS:
                yield Effect("batch", Place.BATCH, ("batch",), None)
                yield self._weights("table", 0)
                yield Effect("target", Place.ROWS, None, ("rows",))
            case OpKind.UPLOAD if self.sliced and unit == self.layout.output:
                yield from self._planes(op)
                yield Effect("slice", Place.SLICE, None, ("slice", tile))
            case OpKind.UPLOAD:
                yield from self._planes(op)
                place = Place.SLOT if unit in self.boundary else Place.DENSE
                yield Effect("target", place, ("weights", unit, tile) if tile else None, ("weights", unit, tile + 1))
            case OpKind.EMBED:
                yield from self._embedding()
                yield Effect("call", Place.CALL, None, ("call", micro))
                yield Effect("hidden", Place.HIDDEN, None, ("x", 0, micro))
            case OpKind.FORWARD | OpKind.FORWARD_KEEP:
                yield from self._block(unit, micro)
                yield Effect("hidden", Place.HIDDEN, None, ("x", self.boundary[unit] + 1, micro))
                if op.kind is OpKind.FORWARD_KEEP:
                    yield Effect("graph", Place.GRAPH, None, ("graph", unit, micro))

    def _across(self, op: Op) -> Iterator[Effect]:
        """Ops that copy a content as it is."""
        value = next((a.needs for a in op.accesses if a.role == "source"), None) or ()
        match op.kind:
            case OpKind.UPLOAD_ROWS:
                yield Effect("source", Place.ROWS_HOST, ("rows", self.num_tiles[0]), None)
                yield Effect("target", Place.ROWS, None, ("rows",))
            case OpKind.SPILL if value[:1] in (("x",), ("d",)) and value[2] == op.micro:
                yield from _copy(Place.HIDDEN, self._saved(op), value)
            case OpKind.FETCH if value[:1] in (("x",), ("d",)) and value[2] == op.micro:
                yield from _copy(self._saved(op), Place.HIDDEN, value)
            case OpKind.REPORT if value[:2] == ("norm", op.unit):
                yield from _copy(Place.NORM, Place.NORM_HOST, value)
            case OpKind.SPILL | OpKind.FETCH | OpKind.REPORT:
                yield Effect("source", Place.HIDDEN, (f"a content of {op}",), None)
            case OpKind.DOWNLOAD_ROWS:
                yield from _copy(Place.ROW_GRAD, Place.ROW_GRAD_HOST, ("row_grad",))
            case OpKind.REPORT_LOSS:
                yield Effect("source", Place.LOSS, ("loss", self.options.micro_batches), None)
                yield Effect("target", Place.LOSS_HOST, None, ("loss",))
            case OpKind.DOWNLOAD:
                if self.sliced and op.unit == self.layout.output:
                    yield Effect("slice", Place.SLICE_GRAD, ("slice_grad", op.tile), None)
                else:
                    yield Effect("source", self._grad(op.unit), ("grad", op.unit), None)
                yield Effect("target", self._landing(), None, ("landed", op.unit, op.tile))

    def _down(self, op: Op) -> Iterator[Effect]:
        unit, micro, top = op.unit, op.micro, len(self.layout.blocks)
        match op.kind:
            case OpKind.HEAD | OpKind.HEAD_LOSS:
                yield Effect("batch", Place.BATCH, ("batch",), None)
                yield self._weights("output", self.layout.output)
                if self.final is not None:
                    yield self._weights("final", self.final)
                yield Effect("input", Place.HIDDEN, ("x", top, micro), None)
                yield Effect("loss", Place.LOSS, ("loss", micro) if micro else None, ("loss", micro + 1))
                if op.kind is OpKind.HEAD:
                    if self.lowest < len(self.layout.units):
                        yield Effect("hidden_grad", Place.HIDDEN, None, ("d", top, micro))
                    yield from self._partial("output_grad", self.layout.output, micro)
                    yield from self._partial("final_grad", self.final, micro)
            case OpKind.BACKWARD | OpKind.BACKWARD_KEPT:
                block = self.boundary[unit]
                below = ("d", block, micro) if self.lowest < unit else None
                if op.kind is OpKind.BACKWARD:
                    yield from self._block(unit, micro)
                else:
                    yield self._weights("weights", unit)
                    yield Effect("graph", Place.GRAPH, ("graph", unit, micro), ("spent", unit, micro))
                yield Effect("hidden_grad", Place.HIDDEN, ("d", block + 1, micro), below)
                yield from self._partial("grad", unit, micro)
            case OpKind.EMBED_BACKWARD:
                yield from self._embedding()
                yield Effect("hidden_grad", Place.HIDDEN, ("d", 0, micro), None)
                yield from self._partial("glue_grad", self.glue, micro)
                if self.trained[0]:
                    needs = ("row_sum", micro) if micro or self.layout.tied else None
                    yield Effect("row_grad", self._row_sum(), needs, ("row_sum", micro + 1))

    def _sliced(self, op: Op) -> Iterator[Effect]:
        """k tiles taken after each op of a kind: first all of them upward, then the loss, then all of them downward."""
        unit, tile, micro, micros = op.unit, op.tile, op.micro, range(self.options.micro_batches)
        tiles = self.num_tiles[self.layout.output]
        trained = self.trained[self.layout.output]
        final = [] if self.final is None else [self._weights("final", self.final)]
        match op.kind:
            case OpKind.HEAD_OPEN:
                yield from (Effect("batch", Place.BATCH, ("batch",), None), *final)
                yield Effect("input", Place.HIDDEN, ("x", len(self.layout.blocks), micro), None)
                yield Effect("state", Place.HEAD_STATE, None, ("head", micro, 0))
            case OpKind.HEAD_SEE | OpKind.HEAD_GRADS:
                before = tile if op.kind is OpKind.HEAD_SEE else 2 * tiles - tile
                yield from (Effect("weights", Place.SLICE, ("slice", tile), None), *final)
                for m in micros:
                    yield Effect("state", Place.HEAD_STATE, ("head", m, before), ("head", m, before + 1))
                if op.kind is OpKind.HEAD_GRADS and trained:
                    yield Effect("grad", Place.SLICE_SUM, None, ("slice_sum", tile))
            case OpKind.HEAD_TOTAL:
                for m in micros:
                    yield Effect("state", Place.HEAD_STATE, ("head", m, tiles), ("head", m, tiles + 1))
                yield Effect("loss", Place.LOSS, None, ("loss", len(micros)))
            case OpKind.HEAD_CLOSE:
                yield from (Effect("batch", Place.BATCH, ("batch",), None), *final)
                yield Effect("state", Place.HEAD_STATE, ("head", micro, 2 * tiles + 1), ("spent", micro))
                if self.lowest < len(self.layout.units):
                    yield Effect("hidden_grad", Place.HIDDEN, None, ("d", len(self.layout.blocks), micro))
                yield from self._partial("final_grad", self.final, micro)
            case OpKind.REDUCE_SLICE:
                done = tiles - 1 - tile
                yield Effect("sum", Place.SLICE_SUM, ("slice_sum", tile), None)
                yield Effect("grad", Place.SLICE_GRAD, None, ("slice_grad", tile))
                yield Effect(
                    "row_norms", Place.ROW_NORM, ("row_norms", done) if done else None, ("row_norms", done + 1)
                )
                yield Effect("norm", Place.NORM, None, ("norm", unit, 2 + tile))
                if self.layout.tied:
                    yield Effect("batch", Place.BATCH, ("batch",), None)
                    leaves = ("row_sum", 0) if tile == 0 else ("row_part", done + 1)
                    yield Effect("row_grad", self._row_sum(), ("row_part", done) if done else None, leaves)
            case OpKind.NORM_OUTPUT:
                yield Effect("row_norms", Place.ROW_NORM, ("row_norms", tiles), None)
                yield Effect("norm", Place.NORM, None, ("norm", unit, 0))

    def _reduced(self, op: Op) -> Iterator[Effect]:
        unit, full = op.unit, self.options.micro_batches
        match op.kind:
            case OpKind.REDUCE | OpKind.REDUCE_OUTPUT:
                yield from _sum(self._sum(unit), self._grad(unit), ("sum", unit, full), ("grad", unit))
                yield Effect("norm", Place.NORM, None, ("norm", unit, 0))
                if op.kind is OpKind.REDUCE_OUTPUT and self.layout.tied:
                    yield Effect("batch", Place.BATCH, ("batch",), None)
                    yield Effect("row_grad", self._row_sum(), None, ("row_sum", 0))
            case OpKind.REDUCE_ROWS:
                yield from _sum(self._row_sum(), Place.ROW_GRAD, ("row_sum", full), ("row_grad",))
                yield Effect("norm", Place.NORM, None, ("norm", 0, 1))

    def _host(self, op: Op) -> Iterator[Effect]:
        unit, tile = op.unit, op.tile
        loss = Effect("loss", Place.LOSS_HOST, ("loss",), None)
        match op.kind:
            case OpKind.RESULT:
                yield loss
            case OpKind.GUARD:
                yield from (loss, Effect("verdict", Place.VERDICT, None, ("verdict",)))
            case OpKind.DECIDE:
                yield from (loss, *self._norms(), Effect("verdict", Place.VERDICT, None, ("verdict",)))
            case OpKind.TOTAL:
                yield from (*self._norms(), Effect("verdict", Place.VERDICT, ("verdict",), None))
            case OpKind.UPDATE_RESIDENT:
                yield Effect("grad", self._grad(unit), ("grad", unit), None)
                yield from self._home(unit)
            case OpKind.UPDATE_RESIDENT_TABLE:
                yield Effect("batch", Place.BATCH, ("batch",), None)
                yield Effect("row_grad", Place.ROW_GRAD, ("row_grad",), None)
                if self.layout.tied:
                    yield Effect("grad", Place.DENSE_GRAD, ("grad", 0), ("spent", 0))
                yield from self._home(0)
            case OpKind.UPDATE:
                yield Effect("grad", self._landing(), ("landed", unit, tile), None)
                yield from self._permits(unit, self._part(unit, tile))
                yield from self._state(unit, tile, 0, 1)
            case OpKind.UPDATE_REST if self.layout.tied:
                yield Effect("grad", self._landing(), ("landed", 0, tile), None)
                yield from self._permits(0, self._part(0, tile))
                yield from self._state(0, tile, 0, "rest")
            case OpKind.UPDATE_REST:
                yield Effect("verdict", Place.VERDICT, ("verdict",), None)
                yield from self._state(0, tile, 0, "rest")
            case kind if kind in AHEAD | SETTLES | COMPLETES:
                yield from self._early(op)
            case OpKind.UPDATE_ROWS:
                yield Effect("grad", Place.ROW_GRAD_HOST, ("row_grad",), None)
                yield from self._permits(0, 1)
                yield from self._state(0, tile, "rest", 1)

    def _early(self, op: Op) -> Iterator[Effect]:
        """Updates ahead of the verdict, and what becomes of them in two turns: uploads wait for the first alone."""
        unit, tile, whole = op.unit, op.tile, op.unit or self.layout.tied
        settles = op.kind in SETTLES
        if whole:
            yield Effect("grad", Place.GRAD_HOST, ("landed", unit, tile), None)
        if op.kind in AHEAD:
            yield from self._state(unit, tile, 0)
            yield Effect("spare", Place.SPARE, None, ("spare", unit, tile))
            if whole:
                yield Effect("norms", Place.NORM_HOST, ("norm", unit, self._part(unit, tile)), None)
            return
        before, after = ("spare", "settled") if settles else ("settled", "spent")
        yield Effect("verdict", Place.VERDICT, ("verdict",), None)
        yield Effect("spare", Place.SPARE, (before, unit, tile), (after, unit, tile))
        if unit == 0:
            yield Effect("row_grad", Place.ROW_GRAD_HOST, ("row_grad",), None)
        for effect in self._state(unit, tile, *((0, "settled") if settles else ("settled", 1))):
            if effect.place not in self._read_planes:
                yield effect
            elif settles:
                yield effect._replace(leaves=(str(effect.place), unit, tile, 1))

    def _stored(self, op: Op) -> Iterator[Effect]:
        """Between disk and staging memory: what of a tile is on disk, for its update (of the table: the first, which
        leaves the touched rows to the second), or for whoever reads weights."""
        unit, tile = op.unit, op.tile
        first = (0, "rest" if unit == 0 else 1)
        match op.kind:
            case OpKind.READ_STATE | OpKind.WRITE_STATE:
                yield from self._between(STATE, unit, tile, first[op.kind is OpKind.WRITE_STATE], op.kind)
            case OpKind.READ_ROWS | OpKind.WRITE_ROWS:
                yield from self._between(STATE, 0, tile, "rest" if op.kind is OpKind.READ_ROWS else 1, op.kind)
            case OpKind.READ_WEIGHTS:
                yield from self._between(self._read_planes, unit, tile, 0, op.kind)
            case OpKind.READ_SAVED | OpKind.WRITE_SAVED:
                value = next((a.needs for a in op.accesses if a.needs is not None), None) or ()
                if value[:1] in (("x",), ("d",)) and value[2] == op.micro:
                    file, stage = ("file", Place.SAVED), ("staged_file", Place.STAGED_SAVED)
                    source, target = (file, stage) if op.kind is OpKind.READ_SAVED else (stage, file)
                    yield Effect(*source, value, None)
                    yield Effect(*target, None, value)
                else:
                    yield Effect("file", Place.SAVED, (f"a content of {op}",), None)

    # pieces

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


def _copy(source: Place, target: Place, value: Content) -> Iterator[Effect]:
    yield Effect("source", source, value, None)
    yield Effect("target", target, None, value)


def _sum(total: Place, grad: Place, full: Content, done: Content) -> Iterator[Effect]:
    if total is grad:
        yield Effect("grad", grad, full, done)
    else:
        yield Effect("sum", total, full, None)
        yield Effect("grad", grad, None, done)
