"""What every kind of op must need and leave, stated a second time and independently of the program.

The program chooses the order of the ops and the position of every buffer; nothing here knows either. What an op of one
kind does for its unit, tile and micro-batch is fixed, and this file is where it is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slideformer.layout import Layout
from slideformer.schedule.effect_pieces import STATE, Effect, Pieces, copied, summed
from slideformer.schedule.ops import Op, OpKind, Place
from slideformer.schedule.options import StepOptions

AHEAD = {OpKind.UPDATE_AHEAD, OpKind.REST_AHEAD}
SETTLES = {OpKind.SETTLE, OpKind.SETTLE_ROWS}
COMPLETES = {OpKind.COMPLETE, OpKind.COMPLETE_ROWS}


class Effects(Pieces):
    """The effects of every op of the plans of one layout and one set of options."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        super().__init__(layout, options)
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
                yield from copied(Place.HIDDEN, self._saved(op), value)
            case OpKind.FETCH if value[:1] in (("x",), ("d",)) and value[2] == op.micro:
                yield from copied(self._saved(op), Place.HIDDEN, value)
            case OpKind.REPORT if value[:2] == ("norm", op.unit):
                yield from copied(Place.NORM, Place.NORM_HOST, value)
            case OpKind.SPILL | OpKind.FETCH | OpKind.REPORT:
                yield Effect("source", Place.HIDDEN, (f"a content of {op}",), None)
            case OpKind.DOWNLOAD_ROWS:
                yield from copied(Place.ROW_GRAD, Place.ROW_GRAD_HOST, ("row_grad",))
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
                yield from summed(self._sum(unit), self._grad(unit), ("sum", unit, full), ("grad", unit))
                yield Effect("norm", Place.NORM, None, ("norm", unit, 0))
                if op.kind is OpKind.REDUCE_OUTPUT and self.layout.tied:
                    yield Effect("batch", Place.BATCH, ("batch",), None)
                    yield Effect("row_grad", self._row_sum(), None, ("row_sum", 0))
            case OpKind.REDUCE_ROWS:
                yield from summed(self._row_sum(), Place.ROW_GRAD, ("row_sum", full), ("row_grad",))
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
            case OpKind.UPDATE_TABLE:
                if self.layout.tied:
                    yield Effect("grad", self._landing(), ("landed", 0, tile), None)
                yield Effect("row_grad", Place.ROW_GRAD_HOST, ("row_grad",), None)
                yield Effect("verdict", Place.VERDICT, ("verdict",), None)
                yield from self._state(0, tile, 0, 1)
            case OpKind.UPDATE_REST if self.layout.tied:
                yield Effect("grad", self._landing(), ("landed", 0, tile), None)
                yield from self._permits(0, self._part(0, tile))
                yield from self._state(0, tile, 0, "rest")
            case OpKind.UPDATE_REST:
                yield Effect("verdict", Place.VERDICT, ("verdict",), None)
                yield from self._state(0, tile, 0, "rest")
            case kind if kind in AHEAD | SETTLES | COMPLETES:
                yield from self._early(op)
            case OpKind.SETTLE_OTHERS:
                yield from self._others(tile)
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
            if unit == 0:
                yield Effect("other_rows", Place.OTHER_ROWS, ("other_rows", 0, tile, 0), None)
            yield Effect("spare", Place.SPARE, None, ("spare", unit, tile))
            if whole:
                yield Effect("norms", Place.NORM_HOST, ("norm", unit, self._part(unit, tile)), None)
            return
        before, after = ("spare", "settled") if settles else ("settled", "spent")
        yield Effect("verdict", Place.VERDICT, ("verdict",), None)
        yield Effect("spare", Place.SPARE, (before, unit, tile), (after, unit, tile))
        if unit == 0:
            yield Effect("row_grad", Place.ROW_GRAD_HOST, ("row_grad",), None)
            if settles:
                yield Effect(
                    "other_rows", Place.OTHER_ROWS, ("other_rows", 0, tile, 0), ("other_rows", 0, tile, "left")
                )
        for effect in self._state(unit, tile, *((0, "settled") if settles else ("settled", 1))):
            if effect.place not in self._read_planes:
                yield effect
            elif settles:
                yield effect._replace(leaves=(str(effect.place), unit, tile, 1))

    def _others(self, tile: int) -> Iterator[Effect]:
        """The rows of a tile of the table that this batch touches and the next does not. Whoever reads those that the
        next does may do so at the same time."""
        yield Effect("row_grad", Place.ROW_GRAD_HOST, ("row_grad",), None)
        yield Effect("verdict", Place.VERDICT, ("verdict",), None)
        yield Effect("spare", Place.SPARE, ("settled", 0, tile), None)
        yield Effect("other_rows", Place.OTHER_ROWS, ("other_rows", 0, tile, "left"), ("other_rows", 0, tile, 1))
        for place in STATE:
            read = place in self._read_planes
            found = (str(place), 0, tile, 1 if read else "settled")
            yield Effect(str(place), place, found, None if read else found)

    def _stored(self, op: Op) -> Iterator[Effect]:
        """Between disk and staging memory: what of a tile is on disk, for its update (of the table, eager: the first,
        which leaves the touched rows to the second), or for whoever reads weights."""
        unit, tile = op.unit, op.tile
        first = (0, "rest" if unit == 0 and self.eager else 1)
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
